"""What a step measures: its numbers, and what they cost in synchronisations and messages."""

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_metrics_world import COUNTS

from equivalence.workers import open_world, preload
from production.errors import PackproofError
from production.training.metrics.step_metrics import Group, StepMetrics, Timing
from production.training.metrics.timers import DeviceClock, HostClock, clock_here, read
from production.training.metrics.token_counts import RowCounts

TIMING = Timing(step_seconds=2.0, own_seconds=1.5, data_wait_seconds=0.25)


def end(metrics, **changes):
    given = {"step": 3, "learning_rate": 1e-4, "gradient_norm": None, "consumed_samples": 6, "timing": TIMING}
    metrics.end_step(**given | changes)


def report(metrics, *, flops_of=None, peak_tflops=None, **changes):
    end(metrics, **changes)
    (found,) = metrics.report(flops_of=flops_of, peak_tflops=peak_tflops)
    return found


def one_step(**changes):
    metrics = StepMetrics(group=Group())
    metrics.add_loss(torch.tensor(6.0), torch.tensor(4.0))
    metrics.add_rows(COUNTS)
    return report(metrics, **changes)


def test_the_loss_weighs_tokens_not_microbatches():
    metrics = StepMetrics(group=Group())
    metrics.add_loss(torch.tensor(6.0), torch.tensor(4.0))
    metrics.add_loss(torch.tensor(30.0), torch.tensor(8.0))
    assert report(metrics).loss == 3.0


def test_each_depth_has_its_own_loss_and_name():
    metrics = StepMetrics(group=Group(), depths=2)
    for _ in range(2):
        metrics.add_loss(torch.tensor(4.0), torch.tensor(4.0))
        metrics.add_multi_token(torch.tensor([6.0, 9.0]), torch.tensor([3.0, 2.0]))
    found = report(metrics)
    assert found.mtp_losses == (2.0, 4.5)
    assert found.values()["mtp_1_loss"] == 2.0
    assert found.values()["mtp_2_loss"] == 4.5
    assert "mtp_losses" not in found.values()


def test_a_depths_loss_is_rounded_as_megatrons_own():
    """It multiplies by 1 / M in float32, which a division by M is not (R-LOSS-10)."""
    sums = torch.arange(1.0, 200.0)
    metrics = StepMetrics(group=Group(), depths=len(sums))
    metrics.add_loss(torch.tensor(4.0), torch.tensor(4.0))
    metrics.add_multi_token(sums, torch.full_like(sums, 3))
    expected = sums * (1 / 3)
    assert list(report(metrics).mtp_losses) == expected.tolist()
    assert not torch.equal(expected, sums / 3)


def test_a_global_batch_that_trains_nothing_has_no_loss_and_says_so():
    metrics = StepMetrics(group=Group(), depths=1)
    metrics.add_loss(torch.tensor(0.0), torch.tensor(0.0))
    metrics.add_multi_token(torch.tensor([0.0]), torch.tensor([0.0]))
    found = report(metrics)
    assert (found.loss, found.mtp_losses, found.all_masked, found.finite) == (None, (None,), True, True)
    assert not {"loss", "mtp_1_loss", "mtp_1_loss_by_tokens"} & set(found.values())
    assert not one_step().all_masked


def test_a_validation_that_trains_nothing_has_no_loss():
    metrics = StepMetrics(group=Group())
    metrics.add_loss(torch.tensor(0.0), torch.tensor(0.0))
    found = metrics.report_losses()
    assert (found.loss, found.all_masked) == (None, True)


def test_shares_without_a_target_dilute_a_depth_and_the_number_by_token_stands_beside():
    """Two shares of a depth: one of 3 targets whose losses sum to 6, one that has none and counts as 0 in Megatron-LM's mean."""
    metrics = StepMetrics(group=Group(), depths=2)
    for sums, targets in (((6.0, 8.0), (3.0, 4.0)), ((0.0, 2.0), (0.0, 4.0))):
        metrics.add_loss(torch.tensor(6.0), torch.tensor(4.0))
        pairs = zip(sums, targets, strict=True)
        means = torch.tensor([each / max(count, 1) for each, count in pairs])
        empty = [float(count == 0) for count in targets]
        metrics.add_multi_token(means, torch.ones(2), torch.tensor([sums, targets, empty]))
    values = report(metrics).values()
    assert (values["mtp_1_loss"], values["mtp_1_loss_by_tokens"], values["mtp_1_empty_shares"]) == (1.0, 2.0, 0.5)
    assert (values["mtp_2_loss"], values["mtp_2_loss_by_tokens"], values["mtp_2_empty_shares"]) == (1.25, 1.25, 0.0)


