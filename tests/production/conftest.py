"""What the tests of the training job share: worlds for the targets of `training_job_worlds`, and the rows of its small job."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def world():
    """Runs a target in a new world of so many ranks: a job leaves some hundred threads of megatron-core's groups behind."""
    import training_job_worlds as jobs

    from equivalence.workers import Deadlines, open_world, preload

    preload(*jobs.MODULES)

    def run(size, target, payload, **deadlines):
        with open_world(size, deadlines=Deadlines(open_s=120, case_s=300, idle_s=60, **deadlines)) as opened:
            return opened.run(f"training_job_worlds:{target}", payload)

    return run


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The file of the small job."""
    import training_job_worlds as jobs

    return jobs.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")
