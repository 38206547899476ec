"""What many tests of this folder start from. What needs torch is imported only where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltackpt_store.store import Store
from small_store import SmallStore

if TYPE_CHECKING:
    from authors import Author
    from restoring import Keeper
    from saving import Opener


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store is to be made."""
    return tmp_path / "store"


@pytest.fixture
def opened(path: Path) -> Iterator[Opener]:
    """Opens checkpointers at `path`."""
    from saving import opener

    with opener(path) as open_one:
        yield open_one


@pytest.fixture
def keeper(path: Path) -> Keeper:
    """Saves states without a checkpointer."""
    from restoring import Keeper

    return Keeper(path)


@pytest.fixture
def small(path: Path) -> Iterator[SmallStore]:
    """A store whose steps are made of arrays, without torch."""
    made = SmallStore(path)
    yield made
    made.close()


@pytest.fixture
def store(path: Path) -> Store:
    """An empty store."""
    return Store.create(path)


@pytest.fixture
def new(store: Store) -> Iterator[Callable[..., Author]]:
    """Makes authors of steps of words in `store`, and closes them."""
    from collecting import authors_of

    yield from authors_of(store)
