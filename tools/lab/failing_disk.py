"""A disk in a file whose reads, writes or flushes fail while a file of that name lies in `flags`.

The file says how often: 1 for always, 0.2 for one in five.

An nbdkit plugin, run by the interpreter that nbdkit was built with:
``nbdkit python failing_disk.py file=IMAGE flags=FOLDER``.
"""

# pyright: basic

import errno
import os
import random
from pathlib import Path

import nbdkit  # pyright: ignore[reportMissingImports]

API_VERSION = 2
_options = {}
_disk = -1


def config(key, value):
    _options[key] = value


def config_complete():
    if set(_options) != {"file", "flags"}:
        raise RuntimeError("file= and flags= are needed")


def get_ready():
    global _disk
    _disk = os.open(_options["file"], os.O_RDWR)


def open(readonly):
    return 1


def thread_model():
    return nbdkit.THREAD_MODEL_SERIALIZE_ALL_REQUESTS


def get_size(h):
    return os.fstat(_disk).st_size


def can_flush(h):
    return True


def _fail_if(what):
    try:
        share = float(Path(_options["flags"], what).read_text())
    except FileNotFoundError:
        return
    if random.random() < share:
        nbdkit.set_error(errno.EIO)
        raise OSError(errno.EIO, f"{what} fails on purpose")


def pread(h, buffer, offset, flags):
    _fail_if("read")
    os.preadv(_disk, [buffer], offset)


def pwrite(h, buffer, offset, flags):
    _fail_if("write")
    os.pwrite(_disk, buffer, offset)


def flush(h, flags):
    _fail_if("flush")
    os.fdatasync(_disk)
