"""One step as a file that `torch.load` reads, with its structure; torch is not needed here.

The file's object tree is written as opcodes by hand (see `pickle_out`), and each extent of the step
streams into it as one storage, so memory stays bounded and tied tensors stay tied. Tensors load on
the CPU. What ``torch.load(weights_only=True)`` would refuse is listed in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedRandom
from typing import Any, cast

from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.manifest import Snapshot, TensorView

from deltackpt_tools.export_safetensors import Exported
from deltackpt_tools.pickle_out import PickleOut
from deltackpt_tools.pickle_values import ValueEmitter, torch_layout
from deltackpt_tools.progress import Progress
from deltackpt_tools.publish import require_room
from deltackpt_tools.selection import INTERNAL, Selection, key_of
from deltackpt_tools.structure import (
    MAPPINGS,
    SEQUENCES,
    SPARSE,
    Node,
    check_tree,
    entries,
    parse_structure,
    slots_below,
)
from deltackpt_tools.tensor_bytes import TensorBytes
from deltackpt_tools.torch_archive import TorchArchive
from deltackpt_tools.torch_tensors import Storages


class _Tree:
    """Pushes the selected part of the state tree.

    Dict entries without a selected leaf vanish; list and tuple items without one become None.
    """

    def __init__(self, snapshot: Snapshot, selection: Selection, storages: Storages) -> None:
        self.out = PickleOut()
        self.values = ValueEmitter(self.out)
        self.emitted_values = 0
        self._snapshot = snapshot
        self._storages = storages
        self._keep = selection.slots
        self._views: dict[int, TensorView] = {view.slot: view for view in selection.tensors}

    def below(self, node: Node, prefix: str) -> Node:
        """What lies below `prefix`: the only child with selected leaves, as often as it has parts;
        a part that ends with a dot is taken off the keys."""
        *parts, begun = prefix.split("/")
        for _ in parts:
            children = node[-1] if node[0] in SEQUENCES else [child for _, child in entries(node)]
            (node,) = [child for child in children if self._holds(child)]
        return _without_beginning(node, key_of(begun)) if begun else node

    def _holds(self, node: Node) -> bool:
        slots = [node] if isinstance(node, int) else slots_below(node)
        return any(slot in self._keep for slot in slots)

    def node(self, node: Node) -> None:
        """Push a node that :func:`check_tree` has found well-formed."""
        if isinstance(node, int):
            self._leaf(node)
            return
        tag, *rest = cast("list[Any]", node)
        if tag in MAPPINGS:
            self._mapping(tag, rest)
        elif tag in SEQUENCES:
            self._sequence(tag, rest)
        elif tag in SPARSE:
            self._sparse(tag, rest)
        else:
            self._array(rest)

    def _kept(self, node: Node) -> bool:
        """Whether a selected leaf lies below, or no leaf at all. Of sparse tensors all parts
        count."""
        if isinstance(node, int):
            return node in self._keep
        slots = list(slots_below(node))
        chosen = [slot in self._keep for slot in slots]
        if node[0] in SPARSE:
            return all(chosen)
        return any(chosen) or not slots

    def _leaf(self, slot: int) -> None:
        view = self._views.get(slot)
        if view is not None:
            self._storages.emit(self.out, view)
        else:
            self.emitted_values += 1
            self.values.document(self._snapshot.objects[slot], self._snapshot.layout.paths[slot])

    def _mapping(self, tag: str, rest: list[Any]) -> None:
        out = self.out
        pairs = [pair for pair in entries([tag, *rest]) if self._kept(pair[1])]

        def items() -> None:
            for key, child in pairs:
                self.values.node(key, 0)
                self.node(child)

        if tag == "ctr":
            out.call("collections", "Counter", lambda: out.dict_of(items), count=1)
        elif tag == "dd":
            self.values.default_dict(rest[0], lambda: out.dict_of(items))
        else:
            out.dict_of(items, ordered=tag == "od")
        if tag == "od" and len(rest) > 1:
            out.attributes(
                lambda: out.dict_of(lambda: (out.text("_metadata"), self.values.node(rest[1], 0)))
            )

    def _sequence(self, tag: str, rest: list[Any]) -> None:
        out, nodes = self.out, cast("list[Any]", rest[-1])

        def items() -> None:
            for child in nodes:
                if self._kept(child):
                    self.node(child)
                else:
                    out.none()

        if tag == "l":
            out.list_of(items)
        elif tag == "dq":
            out.call(
                "collections", "deque",
                lambda: (out.list_of(items), self.values.node(rest[0], 0)), count=2,
            )  # fmt: skip
        else:
            if tag == "nt":
                first = next(slots_below([tag, *rest]), None)
                path = "" if first is None else self._snapshot.layout.paths[first]
                self.values.changed.append(
                    (path.rpartition("/")[0], f"the namedtuple {rest[0]}.{rest[1]} became a tuple")
                )
            out.tuple_of(items, count=len(nodes))

    def _sparse(self, tag: str, rest: list[Any]) -> None:
        out = self.out
        shape, *middle, parameter, requires_grad = rest

        def parts() -> None:
            slots = middle[1:] if tag == "coo" else middle
            for slot in slots:
                self._leaf(slot)
            out.call("torch", "Size", lambda: out.integers(shape), count=1)
            if tag == "coo":
                out.boolean(bool(middle[0]))

        def tensor() -> None:
            out.call(
                "torch._utils", "_rebuild_sparse_tensor",
                lambda: (torch_layout(out, f"sparse_{tag}"), out.tuple_of(parts, count=4)),
                count=2,
            )  # fmt: skip

        if parameter:
            self._storages.parameter(out, tensor, bool(requires_grad))
        else:
            tensor()

    def _array(self, rest: list[Any]) -> None:
        slot, description, shape = rest

        def emit() -> None:
            self.out.integers(shape)
            self.values.dtype("npd", [description], 0)
            self.out.call("numpy", "asarray", lambda: self._leaf(slot), count=1)

        self.out.call("numpy", "ndarray", emit, count=3)


def _without_internal(root: Node) -> Node:
    """The state without the library's own entries, empty ones included."""
    if isinstance(root, int) or root[0] not in MAPPINGS:
        return root
    kept = [
        [key, child]
        for key, child in entries(root)
        if not (isinstance(key, str) and key.startswith(INTERNAL))
    ]
    head = root[:2] if root[0] == "dd" else root[:1]
    return [*head, kept, *root[len(head) + 1 :]]


