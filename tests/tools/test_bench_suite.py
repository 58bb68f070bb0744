"""The suite's benchmark runs the main job's own steps, on a small size."""

import pytest

from tools.bench.suite import suite


@pytest.mark.worlds
def test_the_bench_runs_data_and_steps_as_the_main_job_does(capsys):
    data, steps = suite(examples=1, worlds=(2,), layouts=1, cases=1, workers=1)
    assert "cases/s" in capsys.readouterr().out
    assert steps.what == "training steps, 2 ranks"
    assert data.steps == 0
    assert data.rate > 0
    assert steps.cases == 1
    # Production, and Megatron-LM in a layout's first case; now and then another order.
    assert steps.steps >= 2
    assert steps.processor > 0
