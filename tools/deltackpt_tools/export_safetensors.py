"""One step as a safetensors file: tensors only, without torch, in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from io import BufferedRandom

from deltackpt_store.errors import InvalidInputError, NotFoundError, StateError
from deltackpt_store.manifest import Commit, Snapshot

from deltackpt_tools.progress import Progress
from deltackpt_tools.publish import require_room
from deltackpt_tools.safetensors_file import Entry, header, ordered, problem
from deltackpt_tools.selection import Selection, flat_names
from deltackpt_tools.structure import array_slots
from deltackpt_tools.tensor_bytes import TensorBytes, tensor_nbytes


@dataclass(slots=True)
class Exported:
    """What an export wrote, and what it could not."""

    tensors: int = 0
    nbytes: int = 0
    values: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(path, why): values that the format has no place for, as expected."""
    refused: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(path, why): tensors that the format cannot hold."""
    changed: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(path, what became of it): values that the format holds in another form."""
    tied: list[list[str]] = field(default_factory=list[list[str]])
    """Groups of tensors that share bytes in the step, by name (torch files: by path)."""
    needs_trust: list[str] = field(default_factory=list[str])
    """Torch files: callables that torch.load(weights_only=True) does not allow."""


def export_safetensors(
    file: BufferedRandom,
    commit: Commit,
    snapshot: Snapshot,
    selection: Selection,
    source: TensorBytes,
) -> Exported:
    """Write the selected tensors to `file` (empty, at 0), row-major, each under its own name.

    The format knows no sharing: tied tensors are written once under each name and listed in
    `tied`. Tensors that the format cannot hold are left out and listed in `refused`.
    Raises InvalidInputError for names that collide, NotFoundError where none is a tensor,
    CorruptionError for damaged chunks.
    """
    result = Exported()
    paths = snapshot.layout.paths
    names = flat_names(snapshot, selection)
    views = {name: view for view in selection.tensors for name in [names[view.slot]]}
    entries: list[Entry] = []
    by_extent: defaultdict[int, list[str]] = defaultdict(list)
    arrays = array_slots(snapshot.layout.structure)
    for name, view in views.items():
        if view.slot in arrays:
            result.left_out.append((paths[view.slot], "a NumPy array"))
            continue
        if (reason := problem(view.dtype, view.shape)) is not None:
            result.refused.append((paths[view.slot], reason))
            continue
        entries.append(Entry(name, view.dtype, view.shape, tensor_nbytes(view)))
        by_extent[view.extent].append(name)
    result.left_out += [(path, "internal to the library") for path in selection.internal]
    result.left_out += [(paths[slot], "not a tensor") for slot in selection.values]
    if not entries and not result.refused:
        raise NotFoundError(
            "nothing that was chosen is a tensor, and a safetensors file holds nothing else",
            kind="nothing-selected", hint="--format torch writes plain values, too",
        )  # fmt: skip
    result.tied = [sorted(group) for group in by_extent.values() if len(group) > 1]
    entries = ordered(entries)
    metadata = {
        "format": "pt",
        "deltackpt.run": commit.run,
        "deltackpt.step": str(commit.step),
        "deltackpt.root": commit.root.hex(),
    }
    try:
        file.write(header(entries, metadata))
    except ValueError as error:
        raise InvalidInputError(str(error), hint="export fewer tensors with --only") from error
    total = sum(entry.nbytes for entry in entries)
    require_room(file, total)
    with Progress("export", total) as progress:
        for entry in entries:
            written = 0
            for piece in source.tensor(views[entry.name]):
                file.write(piece)
                written += len(piece)
                progress.advance(len(piece))
            if written != entry.nbytes:
                raise StateError(
                    f"{entry.name}: {written} bytes instead of {entry.nbytes}", kind="internal"
                )
    result.tensors, result.nbytes = len(entries), total
    return result