def _without_beginning(node: Node, begun: str) -> Node:
    """A mapping of what stands under keys that begin so, less that; a module's notes on its
    modules go, as they are by their full names."""
    kept = [
        [key.removeprefix(begun), child]
        for key, child in entries(node)
        if isinstance(key, str) and key.startswith(begun)
    ]
    return [*(node[:2] if node[0] == "dd" else node[:1]), kept]


def export_torch(
    file: BufferedRandom,
    snapshot: Snapshot,
    selection: Selection,
    source: TensorBytes,
) -> Exported:
    """Write the selected leaves, in their containers, to `file` (empty, at 0).

    With a prefix, the object in the file is what lies below it. Raises CorruptionError for a
    damaged chunk or a malformed structure.
    """
    storages = Storages(snapshot, selection)
    tree = _Tree(snapshot, selection, storages)
    try:
        root = _without_internal(parse_structure(snapshot.layout.structure))
        check_tree(root)
        tree.node(tree.below(root, selection.prefix))
    except (ValueError, TypeError, IndexError, KeyError, RecursionError) as error:
        if isinstance(error, DeltackptError):
            raise
        raise CorruptionError(
            f"malformed state structure: {type(error).__name__}: {error}", kind="structure"
        ) from error
    pickled = tree.out.finish()
    require_room(file, storages.nbytes)
    with TorchArchive(file) as archive, Progress("export", storages.nbytes) as progress:
        archive.record("data.pkl", [pickled], len(pickled))
        archive.record("byteorder", [b"little"], 6)
        for name, nbytes, pieces in storages.records(source):
            archive.record(name, _counted(pieces, progress), nbytes)
        archive.record("version", [b"3\n"], 2)
    paths = snapshot.layout.paths
    return Exported(
        tensors=len(selection.tensors),
        nbytes=storages.nbytes,
        values=tree.emitted_values,
        left_out=[(path, "internal to the library") for path in selection.internal],
        changed=[
            *tree.values.changed,
            *((paths[view.slot], "no longer shares memory") for view in storages.lone),
        ],
        tied=storages.tied(paths),
        needs_trust=sorted(tree.out.unsafe),
    )


def _counted(pieces: Iterator[memoryview], progress: Progress) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        progress.advance(len(piece))
