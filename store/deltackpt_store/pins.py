"""Pins: names for commits that retention leaves alone.

A pin file is ``DCKPTPN`` + version byte + msgpack + BLAKE3-256 of all before.
"""

from __future__ import annotations

import logging

import msgspec
from blake3 import blake3

from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import publish_bytes
from deltackpt_store.manifest import Commit
from deltackpt_store.names import (
    LATEST,
    MAX_NUMBER,
    RETIRED_SUFFIX,
    check_name,
    is_name,
    number_name,
)
from deltackpt_store.oserror import storage_error, sync_directory
from deltackpt_store.records import Damaged, RecordFiles, some_of, unfindable

_log = logging.getLogger("deltackpt.store")

_PIN_MAGIC = b"DCKPTPN\x01"
_MAX_PIN_BYTES = 4096


class Pin(msgspec.Struct, frozen=True):
    """A name for one commit, which retention then leaves alone."""

    run: str
    number: int
    step: int
    digest: bytes


class Pins(dict[str, Pin]):
    """Pins by name; `damaged` holds those that could not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: list[Damaged] = []


class PinFiles(RecordFiles):
    """The pins of a store."""

    def pins(self) -> Pins:
        """All pins that can be read."""
        found = Pins()
        for name in sorted(filter(is_name, self._list("pins") or [])):
            try:
                found[name] = self.read_pin(name)
            except NotFoundError:
                if name not in (self._list("pins") or []):
                    continue  # removed in the meantime
                error = unfindable(
                    "pin", f"pins/{name}",
                    "run `deltackpt repair --from` a copy, or `deltackpt unpin` gives it up",
                )  # fmt: skip
            except (CorruptionError, UnsupportedFormatError) as bad:
                error = bad
            else:
                continue
            _log.warning("%s", error)
            found.damaged.append(Damaged(f"pins/{name}", error))
        return found

    def read_pin(self, name: str) -> Pin:
        """One pin, checked; NotFoundError, CorruptionError or UnsupportedFormatError."""
        check_name(name, "pin")
        relative = f"pins/{name}"
        data = self._read(relative, _MAX_PIN_BYTES, "pin")
        body, check = data[:-32], data[-32:]
        newer = body.startswith(_PIN_MAGIC[:-1]) and not body.startswith(_PIN_MAGIC)
        if newer and blake3(body).digest() == check:
            raise UnsupportedFormatError(
                f"pin {relative} has a newer format version",
                hint="upgrade deltackpt",
                path=relative,
            )
        try:
            if blake3(body).digest() != check or not body.startswith(_PIN_MAGIC):
                raise ValueError("its digest does not match its content")
            pin = msgspec.msgpack.decode(body[len(_PIN_MAGIC) :], type=Pin)
            if not is_name(pin.run) or not 0 <= pin.number < MAX_NUMBER or len(pin.digest) != 32:
                raise ValueError("it names an impossible commit")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptionError(
                f"pin {relative} is damaged: {error}", kind="damaged-pin", path=relative
            ) from error
        return pin

    def pin(self, name: str, commit: Commit) -> None:
        """Call `commit` `name`, durably. ConflictError when the name means another commit.

        From here on neither retention nor collection takes the commit. InvalidInputError for a name
        that means something else: ``latest``, or a run. NotFoundError (kind ``retired``) when
        retention took the commit before. StorageError where the folder of pins is gone:
        an empty one made for this pin would let collection take what others are for.
        """
        if check_name(name, "pin") == LATEST or name in (self._list("runs") or []):
            raise InvalidInputError(
                f"{name!r} cannot be the name of a pin: it means the newest step of a run",
                kind="bad-name", name=name,
                hint="choose another name, which comes first: deltackpt pin STORE NAME STEP",
            )  # fmt: skip
        pin = Pin(commit.run, commit.number, commit.step, commit.digest)
        body = _PIN_MAGIC + msgspec.msgpack.encode(pin)
        path = f"{self.path}/pins/{name}"
        try:
            self.io.list(f"{self.path}/pins")
            publish_bytes(self.io, path, body + blake3(body).digest())
        except FileExistsError:
            held = self.read_pin(name)
            if held != pin:
                raise ConflictError(
                    f"pin {name!r} already means {held.run}@{held.step}",
                    hint=f"unpin {name} first, or choose another name",
                    name=name,
                ) from None
            sync_directory(self.io, f"{self.path}/pins")  # who made it may have been killed
            return
        except OSError as error:
            raise storage_error(error, "write the pin", path) from error
        # After the pin: whoever retires the commit from now on sees it, and so does who collects.
        record = f"{self.path}/runs/{commit.run}/{number_name(commit.number)}"
        try:
            gone = self.io.exists(record + RETIRED_SUFFIX) or not self.io.exists(record)
        except OSError as error:
            raise storage_error(error, "look for", record) from error
        if gone:
            self.unpin(name)
            raise NotFoundError(
                f"step {commit.step} of run {commit.run!r} was removed by retention",
                kind="retired",
                hint="pin another step",
                run=commit.run,
                step=commit.step,
            )

    def unpin(self, name: str) -> None:
        """Forget a pin, durably; its commit stays until retention and collection take it."""
        path = f"{self.path}/pins/{check_name(name, 'pin')}"
        try:
            self.io.unlink(path)
            self.io.sync_directory(f"{self.path}/pins")
        except FileNotFoundError:
            raise self._no_pin(name) from None
        except OSError as error:
            raise storage_error(error, "remove the pin", path) from error

    def _no_pin(self, name: str) -> NotFoundError:
        pins = [pin for pin in self._list("pins") or [] if is_name(pin)]
        return NotFoundError(
            f"store {self.path} has no pin {name!r}",
            kind="unknown-pin",
            hint=f"it has {some_of(sorted(pins))}" if pins else "it has none",
            path=self.path,
            name=name,
        )
