"""The CPU shim: what it answers, that it is undone, and that nobody outside it sees it."""

import multiprocessing
import os

import pytest
import torch

from production.model.device.shim import cpu_shim, is_shimmed


def _names():
    from megatron.core.tensor_parallel import random

    return {
        "current_device": torch.cuda.current_device,
        "Stream": torch.cuda.Stream,
        "manual_seed": torch.cuda.manual_seed,
        "zeros": torch.zeros,
        "tensor": torch.tensor,
        "to": torch.Tensor.to,
        "cuda": torch.Tensor.cuda,
        "type": torch.Tensor.type,
        "module_cuda": torch.nn.Module.cuda,
        "all_to_all_single": torch.distributed.all_to_all_single,
        "tracker": random._CUDA_RNG_STATE_TRACKER,
        "initialized": random._CUDA_RNG_STATE_TRACKER_INITIALIZED,
        "set_state": random._set_cuda_rng_state,
    }


def _inside(checks):
    """Run in a process of its own: the shim belongs to a whole process."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child():
        try:
            send.send(checks())
        except BaseException as error:  # noqa: BLE001 - told in the parent
            send.send(f"{type(error).__name__}: {error}")
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    send.close()
    result = receive.recv()
    process.join()
    return result


@pytest.fixture(autouse=True)
def _preloaded():
    from equivalence.workers import preload

    preload()


def test_calls_that_ask_for_cuda_get_the_cpu():
    def checks():
        with cpu_shim():
            made = [
                torch.zeros(2, device="cuda"),
                torch.tensor([1], device=torch.cuda.current_device()),
                torch.empty(3, device=torch.device("cuda", 0)),
                torch.ones(1).to("cuda"),
                torch.ones(1).to(device="cuda", dtype=torch.float64),
                torch.ones(1).cuda(),
                torch.nn.Linear(1, 1).cuda().weight,
            ]
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
            torch.cuda.synchronize()
            return (
                [str(each.device) for each in made],
                made[4].dtype,
                torch.zeros(1).type(),
                torch.zeros(1, dtype=torch.bfloat16).type(),
            )

    devices, dtype, name, half = _inside(checks)
    assert devices == ["cpu"] * 7
    assert dtype == torch.float64
    assert (name, half) == ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor")


def test_every_name_comes_back_on_exit_also_after_an_error():
    def checks():
        before = _names()
        with cpu_shim():
            changed = sorted(name for name, value in _names().items() if value is not before[name])
        same = all(_names()[name] is value for name, value in before.items())
        try:
            with cpu_shim():
                raise KeyError  # noqa: TRY301 - it leaves by an error
        except KeyError:
            pass
        return changed, same, all(_names()[name] is value for name, value in before.items()), is_shimmed()

    changed, same, after_error, shimmed = _inside(checks)
    assert len(changed) == len(_names()), "each of the names is replaced within"
    assert same
    assert after_error
    assert not shimmed


def test_the_parent_of_a_shimmed_process_sees_nothing_of_it():
    before = _names()

    def checks():
        with cpu_shim():
            return is_shimmed()

    assert _inside(checks) is True
    assert not is_shimmed()
    assert all(_names()[name] is value for name, value in before.items())


def test_tracked_random_states_differ_by_name_and_go_on_where_they_were():
    def checks():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with cpu_shim():
            tracker = get_cuda_rng_tracker()
            tracker.reset()
            tracker.add("model-parallel-rng", 7)
            tracker.add("other", 8)
            torch.manual_seed(1)
            outside = torch.rand(2)
            torch.manual_seed(1)
            drawn = []
            for name in ("model-parallel-rng", "other", "model-parallel-rng"):
                with tracker.fork(name):
                    drawn.append(torch.rand(2))
            again = torch.rand(2)
            torch.manual_seed(7)
            straight = torch.rand(4)
            try:
                tracker.add("third", 7)
            except ValueError as error:
                said = str(error)
            return (
                outside.equal(again),
                drawn[0].equal(straight[:2]),
                drawn[2].equal(straight[2:]),
                drawn[1].equal(drawn[0]),
                said,
            )

    outside_untouched, first, second, same, said = _inside(checks)
    assert outside_untouched
    assert first
    assert second
    assert not same
    assert "seed 7" in said


def test_a_fork_without_the_named_random_state_names_the_function_to_call():
    def checks():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with cpu_shim():
            get_cuda_rng_tracker().reset()
            try:
                with get_cuda_rng_tracker().fork():
                    pass
            except ValueError as error:
                return str(error)

    assert "model_parallel_cuda_manual_seed" in _inside(checks)


def test_fused_kernels_that_megatron_core_found_give_way_to_its_own():
    """As where Transformer Engine is installed beside a CPU: its kernels would refuse every tensor."""

    def checks():
        from megatron.core import optimizer
        from megatron.core.optimizer import clip_grads, distrib_optimizer
        from megatron.core.optimizer import optimizer as base
        from megatron.core.transformer.moe import moe_utils

        fused = object()
        names = (
            (clip_grads, ["multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl", "multi_tensor_scale_tensor_impl"]),
            (base, ["multi_tensor_applier", "multi_tensor_scale_impl"]),
            (optimizer, ["Adam", "SGD"]),
            (distrib_optimizer, ["Adam"]),
            (moe_utils, ["te_general_gemm"]),
        )  # fmt: skip
        for module, fakes in names:
            for name in fakes:
                setattr(module, name, fused)
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
        with cpu_shim():
            left = [
                f"{module.__name__}.{name}"
                for module, fakes in names
                for name in fakes
                if getattr(module, name) is fused
            ]
            flags = (
                optimizer.USING_PYTORCH_OPTIMIZER,
                distrib_optimizer.HAVE_APEX_OR_TE,
                distrib_optimizer.USING_TE_OPTIMIZER,
            )
            norm, _ = clip_grads.multi_tensor_applier(
                clip_grads.l2_norm_impl,
                torch.zeros(1, dtype=torch.int),
                [[torch.tensor([3.0]), torch.tensor([4.0])]],
                False,  # noqa: FBT003 - as megatron-core calls it
            )
        return left, flags, float(norm), clip_grads.l2_norm_impl is fused

    left, flags, norm, is_back = _inside(checks)
    assert left == []
    assert flags == (True, False, False)
    assert norm == 5.0
    assert is_back
