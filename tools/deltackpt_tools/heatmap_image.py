"""The heat-map of a run as a PNG file, written without an imaging library."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltackpt_tools.report_charts import binned, bins
from deltackpt_tools.survey import RunSurvey
from deltackpt_tools.tiny_font import HEIGHT, draw

_ROW = 14  # pixels
_LABEL = 44  # characters of a module's name, at most: its end
_SCALE = 2
_WHITE, _INK, _GRAY = (255, 255, 255), (31, 35, 40), (240, 242, 245)
_LINE = (190, 196, 204)
_FROM, _TO = np.array([222.0, 235.0, 247.0]), np.array([8.0, 48.0, 107.0])


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file (8 bits, RGB) of an array of shape (height, width, 3)."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = np.zeros((height, 1 + width * 3), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def image(survey: RunSurvey) -> bytes:
    """Modules by steps: hatched where nothing can be compared, gray where nothing changed, then
    from light to dark blue with the square root of the share of chunks that changed."""
    count = len(survey.saves)
    values = binned(survey.share, count)
    names = [m if len(m) <= _LABEL else ".." + m[-_LABEL + 2 :] for m in survey.module_labels()]
    longest = max((len(name) for name in names), default=0)
    gutter = longest * 4 * _SCALE + 12
    columns = max(values.shape[1], 1)
    cell = max(4, min(24, 900 // columns))
    title = f"{survey.run}: share of chunks changed, 0 to 100 %"
    width = max(gutter + columns * cell + 12, len(title) * 4 * _SCALE + 24)
    top, bottom = 24, 26
    canvas = np.full((top + len(names) * _ROW + bottom, width, 3), _WHITE, np.uint8)
    _write(canvas, title, 12, 7)
    for row, name in enumerate(names):
        y = top + row * _ROW
        _write(canvas, name, gutter - 6 - len(name) * 4 * _SCALE, y + 2)
        for column in range(values.shape[1]):
            share = float(values[row, column])
            x = gutter + column * cell
            if share != share:
                _hatch(canvas[y : y + _ROW - 1, x : x + cell])
                continue
            color: Any = _GRAY if share <= 0 else _FROM + (_TO - _FROM) * share**0.5
            canvas[y : y + _ROW - 1, x : x + cell] = color
    steps = [save.step for save in survey.saves]
    room = max(len(str(step)) for step in steps) * 4 * _SCALE + 16 if steps else 1
    free = 0
    for column, (first, _) in enumerate(bins(count) if count else []):
        x = gutter + column * cell
        if x >= free and x + room - 16 < width:
            canvas[-bottom : -bottom + 4, x] = _INK
            _write(canvas, str(steps[first]), x, canvas.shape[0] - bottom + 8)
            free = x + room
    return png(canvas)


def _hatch(area: NDArray[np.uint8]) -> None:
    """Thin slanted lines: there was nothing to compare with."""
    rows, columns = np.indices(area.shape[:2])
    area[(rows + columns) % 4 == 0] = _LINE


def _write(canvas: NDArray[np.uint8], words: str, x: int, y: int) -> None:
    ink = draw(words, _SCALE)
    ink = ink[:, : max(0, canvas.shape[1] - max(x, 0))]
    x = max(x, 0)
    area = canvas[y : y + HEIGHT * _SCALE, x : x + ink.shape[1]]
    area[ink[: area.shape[0]]] = _INK
