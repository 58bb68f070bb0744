"""The right packing function of packers.py, served over stdin and stdout."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "subject")]

import packers  # noqa: E402

from packproof_subject import serve  # noqa: E402

serve(pack=packers.right, conventions=packers.CONVENTIONS, name="right")
