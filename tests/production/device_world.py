"""One rank on a device: what production's attention, cross entropy and engine compute there, left for the tests to judge.

    python device_world.py cpu|cuda FILE

A process of its own, since on a CPU the shim replaces names of torch; the same code runs on both devices.
"""

import functools
import json
import os
import sys
from pathlib import Path
from unittest import mock

import segment_attention_world as plain
import torch

from equivalence.cases.step import ModelCase, ModelShape
from equivalence.trainers.production_run import TrainingCase, _settings
from production.parallel.sizes import ParallelSizes
from reference.trainer import Schedule

CASE = TrainingCase(
    model=ModelCase(
        shape=ModelShape(
            layers=2, hidden_size=128, heads=2, query_groups=1, ffn_hidden_size=192, vocab_size=512, depths=1
        ),
        rows=((40, 24, 128, 64), (256,)),
        masked=(0.5, 0.9),
        seed=3,
        weight_scale=0.05,
    ),
    schedule=Schedule(max_lr=1e-3, decay_steps=2),
    steps=1,
    precision="float32",
)
HEADS = (2, 1, 64, 64)
"""(h, h_kv, d, d_v) of its attention."""
ATTENTION_SEED = 7
STEPS = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
"""What a step is taken in. Transformer Engine's attention of packed rows knows no float32."""
CLASSES, TOKENS = 1000, 512
FUSIONS = {"plain": (False, "native"), "native": (True, "native"), "te": (True, "te")}
"""`cross_entropy_loss_fusion` and `cross_entropy_fusion_impl` of megatron-core by the name that the tests use."""


def job(device, precision):
    """The job of CASE, read and validated as any other; but on a CPU the engine takes the bfloat16 that a job there is refused."""
    from production.training.config import load, validate

    changes = {"policy.precision": precision, "cluster.device": device}
    found = load([], [f"{key}={json.dumps(value)}" for key, value in (_settings(CASE) | changes).items()])
    if (device, precision) != ("cpu", "bfloat16"):
        validate(found, 1, device=device)
    return found


def logits(dtype):
    """[n, V], and targets [n], of which some are no token."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(TOKENS, CLASSES, generator=generator, dtype=torch.float64) * 4).to(dtype)
    targets = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
    targets[::9] = -100
    return made, targets


def attention(device):
    """Output and gradients [t, h, d] of the model's own attention module over the segments of a row, as the direct path feeds it; its class."""
    from megatron.core.transformer.enums import AttnMaskType

    from production.model.model import build_model
    from production.model.weights import unwrap
    from production.parallel.microbatches import MicrobatchSettings, process_microbatch
    from production.training.config import model_settings

    settings = model_settings(job(device.type, "bfloat16"), CASE.model.shape.vocab_size)
    module = unwrap(build_model(settings, ParallelSizes())).decoder.layers[0].self_attention.core_attention
    row = CASE.model.rows_of_rank(0)[0]
    params = process_microbatch(row, MicrobatchSettings(), device=device).packed_seq_params
    tensors = plain.inputs(CASE.model.rows[0], HEADS, torch.bfloat16, ATTENTION_SEED)
    *leaves, upper = (each.to(device) for each in tensors)
    leaves = [each.detach().requires_grad_() for each in leaves]
    found = module(*leaves, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, packed_seq_params=params)
    found.reshape(upper.shape).backward(upper)
    values = [found.detach().reshape(upper.shape), *(each.grad for each in leaves)]
    return [each.cpu() for each in values], type(module).__name__


def cross_entropies(device):
    """Token losses [n] that the model computes from logits and labels, by dtype and way of computing them."""
    from production.model.model import build_model
    from production.model.weights import unwrap
    from production.training.config import model_settings

    model = unwrap(
        build_model(model_settings(job(device.type, "bfloat16"), CASE.model.shape.vocab_size), ParallelSizes())
    )
    found = {}
    for name, (is_fused, way) in FUSIONS.items():
        if name == "te" and device.type != "cuda":
            continue
        model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = is_fused, way
        for dtype in (torch.float32, torch.bfloat16):
            scores, targets = logits(dtype)
            # [n, batch, V], and [batch, n]: what the model's last stage calls it with.
            losses = model.compute_language_model_loss(targets[None].to(device), scores[:, None].to(device))
            found[name, str(dtype)] = losses.detach().reshape(-1).cpu()
    return found


def step(device, place, precision):
    """One step of the job: its weights before and after, token losses by microbatch and depth, and the numbers that it reports."""
    from equivalence.trainers.production_step import _token_losses
    from production.model.weights import fill, unwrap
    from production.training import engine

    def kept(model):
        return {name: each.detach().to("cpu", copy=True) for name, each in unwrap(model).named_parameters()}

    outputs = []
    observed = functools.partial(
        engine.forward_backward, observe=lambda _number, _microbatch, output: outputs.append(output.detach().cpu())
    )
    with mock.patch.object(engine, "forward_backward", observed):
        made = engine.Engine(
            job(device.type, precision),
            place,
            vocab_size=CASE.model.shape.vocab_size,
            prepare=lambda built: fill(built, CASE.model.weights()),
        )
        before = kept(made.model)
        with _token_losses(made.model) as losses:
            stepped = made.step(CASE.model.rows_of_rank(0))
    return {
        "weights": before,
        "weights after": kept(made.model),
        "outputs": [each.reshape(-1) for each in outputs],
        "token losses": [[each.cpu() for each in depths] for depths in losses],
        "reports": torch.stack([each.cpu() for each in stepped.report.losses]),
        "gradient norm": float(stepped.gradient_norm),
        "mtp loss": stepped.mtp_loss_sums.cpu() / stepped.microbatches,
        "attention": type(unwrap(made.model).decoder.layers[0].self_attention.core_attention).__name__,
    }


def main():
    name, out = sys.argv[1], Path(sys.argv[2])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from production.parallel.multi_token_feed import rolls_from_tables
    from production.training.distributed.launch import launched

    with (
        launched(
            ParallelSizes(),
            device=name,
            timeout_seconds=120,
            seed=1,
            deterministic=job(name, "bfloat16").cluster.deterministic,
        ) as rank,
        rolls_from_tables(),
        torch.compiler.set_stance("default" if name == "cuda" else "force_eager"),  # no compiler is needed for a CPU
    ):
        found = {
            "attention": attention(rank.device),
            "cross entropies": cross_entropies(rank.device),
            "steps": {each: step(rank.device, rank.place, each) for each in STEPS[name]},
        }
    torch.save(found, out)


if __name__ == "__main__":
    main()
