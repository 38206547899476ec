"""Key maps: how the names in a checkpoint become the names of the restore target.

Wrapping a module renames every key of its state (``DistributedDataParallel`` puts ``module.`` in
front, ``torch.compile`` ``_orig_mod.``, each where it was applied, in any nesting). Nothing is
renamed unless a `key_map` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, cast

from deltackpt_store.errors import InvalidInputError, MismatchError

KeyMap = Mapping[str, str] | Callable[[str], str] | Literal["unwrap"]
"""What `key_map` may be.

- ``"unwrap"``: wrapper names are ignored on both sides, wherever in the key they stand.
- a mapping of prefixes: ``{"module.": ""}`` strips it, ``{"encoder.": "backbone."}`` renames,
  ``{"": "module."}`` adds. The longest matching prefix counts; one that is stripped (mapped to
  ``""``) is looked for again in what remains, so nested prefixes go entirely.
- a function from the key in the checkpoint to the key in the target.

Keys are those of one module's ``state_dict``, without the module's own name in the state.
"""

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
        f'key_map must be "unwrap", a function or a mapping of str prefixes, not {key_map!r}',
        option="key_map",
    )


def map_key(key_map: KeyMap | None, key: str) -> str:
    """The target's key for the checkpoint's `key` ("unwrap": a form common to both)."""
    if key_map is None:
        return key
    if key_map == "unwrap":
        return unwrapped(key)
    if isinstance(key_map, Mapping):
        return _map_prefix(cast("Mapping[str, str]", key_map), key)
    mapped: object = cast("Callable[[str], object]", key_map)(key)
    if not isinstance(mapped, str):
        raise InvalidInputError(
            f"key_map returned {mapped!r} for {key!r}; it must return the key in the target",
            option="key_map",
            key=key,
        )
    return mapped


def _map_prefix(prefixes: Mapping[str, str], key: str) -> str:
    while True:
        matching = [old for old in prefixes if key.startswith(old)]
        if not matching:
            return key
        old = max(matching, key=len)
        key = prefixes[old] + key[len(old) :]
        if prefixes[old] or not old:
            return key


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
