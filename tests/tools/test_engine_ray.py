"""inspect and pack with --engine ray: the cases of `engine_ray_cases.py`, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("engine_ray_cases.py")
SECONDS = 900


def test_inspect_and_pack_on_a_ray_cluster_give_what_one_process_gives():
    """A process that was connected to Ray must fork no more: what it forks is ended by a fault of Ray's threads."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)],
        cwd=CASES.parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    passed = re.search(r"^(\d+) passed in ", ran.stdout, flags=re.MULTILINE)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
    assert passed is not None
    assert int(passed[1]) >= len(re.findall(r"^def test_", CASES.read_text(encoding="utf-8"), flags=re.MULTILINE))
