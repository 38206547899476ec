"""Repairing the small files of a store: FORMAT, commits, manifests, pins, generations.

Their content cannot be computed again (but for FORMAT's), so it is taken from a copy, and only when
that is proved to be the very same: a manifest by its name, a commit by the digest under which its
successor or a pin names it, and otherwise only from a copy of the same store that has not parted
from it before that commit. The damaged file is given a name in the quarantine first, then its own
name changes over in one step.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from deltackpt_store.errors import (
    CorruptionError,
    DeltackptError,
    NotFoundError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import FileIO, publish_bytes, read_file, replace_bytes
from deltackpt_store.format_file import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_FORMAT_BYTES,
    Format,
    encode_format,
    new_format,
)
from deltackpt_store.generation import twin_of
from deltackpt_store.index import list_packs
from deltackpt_store.lost_commits import LOST
from deltackpt_store.manifest import Commit
from deltackpt_store.manifest_io import (
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    closure_digest,
    decode_commit,
    digest_of,
)
from deltackpt_store.names import is_digest_name, parse_number
from deltackpt_store.oserror import DAMAGE
from deltackpt_store.pack import HEADER_BYTES, decode_header, pack_path
from deltackpt_store.parted import Place, shared_commits
from deltackpt_store.quarantine import QUARANTINE, is_directory, keep, set_aside
from deltackpt_store.store import Store
from deltackpt_store.verify import Finding

_PIN = re.compile(r"pins/([^/]+)\Z")
_COMMIT = re.compile(r"runs/([^/]+)/([0-9]{20})\Z")
_MAX_PIN_BYTES = 4096


class Mended(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is whole again. `kind` and `name` as of a finding; `source` is where the right
    content came from: a path in the store, the path of another store, or words."""

    kind: str
    name: str
    source: str


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that stays as it is, and why."""

    kind: str
    name: str
    reason: str


class RecordRepair:
    """Repairs commits, manifests, pins and generations among `findings`. Used by one thread, under
    the lock of garbage collection."""

    def __init__(self, store: Store, others: Sequence[Store], *, dry_run: bool) -> None:
        self.mended: list[Mended] = []
        self.left: list[Left] = []
        self.quarantined: list[str] = []
        self._store = store
        self._others = others
        self._dry_run = dry_run
        self._names: dict[Place, bytes] | None = None
        self._shared: dict[str, Mapping[Place, Commit]] = {}

    def work(self, findings: Iterable[Finding]) -> None:
        """OSError when the store refuses to be written."""
        for finding in findings:
            if finding.reason == LOST:
                continue  # see `repair_lost`
            if finding.kind == "manifest":
                self._mend(finding, self._manifest)
            elif finding.kind == "commit":
                self._mend(finding, self.commit_copies)
            elif finding.kind == "pin":
                self._mend(finding, self._pin)
            elif finding.kind == "generation":
                self._mend(finding, self._generation)
            elif finding.kind in ("store", "value"):
                self._leave(finding, finding.reason)

    def _mend(
        self, finding: Finding, candidates: Callable[[Finding], Iterator[tuple[str, bytes]]]
    ) -> None:
        try:
            found = next(candidates(finding), None)
        except UnsupportedFormatError as error:
            self._leave(finding, error.message)
            return
        if found is None:
            self._leave(finding, f"{finding.reason}; no copy of it was found")
            return
        source, data = found
        if not self._dry_run:
            try:
                aside = put_right(self._store.io, self._store.path, finding.name, data)
            except OSError as error:
                self._leave(finding, f"it cannot be replaced: {error.strerror or error}")
                return
            if aside is not None:
                self.quarantined.append(aside)
            if finding.kind == "commit" and self._names is not None:
                self._learn(self._names, decode_commit(data, name=finding.name))
        self.mended.append(Mended(kind=finding.kind, name=finding.name, source=source))

    def _leave(self, finding: Finding, reason: str) -> None:
        self.left.append(Left(kind=finding.kind, name=finding.name, reason=reason))

    # candidates ----------------------------------------------------------------------------

    def _copies(self, name: str, limit: int) -> Iterator[tuple[Store, str, bytes]]:
        """(store, description, bytes) of every copy of a file, the quarantine's first."""
        aside = f"{QUARANTINE}/{name}"
        places = [(self._store, f"{self._store.path}/{aside}", aside)]
        places += [(other, f"{other.path}/{name}", other.path) for other in self._others]
        for store, path, description in places:
            try:
                yield store, description, read_file(store.io, path, limit)
            except OSError:
                continue

    def _manifest(self, finding: Finding) -> Iterator[tuple[str, bytes]]:
        name = finding.name.removeprefix("manifests/")
        if not is_digest_name(name):
            return
        digest = bytes.fromhex(name)
        if self._content(finding.name, MAX_MANIFEST_BYTES, digest_of) == digest:
            raise UnsupportedFormatError(
                f"{finding.reason}; the file is what was written, a copy would not differ"
            )
        yield from self.manifest_copies(finding.name)

    def manifest_copies(self, path: str) -> Iterator[tuple[str, bytes]]:
        """(source, content) of every copy of the manifest at `path`, a name that fits."""
        digest = bytes.fromhex(path.removeprefix("manifests/"))
        for _, source, data in self._copies(path, MAX_MANIFEST_BYTES):
            if digest_of(data) == digest:
                yield source, data

    def commit_copies(self, finding: Finding) -> Iterator[tuple[str, bytes]]:
        """(source, content) of every copy that is the commit a finding speaks of."""
        match = _COMMIT.match(finding.name)
        number = parse_number(match[2]) if match else None
        if match is None or number is None:
            return
        run = match[1]
        self._content(finding.name, MAX_COMMIT_BYTES, decode_commit)  # raises when it is newer
        named = self._named(run, number)
        for store, source, data in self._copies(finding.name, MAX_COMMIT_BYTES):
            try:
                commit = decode_commit(data, name=finding.name)
            except DeltackptError:
                continue
            if (commit.run, commit.number) != (run, number):
                continue
            if commit.digest == named if named else self._may_be_ours(store, commit):
                yield source, data

    def _may_be_ours(self, store: Store, commit: Commit) -> bool:
        """Whether a commit of `store` that nothing here names is of this store's history."""
        if store.uuid != self._store.uuid:
            return False
        return store is self._store or (commit.run, commit.number) in self.shared(store)

    def _named(self, run: str, number: int) -> bytes | None:
        """The digest by which another record names that commit."""
        if self._names is None:
            self._names = {}
            for pin in self._store.pins().values():
                self._names[pin.run, pin.number] = pin.digest
            for other in self._store.runs():
                for commit in self._store.commits(other):
                    self._learn(self._names, commit)
        return self._names.get((run, number))

    @staticmethod
    def _learn(names: dict[Place, bytes], commit: Commit) -> None:
        if commit.parent is not None:
            names[commit.parent[:2]] = commit.parent[2]

    def shared(self, copy: Store) -> Mapping[Place, Commit]:
        """What `shared_commits` says of a copy of the store, found out once."""
        if copy.path not in self._shared:
            self._shared[copy.path] = shared_commits(self._store, copy)
        return self._shared[copy.path]

    def _generation(self, finding: Finding) -> Iterator[tuple[str, bytes]]:
        twin = twin_of(self._store.io, self._store.path, finding.name)
        if twin is None:
            raise UnsupportedFormatError(
                f"{finding.reason}, and it has no sound copy: `deltackpt gc` begins a new one"
            )
        yield twin

    def _pin(self, finding: Finding) -> Iterator[tuple[str, bytes]]:
        match = _PIN.match(finding.name)
        if match is None:
            return
        try:
            self._store.read_pin(match[1])
            return  # the pin is whole: what it names is not
        except (CorruptionError, NotFoundError):
            pass
        for store, source, data in self._copies(finding.name, _MAX_PIN_BYTES):
            if store is self._store or store.uuid != self._store.uuid:
                continue
            try:
                store.read_pin(match[1])
            except DeltackptError:
                continue
            yield source, data

    def _content(self, name: str, limit: int, read: Callable[[bytes], object]) -> object | None:
        """What `read` makes of the file, None when it is damaged or missing."""
        try:
            return read(read_file(self._store.io, f"{self._store.path}/{name}", limit))
        except UnsupportedFormatError:
            raise
        except DeltackptError:
            return None
        except OSError as error:
            if error.errno in DAMAGE or isinstance(error, FileNotFoundError):
                return None
            raise


