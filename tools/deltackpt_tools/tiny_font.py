"""A 3 x 5 pixel font for labels in images, so that none needs to be installed.

Each glyph is five rows of three bits, top row first, as octal digits. What has no glyph is drawn
as a box.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 3, 5

_GLYPHS = {
    " ": "00000", "0": "75557", "1": "26227", "2": "71747", "3": "71317", "4": "55711",
    "5": "74717", "6": "74757", "7": "71122", "8": "75757", "9": "75717", "a": "03557",
    "b": "44656", "c": "03443", "d": "11353", "e": "02763", "f": "32722", "g": "03536",
    "h": "44655", "i": "20222", "j": "10116", "k": "44565", "l": "22221", "m": "07755",
    "n": "06555", "o": "02552", "p": "06564", "q": "03531", "r": "03444", "s": "03616",
    "t": "27223", "u": "05557", "v": "05552", "w": "05577", "x": "05225", "y": "05536",
    "z": "07247", ".": "00002", ",": "00024", "-": "00700", "_": "00007", "/": "11244",
    ":": "02020", "@": "25543", "%": "51245", "#": "57575", "(": "12221", ")": "42224",
    "[": "32223", "]": "62226", "+": "02720", "*": "05250", "=": "07070", '"': "55000",
}  # fmt: skip
_BOX = "75557"


def draw(words: str, scale: int) -> NDArray[np.bool_]:
    """`words` (in small letters) as a bitmap of 5 * `scale` rows, True where there is ink."""
    columns: list[NDArray[np.bool_]] = []
    for letter in words.lower():
        rows = [int(digit) for digit in _GLYPHS.get(letter, _BOX)]
        glyph = np.array([[bool(row & bit) for bit in (4, 2, 1)] for row in rows])
        columns += [glyph, np.zeros((HEIGHT, 1), np.bool_)]
    if not columns:
        return np.zeros((HEIGHT * scale, 0), np.bool_)
    whole = np.concatenate(columns, axis=1)
    return whole.repeat(scale, axis=0).repeat(scale, axis=1)
