"""Key maps: how the names in a checkpoint become the names of the restore target.

Wrapping a module renames every key of its state (``DistributedDataParallel`` puts ``module.`` in
front, ``torch.compile`` ``_orig_mod.``, each where it was applied, in any nesting). Nothing is
renamed unless a `key_map` asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, cast

from deltackpt_store.errors import InvalidInputError, MismatchError, told

from .reading import shown

KeyMap = Mapping[str, str] | Callable[[str], str] | Literal["unwrap"]
"""What `key_map` may be.

- ``"unwrap"``: wrapper names are ignored on both sides, wherever in the key they stand.
- a mapping of prefixes: ``{"module.": ""}`` strips it, ``{"encoder.": "backbone."}`` renames,
  ``{"": "module."}`` adds. The longest matching prefix counts; one that is stripped (mapped to
  ``""``) is looked for again in what remains, so nested prefixes go entirely.
- a function from the key in the checkpoint to the key in the target.

Keys are those of one module's ``state_dict``, without the module's own name in the state. In a
mapping they may also be written as paths, as errors print them: ``{"model/old.": "model/new."}``
is about the module "model" alone.
"""

_TRIED = 16
"""Keys of each side that a hint is made of."""

WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
)


def unwrapped(key: str) -> str:
    """`key` without the names that wrappers put into it; the last name always stays."""
    *names, last = key.split(".")
    return ".".join([*(name for name in names if name not in WRAPPERS), last])


def check_key_map(key_map: object) -> None:
    """`InvalidInputError` unless `key_map` is one (see :data:`KeyMap`) or None."""
    if key_map is None or key_map == "unwrap" or callable(key_map):
        return
    if isinstance(key_map, Mapping):
        pairs = cast("Mapping[object, object]", key_map).items()
        if all(isinstance(old, str) and isinstance(new, str) for old, new in pairs):
            return
    raise InvalidInputError(
        'key_map must be "unwrap", a function or a mapping of str prefixes, not '
        + told(cast("object", key_map)),
        option="key_map",
    )


def of_module(key_map: KeyMap | None, path: str) -> KeyMap | None:
    """`key_map` for the keys of the module at `path`: entries written as its paths become keys."""
    if not isinstance(key_map, Mapping):
        return key_map
    own = f"{path}/"
    pairs = sorted(  # what is said of this module alone comes last, and counts
        cast("Mapping[str, str]", key_map).items(), key=lambda pair: pair[0].startswith(own)
    )
    return {old.removeprefix(own): new.removeprefix(own) for old, new in pairs}


def check_matched(key_map: KeyMap | None, keys: Mapping[str, Collection[str]]) -> None:
    """`InvalidInputError` naming the entries of a mapping that match no key of the checkpoint.

    `keys`: path of each module -> its keys in the checkpoint.
    """
    if not isinstance(key_map, Mapping):
        return
    entries = cast("Mapping[str, str]", key_map)
    used: set[str] = set()
    for path, names in keys.items():
        prefixes = cast("Mapping[str, str]", of_module(entries, path))
        found = {old for name in names for old in _chain(prefixes, name)[1]}
        used.update(old for old in entries if old.removeprefix(f"{path}/") in found)
    unused = [old for old in entries if old not in used]
    if unused:
        known = [f"{path}/{name}" for path, names in keys.items() for name in names]
        raise InvalidInputError(
            f"key_map: {', '.join(map(repr, unused))} is the beginning of no key of the checkpoint",
            kind="no-match",
            hint=f"its keys are {shown(known, 8)}; the path of the module may be left out"
            if known
            else "it renames keys within a module, not modules, and the checkpoint has none of"
            " those in the state: name them there as the checkpoint does",
            option="key_map",
        )


def map_key(key_map: KeyMap | None, key: str) -> str:
    """The target's key for the checkpoint's `key` ("unwrap": a form common to both)."""
    if key_map is None:
        return key
    if key_map == "unwrap":
        return unwrapped(key)
    if isinstance(key_map, Mapping):
        return _chain(cast("Mapping[str, str]", key_map), key)[0]
    try:
        mapped: object = cast("Callable[[str], object]", key_map)(key)
    except Exception as error:
        raise InvalidInputError(
            f"key_map raised {type(error).__name__} for {key!r}: {error}",
            kind="key-map",
            hint="it is called with every key of a module; return those that it has nothing to say"
            " about as they are",
            option="key_map",
            key=key,
        ) from error
    if not isinstance(mapped, str):
        raise InvalidInputError(
            f"key_map returned {told(mapped)} for {key!r}; it must return the key in the target",
            option="key_map",
            key=key,
        )
    return mapped


def _chain(prefixes: Mapping[str, str], key: str) -> tuple[str, list[str]]:
    """What becomes of `key`, and the prefixes that matched on the way."""
    matched: list[str] = []
    while True:
        matching = [old for old in prefixes if key.startswith(old)]
        if not matching:
            return key, matched
        matched += matching
        old = max(matching, key=len)
        key = prefixes[old] + key[len(old) :]
        if prefixes[old] or not old:
            return key, matched


def pair_keys(
    key_map: KeyMap | None, saved: Iterable[str], present: Iterable[str], *, path: str
) -> dict[str, str]:
    """Which key of the checkpoint goes to which key of the target, for those that have a partner.

    `MismatchError` when two keys of one side become the same.
    """
    sources = _unique(key_map, saved, path, "checkpoint")
    if key_map == "unwrap":
        targets = _unique(key_map, present, path, "target")
    else:
        targets = {key: key for key in present}
    return {key: targets[mapped] for mapped, key in sources.items() if mapped in targets}


def _unique(key_map: KeyMap | None, keys: Iterable[str], path: str, side: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in keys:
        other = found.setdefault(map_key(key_map, key), key)
        if other != key:
            raise MismatchError(
                f"{path}: key_map gives {other!r} and {key!r} of the {side} one name, "
                f"{map_key(key_map, key)!r}",
                kind="key-map",
                hint="use a key_map that keeps keys apart",
                path=path,
            )
    return found


def wrapping_hint(saved: Iterable[str], present: Iterable[str]) -> str | None:
    """What to try when the keys would match but for wrappers, None when they would not."""
    left = {unwrapped(key) for key in saved}
    right = {unwrapped(key) for key in present}
    if left and left == right:
        return (
            "the keys differ only by what DistributedDataParallel or torch.compile puts in front "
            'of them: pass key_map="unwrap"'
        )
    return None


def renaming_hint(saved: Sequence[str], present: Sequence[str], *, whole: bool) -> str | None:
    """The renamed prefix that finds partners for most keys of both sides (of one module).

    ``""`` is one only when no key of the module has a partner yet (`whole`).
    """
    if not saved or not present:
        return None
    pairs = itertools.product(saved[:_TRIED], present[:_TRIED])
    examples = dict.fromkeys(_renamed(old, new, 0 if whole else 1) for old, new in pairs)
    here = frozenset(present)

    def partners(example: tuple[str, str]) -> int:
        old, new = example
        return sum(key.startswith(old) and new + key.removeprefix(old) in here for key in saved)

    example = dict([max(examples, key=partners)])
    return f"key_map renames keys that are named otherwise here, such as key_map={example}"


def _renamed(old: str, new: str, least: int) -> tuple[str, str]:
    """What is left of two keys without the names at their ends that are equal."""
    left, right = old.split("."), new.split(".")
    equal = 0
    while equal < min(len(left) - least, len(right)) and left[~equal] == right[~equal]:
        equal += 1
    end = ".".join(left[len(left) - equal :])
    return old.removesuffix(end), new.removesuffix(end)