def put_right(io: FileIO, root: str, relative: str, data: bytes) -> str | None:
    """Make the file at `relative` hold `data`; what was there stays in the quarantine, under the
    path returned. OSError.

    At no moment is the name free (nobody else can take the number of a commit meanwhile), unless
    a directory lay there; then FileExistsError when somebody did.
    """
    path = f"{root}/{relative}"
    if is_directory(io, path):
        aside = set_aside(io, root, relative)
        publish_bytes(io, path, data)
        return aside
    try:
        publish_bytes(io, path, data)
        return None
    except FileExistsError:
        aside = keep(io, root, relative)
        replace_bytes(io, path, data)
        return aside


def mend_format(
    io: FileIO, root: str, others: Sequence[Store], *, dry_run: bool
) -> tuple[Format, str, str | None]:
    """FORMAT of a store whose file is damaged or lost, and where it comes from: the headers of its
    packs, a copy among `others`, or, where no step needs a pack, nowhere: then any number will do.
    Written unless `dry_run`. Also the path of the damaged one in the quarantine.

    CorruptionError when nothing tells, UnsupportedFormatError when it may have been newer.
    """
    path = f"{root}/{FORMAT_NAME}"
    _refuse_newer(io, path)
    found = {uuid for name in list_packs(io, root) if (uuid := _uuid_of(io, root, name))}
    if len(found) > 1:
        raise _untold(path, "are of several stores")
    if found:
        value, source = Format(store=found.pop().hex()), "the headers of the packs"
    else:
        value, source = _without_packs(Store(root, io, new_format()), others)
    aside = None if dry_run else put_right(io, root, FORMAT_NAME, encode_format(value))
    return value, source, aside


