"""What runs on CUDA against torch and the reference: run it where a device and Transformer Engine (extra `te`) are; docs/gpus.md says what has run.

Where a test has a case on the CPU, that case holds the same code to the same bound with the modules that are there without CUDA.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import device_world as world
import pytest
import segment_attention_world as plain
import torch
from attention_truth import assert_exact

pytestmark = pytest.mark.worlds

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_CUDA = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What a rank on the device found (`device_world`), computed once: pytest makes a fixture again for each group of its cases."""
    if request.param not in _FOUND:
        _FOUND[request.param] = found_on(request.param, tmp_path_factory)
    return _FOUND[request.param]


_FOUND = {}


def found_on(device, tmp_path_factory):
    out = tmp_path_factory.mktemp(device) / "found.pt"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}  # production takes a device where there is one
    ended = subprocess.run(
        [sys.executable, world.__file__, device, str(out)],
        env=os.environ | hidden | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return torch.load(out, weights_only=True) | {"device": device}


@ON_CUDA
@pytest.mark.parametrize("size", [2, 4, 8])
def test_r_cp_1_the_kernels_index_is_the_one_in_torch(size):
    import transformer_engine.pytorch  # noqa: F401 - loads the library that the kernel is in
    from transformer_engine_torch import thd_get_partitioned_indices

    from production.parallel.context_parallel import shard_index

    lengths = torch.tensor([2, 4, 2, 6, 10, 2]) * size
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    total = int(boundaries[-1])
    for rank in range(size):
        kernel = thd_get_partitioned_indices(boundaries.cuda(), total, size, rank)
        assert torch.equal(kernel.cpu().long(), shard_index(boundaries, rank, size))
        assert torch.equal(shard_index(boundaries.cuda(), rank, size).cpu(), shard_index(boundaries, rank, size))


@ON_CUDA
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


@pytest.mark.parametrize("found", DEVICES, indirect=True)
def test_the_models_attention_of_a_packed_row_is_dense_attention_of_each_segment(found):
    """Output and gradients in bfloat16: at most twice as far off in norm as dense attention in bfloat16 is."""
    values, module = found["attention"]
    assert module == {"cpu": "SegmentAttention", "cuda": "TEDotProductAttention"}[found["device"]]
    lengths = world.CASE.model.rows[0]
    tensors = plain.inputs(lengths, world.HEADS, torch.bfloat16, world.ATTENTION_SEED)
    assert_exact(values, lengths, tensors, world.HEADS[2] ** -0.5)


WAYS = [
    pytest.param(device, way, marks=ON_CUDA if device == "cuda" else ())
    for device in ("cpu", "cuda")
    for way in world.FUSIONS
    if (device, way) != ("cpu", "te")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("found", "way"), WAYS, indirect=["found"])
def test_r_loss_1_the_models_cross_entropy_is_off_by_at_most_twice_what_the_references_is(found, way, dtype):
    """`plain` is what a job computes; `native` and `te` what its `cross_entropy_loss_fusion` asks megatron-core for."""
    from reference.loss import cross_entropy

    logits, targets = world.logits(dtype)
    is_token = targets >= 0
    truth = torch.nn.functional.cross_entropy(logits.double()[is_token], targets[is_token], reduction="none")
    theirs = cross_entropy(logits, targets)
    ours = found["cross entropies"][way, str(dtype)]
    assert ours.shape == targets.shape
    assert (ours[is_token].double() - truth).abs().max() <= 2 * (theirs[is_token].double() - truth).abs().max()
    if way != "te":  # which gives 0 for what is no token; the others what the reference gives, and no mask counts it
        sums = logits.double()[~is_token]
        nothing = (sums - sums.max(-1, keepdim=True).values).exp().sum(-1).log()
        off = (theirs[~is_token].double() - nothing).abs().max()
        assert (ours[~is_token].double() - nothing).abs().max() <= 2 * off


WIDER = {"float32": torch.float64, "bfloat16": torch.float32}
PRECISIONS = [
    pytest.param(device, precision, marks=ON_CUDA if device == "cuda" else ())
    for device, precisions in world.STEPS.items()
    for precision in precisions
]


@pytest.mark.parametrize(("found", "precision"), PRECISIONS, indirect=["found"])
def test_a_step_is_off_by_at_most_twice_what_the_reference_is_in_its_precision(found, precision):
    """Token losses of every depth, in norm over all tokens; the reported loss, their masked mean, follows."""
    step, case, dtype = found["steps"][precision], world.CASE.model, getattr(torch, precision)
    assert step["attention"] == {"cpu": "SegmentAttention", "cuda": "TEDotProductAttention"}[found["device"]]
    assert {each.dtype for each in step["weights"].values()} == {dtype}
    truth, low = (reference_losses(step["weights"], each) for each in (WIDER[precision], dtype))
    for depth, name in enumerate(("the model's own", "multi-token")):
        ours = torch.cat([losses[depth].double() for losses in step["token losses"]])
        assert ours.isfinite().all(), name
        allowed = 2 * (low[depth] - truth[depth]).norm()
        assert 0 < (ours - truth[depth]).norm() <= allowed, name
    ours, mask = torch.cat(step["outputs"]).double(), case.batch().token_mask.flatten().double()
    assert torch.equal(ours, torch.cat([losses[0].double() for losses in step["token losses"]]))
    total, count = step["reports"].double().sum(0)
    assert count == mask.sum() > 0
    assert total == pytest.approx(float((ours * mask).sum()), rel=1e-5)
    # A mean is off by at most the root mean square of what is off.
    off = abs(total / count - (truth[0] * mask).sum() / mask.sum())
    assert off <= 2 * (low[0] - truth[0]).norm() / count.sqrt()


@pytest.mark.parametrize(("found", "precision"), PRECISIONS, indirect=["found"])
def test_a_step_leaves_finite_numbers_and_moves_every_matrix(found, precision):
    step = found["steps"][precision]
    assert 0 < step["gradient norm"] < float("inf")
    assert torch.isfinite(step["mtp loss"]).all()
    before, after = step["weights"], step["weights after"]
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert weight.isfinite().all(), name
        # A norm's weight is near 1, where bfloat16 does not see a learning rate of 0.001.
        assert weight.ndim < 2 or not torch.equal(weight, before[name]), name


def test_the_guide_to_gpus_names_every_test_that_needs_one_and_no_other():
    root = Path(__file__).parents[2]
    needing = {name for file in (root / "tests").rglob("test_*.py") for name in needing_a_gpu(file)}
    assert len(needing) >= 9
    told = (root / "docs" / "gpus.md").read_text().partition("\n## Tests\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(test_\w+)` \|", told, re.MULTILINE)) == needing


