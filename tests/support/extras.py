"""Tests that need an optional dependency, which an environment may do without."""

from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton, which `make floors` goes without"
)
