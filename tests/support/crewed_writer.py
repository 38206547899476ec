"""The writer process with helpers, however few the cores are.

Run in the place of ``writer.py``. ``TEST_HELPERS`` says how many (2), ``TEST_PATIENCE`` after how
many seconds one that does not answer is given up.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "store"))

from deltackpt_store import encode_crew, writer
from deltackpt_store.encode_crew import Crew
from deltackpt_store.ring import Ring

HELPERS = int(os.environ.get("TEST_HELPERS", "2"))
hire = Crew.hire


def hire_them(ring: Ring, count: int | None = None) -> Crew:
    return hire(ring, HELPERS if count is None else count)


if __name__ == "__main__":
    encode_crew.PATIENCE_SECONDS = float(os.environ.get("TEST_PATIENCE", "60"))
    Crew.hire = hire_them
    sys.exit(writer.main(sys.argv[1:]))
