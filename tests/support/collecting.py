"""What tests of garbage collection share: a store, its authors, and something to collect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from authors import Author
from deltackpt_store.retention import retire
from deltackpt_store.store import Store


def authors_of(store: Store) -> Iterator[Callable[..., Author]]:
    """Gives what makes authors of `store`, all of which it closes: the body of a fixture."""
    authors: list[Author] = []

    def open_one(name: str = "main", run: str = "main") -> Author:
        author = Author(Store.open(store.path), name)
        author.run = run
        if run in store.runs() and store.numbers(run):
            author.parent = store.head(run)
        authors.append(author)
        return author

    yield open_one
    for author in authors:
        author.close()


def with_garbage(store: Store, new: Callable[..., Author]) -> None:
    """Step 1 (retired) said "garbage", step 2 says "base"."""
    author = new()
    first = author.save(1, ["garbage"])
    author.save(2, ["base"])
    author.close()
    retire(store, [first])


def files(store: Store, top: str = "") -> list[str]:
    return sorted(str(p.relative_to(store.path)) for p in Path(store.path, top).rglob("*")
                  if p.is_file())  # fmt: skip