def _without_packs(store: Store, others: Sequence[Store]) -> tuple[Format, str]:
    """FORMAT of a store without a readable pack; that of `store` is a fresh one."""
    for other in others:
        if _share_a_commit(store, other):
            return Format(store=other.uuid.hex()), other.path
    if not _need_no_pack(store):
        raise _untold(f"{store.path}/{FORMAT_NAME}", "do not tell what it held")
    return store.format, "a new number, as no file of the store names the old one"


def _share_a_commit(store: Store, other: Store) -> bool:
    for run in other.runs():
        for commit in other.commits(run):
            with contextlib.suppress(DeltackptError):
                if store.read_commit(run, commit.number).digest == commit.digest:
                    return True
    return False


def _need_no_pack(store: Store) -> bool:
    """Whether no listed or pinned commit names a pack, and all that could can be read."""
    commits = [store.commits(run) for run in store.runs()]
    pins = store.pins()
    if pins.damaged or any(of_run.damaged for of_run in commits):
        return False
    pinned = [store.read_commit(pin.run, pin.number) for pin in pins.values()]
    return all(c.closure == closure_digest(()) for c in (*chain(*commits), *pinned))


def _untold(path: str, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} is damaged, and the packs {why}",
        kind="damaged-format",
        hint="run `deltackpt repair --from` a copy of the store, or copy FORMAT back from one",
        path=path,
    )


def _refuse_newer(io: FileIO, path: str) -> None:
    """UnsupportedFormatError when the first line of FORMAT names a newer version or features."""
    try:
        line = read_file(io, path, MAX_FORMAT_BYTES).partition(b"\n")[0]
        value = msgspec.json.decode(line, type=Format)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return
    if value.deltackpt != FORMAT_VERSION or value.read or value.write or value.gc:
        raise UnsupportedFormatError(
            f"{path} is damaged, and seems to be of a newer version",
            hint="copy FORMAT back from a copy of the store, or upgrade deltackpt",
            path=path,
        )


def _uuid_of(io: FileIO, root: str, name: str) -> bytes | None:
    path = pack_path(root, name)
    try:
        handle = io.open(path)
        try:
            data = bytearray(HEADER_BYTES)
            got = io.read_into(handle, [data], 0)
        finally:
            io.close(handle)
        header = decode_header(bytes(data[:got]), path)
    except (OSError, DeltackptError):
        return None
    return header.store_uuid if header.name == name else None
