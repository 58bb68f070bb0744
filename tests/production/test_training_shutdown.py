"""What a rank votes, and why a run ends where ranks vote differently."""

import time

from production.training.shutdown import Shutdown, stop_reason


def test_a_signal_counts_for_more_than_the_time():
    asked = []
    late = Shutdown(asked=asked, must_save_by="0:0:0:1", started=time.monotonic() - 2)
    assert late.stop_vote() == 1
    asked.append("SIGTERM")
    assert late.stop_vote() == 2
    assert Shutdown(asked=[], must_save_by="0:0:1:0", started=time.monotonic()).stop_vote() == 0
    assert Shutdown(asked=[], must_save_by=None, started=0.0).stop_vote() == 0
    assert [stop_reason(each) for each in (0, 1, 2)] == [None, "time limit", "signal"]
