"""Pins: names for commits that retention leaves alone.

A pin file is ``DCKPTPN`` + version byte + msgpack + BLAKE3-256 of all before.
"""

from __future__ import annotations

import logging

import msgspec

from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import publish_bytes
from deltackpt_store.manifest import Commit
from deltackpt_store.names import LATEST, MAX_NUMBER, check_name, is_name
from deltackpt_store.oserror import storage_error, sync_directory
from deltackpt_store.records import (
    Damaged,
    RecordFiles,
    is_listed,
    retired,
    some_of,
    unfindable,
)
from deltackpt_store.sealed import is_newer, seal, unseal

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

    def all_pins(self) -> Pins:
        """All pins. One that cannot be read might be of any commit: its error is raised."""
        pins = self.pins()
        for damaged in pins.damaged:
            raise damaged.error
        return pins

    def read_pin(self, name: str) -> Pin:
        """One pin, checked; NotFoundError, CorruptionError or UnsupportedFormatError."""
        check_name(name, "pin")
        relative = f"pins/{name}"
        data = self._read(relative, _MAX_PIN_BYTES, "pin")
        if is_newer(data, _PIN_MAGIC):
            raise UnsupportedFormatError(
                f"pin {relative} has a newer format version",
                hint="upgrade deltackpt",
                path=relative,
            )
        try:
            pin = unseal(data, _PIN_MAGIC, Pin)
            if not is_name(pin.run) or not 0 <= pin.number < MAX_NUMBER or len(pin.digest) != 32:
                raise ValueError("it names an impossible commit")
        except ValueError as error:
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
        path = f"{self.path}/pins/{name}"
        try:
            self.io.list(f"{self.path}/pins")
            publish_bytes(self.io, path, seal(_PIN_MAGIC, pin))
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
        if not is_listed(self.io, self.path, commit.run, commit.number):
            self.unpin(name)
            raise retired(commit, "pin another step")

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
