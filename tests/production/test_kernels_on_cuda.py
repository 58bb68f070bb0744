"""Kernels of CUDA against torch: run them where a device and Transformer Engine (extra `te`) are; docs/benchmarks.md says when they last ran."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [2, 4, 8])
def test_r_cp_1_the_kernels_index_is_the_one_in_torch(size):
    import transformer_engine.pytorch  # noqa: F401 - loads the library that the kernel is in
    from transformer_engine_torch import thd_get_partitioned_indices

    from production.context_parallel import shard_index

    lengths = torch.tensor([2, 4, 2, 6, 10, 2]) * size
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    total = int(boundaries[-1])
    for rank in range(size):
        kernel = thd_get_partitioned_indices(boundaries.cuda(), total, size, rank)
        assert torch.equal(kernel.cpu().long(), shard_index(boundaries, rank, size))
        assert torch.equal(shard_index(boundaries.cuda(), rank, size).cpu(), shard_index(boundaries, rank, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r_loss_1_a_loss_on_cuda_is_off_by_at_most_twice_what_the_reference_is_in_that_precision(dtype):
    from torch import distributed
    from torch._C._distributed_c10d import HashStore

    from production.loss import token_log_probabilities
    from reference.loss import cross_entropy

    distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        generator = torch.Generator().manual_seed(0)
        exact = torch.randn(512, 1000, generator=generator, dtype=torch.float64) * 4
        targets = torch.randint(0, 1000, (512,), generator=generator)
        truth = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
        reference = (cross_entropy(exact.to(dtype), targets).double() - truth).abs().max()
        logits = exact.to(dtype).cuda()[None]
        found = -token_log_probabilities(logits, targets.cuda()[None], tensor_group=distributed.group.WORLD)[0]
        assert (found.cpu().double() - truth).abs().max() <= 2 * reference
    finally:
        distributed.destroy_process_group()