def needing_a_gpu(file):
    """Tests of a file that are marked `gpu`, or have cases that are: by their decorators, and by what a name in these stands for."""
    text = file.read_text()
    tree = ast.parse(text)
    names, found = {"gpu"}, []
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            if names & words(ast.get_source_segment(text, statement.value)):
                names |= {each.id for each in statement.targets if isinstance(each, ast.Name)}
        elif isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_"):
            marks = " ".join(ast.get_source_segment(text, each) for each in statement.decorator_list)
            if "pytestmark" in names or names & words(marks):
                found.append(statement.name)
    return found


def words(text):
    return set(re.findall(r"\w+", text))


def reference_losses(weights, dtype):
    """Token losses [rows · P] float64 of the reference with these weights, computed in a dtype, by depth."""
    from equivalence.expectations.step import reference_shape
    from reference.model import EXACT, FLOAT32, Model

    case = world.CASE.model
    named = {name: weight.to(dtype) for name, weight in weights.items()}
    rounding = EXACT if dtype == torch.float64 else FLOAT32
    model, batch = Model.from_tensors(reference_shape(case.shape, 1), named, rounding=rounding), case.batch()
    with torch.no_grad():
        rows = [
            model.losses(batch.input_ids[row], batch.target_ids[row], case.boundaries[row]).tokens
            for row in range(len(case.rows))
        ]
    return [torch.cat([row[depth].double() for row in rows]) for depth in range(case.shape.depths + 1)]