def test_a_depth_that_no_share_has_a_target_for_has_no_loss():
    metrics = StepMetrics(group=Group(), depths=1)
    metrics.add_loss(torch.tensor(6.0), torch.tensor(4.0))
    metrics.add_multi_token(torch.zeros(1), torch.ones(1), torch.tensor([[0.0], [0.0], [1.0]]))
    assert {name: value for name, value in report(metrics).values().items() if name.startswith("mtp_")} == {
        "mtp_1_empty_shares": 1.0
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinite_losses_are_reported_unchanged(bad):
    metrics = StepMetrics(group=Group())
    metrics.add_loss(torch.tensor(bad), torch.tensor(4.0))
    found = report(metrics)
    assert not math.isfinite(found.loss)
    assert not found.finite


def test_a_gradient_norm_on_the_device_is_read_with_the_rest():
    assert one_step(gradient_norm=torch.tensor(0.5)).gradient_norm == 0.5
    assert one_step(gradient_norm=0.25).gradient_norm == 0.25
    assert not one_step(gradient_norm=torch.tensor(math.inf)).finite
    assert "gradient_norm" not in one_step().values()


def test_counts_of_rows_become_shares_and_rates():
    found = one_step(flops_of=lambda tokens, squares: tokens * 1e12 + squares, peak_tflops=96.0)
    assert found.tokens_per_second == 64.0
    assert found.padding_share == 0.25
    assert (found.trained_tokens, found.rows_truncated, found.conversations_dropped) == (50, 1, 3)
    assert found.tflops_per_second == (96e12 + (1 << 45) + 7) / 2 / 1e12
    assert found.mfu == found.tflops_per_second / 96
    assert found.memory_mebibytes > 10
    assert (found.slowest_rank, found.slowest_rank_behind_seconds, found.data_wait_seconds) == (0, 0.0, 0.25)


def test_unknown_numbers_are_left_out_and_not_zero():
    assert not {"mfu", "tflops_per_second"} & set(one_step().values())
    assert "mfu" not in one_step(flops_of=lambda *_: 1e12).values()


def test_steps_wait_for_the_report_and_each_keeps_its_numbers():
    metrics = StepMetrics(group=Group(), depths=2)
    assert metrics.report() == []
    for step, norm in ((1, 0.5), (2, torch.tensor(0.25)), (3, None), (4, torch.tensor(0.125))):
        metrics.add_loss(torch.tensor(6.0 * step), torch.tensor(4.0))
        metrics.add_multi_token(torch.tensor([1.0, 2.0]) * step, torch.tensor([1.0, 4.0]))
        if step != 2:
            metrics.add_rows(COUNTS)
        end(
            metrics, step=step, gradient_norm=norm, timing=Timing(step_seconds=step, own_seconds=1, data_wait_seconds=0)
        )
    found = metrics.report()
    assert [each.step for each in found] == [1, 2, 3, 4]
    assert [each.loss for each in found] == [1.5, 3.0, 4.5, 6.0]
    assert [each.mtp_losses for each in found] == [(1.0, 0.5), (2.0, 1.0), (3.0, 1.5), (4.0, 2.0)]
    assert [each.gradient_norm for each in found] == [0.5, 0.25, None, 0.125]
    assert [each.tokens for each in found] == [128, 0, 128, 128]
    assert [each.step_seconds for each in found] == [1, 2, 3, 4]
    assert metrics.report() == []


def test_acceptance_rates_and_losses_of_routers_are_recorded_by_megatron_lms_names():
    metrics = StepMetrics(group=Group(), depths=2, router_losses=("load_balancing_loss", "z_loss"))
    for step, (accepted, balance) in enumerate([([[3.0, 0.0], [8.0, 0.0]], 1.25), ([[1.0, 2.0], [3.0, 2.0]], 1.5)], 1):
        metrics.add_loss(torch.tensor(6.0), torch.tensor(4.0))
        metrics.add_multi_token(torch.ones(2), torch.ones(2))
        metrics.add_accepted(torch.tensor(accepted))
        metrics.add_rows(COUNTS)
        losses = {"load_balancing_loss": torch.tensor(balance), "z_loss": torch.tensor(2.0)}
        end(metrics, step=step, router_losses=losses, gradient_norm=torch.tensor(0.5))
    first, second = (each.values() for each in metrics.report())
    assert (first["mtp_1_acceptance_rate"], first["load_balancing_loss"], first["z_loss"]) == (37.5, 1.25, 2.0)
    assert "mtp_2_acceptance_rate" not in first  # no position counts: nothing is measured
    assert second["mtp_1_acceptance_rate"] == pytest.approx(100 / 3)
    assert (second["mtp_2_acceptance_rate"], second["load_balancing_loss"]) == (100.0, 1.5)
    assert (second["tokens"], second["gradient_norm"], second["mtp_2_loss"]) == (128, 0.5, 1.0)


def test_validation_reads_losses_alone_and_spoils_no_step():
    metrics = StepMetrics(group=Group(), depths=1)
    metrics.add_loss(torch.tensor(6.0), torch.tensor(4.0))
    metrics.add_multi_token(torch.tensor([6.0]), torch.tensor([4.0]))
    end(metrics)
    metrics.add_loss(torch.tensor(8.0), torch.tensor(4.0))
    metrics.add_multi_token(torch.tensor([4.0]), torch.tensor([4.0]))
    found = metrics.report_losses()
    assert (found.loss, found.mtp_losses, found.all_masked) == (2.0, (1.0,), False)
    (step,) = metrics.report()
    assert (step.loss, step.mtp_losses) == (1.5, (1.5,))


def test_whole_numbers_survive_a_sum_over_4096_ranks_in_float32():
    most = RowCounts(rows=(1 << 40) - 1, tokens=12345678901, square_sum=(1 << 47) - 3)
    summed = torch.zeros(len(most.limbs()), dtype=torch.float32)
    for _ in range(4096):
        summed += torch.tensor(most.limbs(), dtype=torch.float32)
    found = RowCounts.of_limbs(summed.tolist())
    assert (found.rows, found.tokens, found.square_sum) == (
        4096 * most.rows,
        4096 * most.tokens,
        4096 * most.square_sum,
    )


def test_a_missing_loss_and_one_too_many_depths_are_refused():
    with pytest.raises(PackproofError, match="no microbatch's loss"):
        report(StepMetrics(group=Group()))
    stage = StepMetrics(group=Group(has_loss=False))
    stage.add_loss(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(PackproofError, match="a stage that computes no loss"):
        report(stage)
    with pytest.raises(PackproofError, match="1 depths"):
        StepMetrics(group=Group(), depths=1).add_multi_token(torch.ones(2), torch.ones(2))


class Waits(TorchDispatchMode):
    """Counts operations whose result the host must wait for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"):
            self.seen.append(function.name())
        return function(*args, **kwargs or {})


def test_a_microbatch_never_waits_for_the_device_and_a_report_does_once():
    reads = []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        reads.append(tensor.shape)
        return tolist(tensor)

    def forbidden(*_, **__):
        raise AssertionError("the host waits for the device")

    metrics = StepMetrics(group=Group(), depths=2)
    waiting = ("item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
    with Waits() as waits, mock.patch.multiple(torch.Tensor, tolist=counted, **dict.fromkeys(waiting, forbidden)):
        for microbatch in range(16):
            metrics.add_loss(torch.tensor(6.0), torch.tensor(microbatch))
            metrics.add_multi_token(torch.ones(2), torch.ones(2))
            metrics.add_rows(COUNTS)
            if microbatch % 4 == 3:
                end(metrics, gradient_norm=torch.tensor(1.0))
        assert (reads, waits.seen) == ([], [])
        assert len(metrics.report()) == 4
    assert len(reads) == 1
    assert waits.seen == []


def test_the_count_of_waits_sees_a_wait():
    with Waits() as waits:
        torch.tensor(1.0).item()
    assert waits.seen == ["aten::_local_scalar_dense"]


def test_microbatches_are_added_without_any_value_being_there():
    metrics = StepMetrics(group=Group(), depths=1, device="meta")  # a read of a meta tensor raises
    metrics.add_loss(torch.empty((), device="meta"), torch.empty((), device="meta", dtype=torch.int64))
    metrics.add_multi_token(torch.empty(1, device="meta"), torch.empty(1, device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError)):
        report(metrics)


@pytest.mark.gpu
def test_on_cuda_neither_a_microbatch_nor_the_end_of_a_step_synchronizes():
    metrics = StepMetrics(group=Group(), depths=1, device="cuda")
    loss, mask = torch.tensor(6.0, device="cuda"), torch.tensor(4, device="cuda")
    metrics.add_loss(loss, mask)  # whatever is set up once
    metrics.add_multi_token(loss.view(1), mask.view(1))
    end(metrics, gradient_norm=loss)
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.add_loss(loss, mask)
        metrics.add_multi_token(loss.view(1), mask.view(1))
        metrics.add_rows(COUNTS)
        end(metrics, gradient_norm=loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [each.loss for each in metrics.report()] == [1.5, 1.5]


@pytest.fixture(scope="module")
def world():
    """What four ranks reported, by rank."""
    preload("training_metrics_world", megatron=False)
    with open_world(4) as ranks:
        return ranks.run("training_metrics_world:measured")


@pytest.mark.worlds
def test_ranks_report_the_same_loss_and_it_is_megatrons_to_the_bit(world):
    found = [each["one_stage"] for each in world]
    assert len({each["values"]["loss"] for each in found}) == 1
    for each in found:
        assert each["values"]["loss"] == each["megatron"]
        assert each["values"]["mtp_1_loss"] == pytest.approx(each["megatron"], rel=1e-6)


@pytest.mark.worlds
def test_one_stage_needs_one_all_reduce_and_nothing_else_and_with_tensor_ranks_one_over_the_world(world):
    assert [each["one_stage"]["calls"] for each in world] == [["all_reduce over 4"]] * 4
    assert [each["tensor_calls"] for each in world] == [["all_reduce over 2", "all_reduce over 4"]] * 4


@pytest.mark.worlds
def test_rows_that_context_parallel_ranks_share_count_once(world):
    values = world[3]["one_stage"]["values"]
    assert values["trained_tokens"] == 2 * 5 * COUNTS.trained_tokens
    assert values["tokens_per_second"] == 2 * 5 * COUNTS.tokens / 4.0


def place(values):
    return [values[f"slowest_rank_{name}"] for name in ("tp", "cp", "dp", "pp")]


@pytest.mark.worlds
def test_the_slowest_rank_is_named_with_its_delay(world):
    for each in world:
        values = each["one_stage"]["values"]
        assert (values["slowest_rank"], values["slowest_rank_behind_seconds"]) == (1, 0.75)
        assert place(values) == [0, 1, 0, 0]
        assert (values["data_wait_seconds"], values["data_wait_rank"]) == (3 / 8, 3)


@pytest.mark.worlds
def test_ranks_of_other_tensor_places_are_seen_by_all_in_every_step_of_a_report(world):
    for each in world:
        first, second = each["tensor"]
        assert (first["slowest_rank"], place(first), first["slowest_rank_behind_seconds"]) == (3, [1, 0, 1, 0], 3.0)
        assert (second["slowest_rank"], place(second), second["slowest_rank_behind_seconds"]) == (1, [1, 0, 0, 0], 3.0)
        for step, values in enumerate((first, second), 1):
            assert (values["memory_mebibytes"], values["memory_rank"]) == (100 * step + 50, 1)
            assert (values["data_wait_seconds"], values["data_wait_rank"]) == (1.0, 1)
            assert values["step_seconds"] == step
            assert values["loss"] == 3.0


@pytest.mark.worlds
def test_the_last_stage_hands_its_numbers_to_the_others_in_one_small_message(world):
    for each in world:
        found = each["two_stages"]
        assert found["values"]["loss"] == 6.0
        assert found["calls"] == ["all_reduce over 2", "broadcast over 2", "all_reduce over 4"]
        assert found["values"]["trained_tokens"] == 2 * COUNTS.trained_tokens


@pytest.mark.worlds
def test_the_first_stage_is_seen_too(world):
    for each in world:
        values = each["two_stages"]["values"]
        assert (values["memory_mebibytes"], values["memory_rank"]) == (9001.0, 1)
        assert (values["slowest_rank"], place(values), values["slowest_rank_behind_seconds"]) == (1, [0, 0, 1, 0], 1.5)
        assert (values["data_wait_seconds"], values["data_wait_rank"]) == (0.5, 0)
        assert values["step_seconds"] == 7.0
        assert values["tokens_per_second"] == 2 * COUNTS.tokens / 7.0


@pytest.mark.worlds
def test_all_ranks_get_the_largest_stop_vote_with_the_report(world):
    assert [each["two_stages"]["stop_vote"] for each in world] == [2] * 4


def test_a_rank_is_placed_as_megatron_core_counts():
    group = Group(dimensions=(2, 3, 4, 5))
    places = [group.place(rank) for rank in range(2 * 3 * 4 * 5)]
    assert places[:3] == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0)]
    assert (places[6], places[24], places[-1]) == ((0, 0, 1, 0), (0, 0, 0, 1), (1, 2, 3, 4))
    assert len(set(places)) == len(places)


class Device:
    """A device that works in its own time behind the host: an event passes when the device comes to it."""

    def __init__(self):
        self.asked = self.done = 0.0
        self.waits = []

    def work(self, milliseconds):
        self.asked += milliseconds

    def event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device = device
        self.at = None

    def record(self):
        assert self.at is None
        self.at = self.device.asked

    def synchronize(self):
        self.device.waits.append(self.at)
        self.device.done = max(self.device.done, self.at)

    def elapsed_time(self, end):
        assert end.at <= self.device.done, "read before the device came there, which CUDA refuses"
        return end.at - self.at


def test_on_a_device_each_step_of_a_report_has_its_own_time_which_nothing_waits_for_before_the_report():
    device = Device()
    clock = DeviceClock(device.event)
    metrics = StepMetrics(group=Group())
    ended = clock.mark()
    for step, milliseconds in enumerate((250, 1500, 500), 1):
        began = clock.mark()
        device.work(milliseconds)
        first_wait = clock.mark()
        device.work(64)  # the reduction, the optimizer
        before, ended = ended, clock.mark()
        metrics.add_loss(torch.tensor(6.0), torch.tensor(4.0))
        timing = Timing(
            step_seconds=clock.between(before, ended),
            own_seconds=clock.between(began, first_wait),
            data_wait_seconds=0.0,
        )
        end(metrics, step=step, timing=timing)
    assert device.waits == []
    found = metrics.report(flops_of=lambda *_: 1e12)
    assert [each.step_seconds for each in found] == pytest.approx([0.314, 1.564, 0.564])
    assert [each.tflops_per_second for each in found] == pytest.approx([1 / 0.314, 1 / 1.564, 1 / 0.564])
    assert max(device.waits) == 2250 + 3 * 64


def test_the_hosts_clock_gives_the_time_between_two_marks_at_once():
    clock = HostClock()
    first = clock.mark()
    seconds = clock.between(first, clock.mark())
    assert isinstance(seconds, float)
    assert 0 <= read(seconds) < 60
    assert isinstance(clock_here(), DeviceClock if torch.cuda.is_available() else HostClock)


@pytest.mark.gpu
def test_on_cuda_a_mark_waits_for_nothing_and_gives_the_devices_time():
    clock = clock_here()
    work = torch.randn(4096, 4096, device="cuda")
    work @ work  # whatever is set up once
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = clock.mark()
        for _ in range(50):
            work @ work
        seconds = clock.between(first, clock.mark())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read(seconds) > 50 * 2 * 4096**3 / 3e15  # faster than any device
