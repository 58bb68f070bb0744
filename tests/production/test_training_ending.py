"""What a rank wishes, and why a run ends where ranks wish different things."""

import time

from production.training.shutdown import Ending, reason_of


def test_a_signal_counts_for_more_than_the_time():
    asked = []
    late = Ending(asked=asked, must_save_by="0:0:0:1", started=time.monotonic() - 2)
    assert late.wish() == 1
    asked.append("SIGTERM")
    assert late.wish() == 2
    assert Ending(asked=[], must_save_by="0:0:1:0", started=time.monotonic()).wish() == 0
    assert Ending(asked=[], must_save_by=None, started=0.0).wish() == 0
    assert [reason_of(each) for each in (0, 1, 2)] == [None, "time limit", "signal"]
