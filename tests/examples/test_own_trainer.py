"""The adapters of the guide "bring the direct path into your own trainer", each run for real as far as the installed packages go."""

import dataclasses
import functools
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

SAMPLE = str(ROOT / "examples" / "packed" / "sample.jsonl.packed")
TOKENIZER = str(ROOT / "examples" / "tokenizers" / "nemotron-mini")
PACK_LENGTH = 256
ROWS = 4
DEPTHS = 1

pytestmark = pytest.mark.worlds


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER)


def row_settings(size=1, **changes):
    from production.rows.builder import RowSettings

    return RowSettings(pack_length=PACK_LENGTH, context_parallel_size=size, **changes)


# Megatron-LM


def script(_payload, worker):
    """On a rank: Megatron-LM's own data iterators and schedule over the example, and production's step over the same rows."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import training
    from megatron.training.global_vars import set_args

    from production.adapters.megatron_lm import PathSettings, Script
    from production.files.source import open_source
    from production.model.model import ModelSettings, build_model
    from production.parallel.sizes import ParallelSizes
    from production.rows.batch import BatchSettings, collate_checked
    from production.rows.builder import RowBuilder
    from production.training.step import StepSettings, forward_backward, wrap

    place, sizes, rows = worker.entered, ParallelSizes(context=2), row_settings(2)
    small = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "mtp_num_layers": DEPTHS}
    small |= {"add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    shape = ModelSettings(vocab_size=4096, max_sequence_length=PACK_LENGTH, transformer=small)
    torch.manual_seed(1)
    built = build_model(shape, sizes)

    set_args(
        SimpleNamespace(
            iteration=0,
            consumed_train_samples=ROWS,
            consumed_valid_samples=0,
            phase_transition_iterations=None,
            perform_rl_step=False,
            skip_train=False,
            full_validation=False,
            multiple_validation_sets=False,
            train_samples=None,
            train_iters=1,
            eval_iters=0,
            eval_interval=1,
            start_eval_at_iter=None,
            global_batch_size=ROWS,
            dataloader_type="external",
            train_data_path=[SAMPLE],
        )
    )
    theirs = Script(
        lambda args: PathSettings(
            files=args.train_data_path, rows=rows, global_batch_size=args.global_batch_size, depths=DEPTHS
        ),
        lambda _args: tokenizer(),
    )
    iterator = training.build_train_valid_test_data_iterators(theirs)[0]

    found = {}
    for normalization in ("per_token", "mean_of_means"):
        settings = StepSettings(normalization=normalization, depths=DEPTHS)
        built.config.calculate_per_token_loss = False
        model = wrap(built, settings)
        first = ROWS if normalization == "per_token" else 2 * ROWS  # the script goes on reading where it was
        with open_source(SAMPLE) as source:
            builder = RowBuilder(tokenizer=tokenizer(), settings=rows)
            numbers = range(first + place.data_rank, first + ROWS, place.data_size)
            checks = BatchSettings(context_parallel_size=2, data_parallel_size=1, global_batch_size=1)
            batches = [collate_checked([builder.build(source[number])], checks) for number in numbers]
        model.zero_grad_buffer()
        ours = forward_backward(model, batches, settings, place).losses
        our_gradients = {name: each.main_grad.clone() for name, each in model.named_parameters()}
        model.zero_grad_buffer()
        reports = get_forward_backward_func()(
            forward_step_func=theirs.forward_step,
            data_iterator=iterator,
            model=[model],
            num_microbatches=ROWS // place.data_size,
            seq_length=PACK_LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        found[normalization] = {
            "ours": torch.stack(ours),
            "theirs": torch.stack([each["lm loss"] for each in reports]),
            "differing": [
                name for name, each in model.named_parameters() if not torch.equal(each.main_grad, our_gradients[name])
            ],
            "gradients": {name: float(each.norm()) for name, each in our_gradients.items()},
        }
    return found


def test_a_megatron_lm_script_with_the_example_equals_the_job_to_the_bit():
    from equivalence.workers import open_world, preload
    from production.parallel.sizes import ParallelSizes

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    preload(
        "equivalence.trainers.production_step", "production.training.step", "megatron.training.training", "transformers"
    )
    with open_world(2, enter="equivalence.trainers.production_step:layout", entry=ParallelSizes(context=2)) as world:
        outcomes = world.run(f"{__name__}:script")
    for of_rank in outcomes:
        for found in of_rank.values():
            assert found["ours"].shape == (ROWS, 2)
            assert found["ours"][:, 1].sum() > 0
            assert torch.equal(found["ours"], found["theirs"])
            assert found["differing"] == []
            assert sum(norm > 0 for norm in found["gradients"].values()) > 10
    first, second = outcomes
    assert not torch.equal(first["per_token"]["ours"], second["per_token"]["ours"])  # each rank has its own share


def test_pretrain_accepts_the_arguments_of_the_guide():
    from megatron.training.training import pretrain

    from production.adapters.megatron_lm import Script

    given = Script(lambda _args: None, lambda _args: None)
    bound = inspect.signature(pretrain).bind("config", given, "type", given.forward_step)
    assert bound.arguments["train_valid_test_dataset_provider"] is given
    assert bound.arguments["forward_step_func"] == given.forward_step
    assert given.is_distributed
    assert "vp_stage" in inspect.signature(given).parameters  # pretrain asks for it


# NeMo-RL


class StandIn(dict):
    """As much of BatchedDataDict as the packed path needs, with the policy's own dealing: rank r takes rows r, r + dp, …"""

    def dealt(self, ranks):
        return [StandIn({name: value[rank::ranks] for name, value in self.items()}) for rank in range(ranks)]


TAKEN = (0, 1, 2, 4)
"""Rows of the sample that nemo-rl-direct takes: row 3 does not begin with a system message."""


def nemo_rows(count, size):
    from production.adapters.nemo_rl import PackedProcessor, format_data
    from production.files.source import open_source

    process, words = PackedProcessor(prompt_format="nemotron-nano-v2", context_parallel_size=size), tokenizer()
    with open_source(SAMPLE) as source:
        data = [format_data({"messages": source[number]}) for number in TAKEN[:count]]
    return [process(each, None, words, PACK_LENGTH, number) for number, each in enumerate(data)]


def expected_batch(count, size):
    from production.files.source import open_source
    from production.rows.batch import collate
    from production.rows.builder import RowBuilder
    from production.semantics import parse

    builder = RowBuilder(tokenizer=tokenizer(), settings=row_settings(size, semantics=parse("nemo-rl-direct")))
    with open_source(SAMPLE) as source:
        return collate([builder.build(source[number]) for number in TAKEN[:count]])


@dataclasses.dataclass
class ProcessedInputs:
    """A stand-in for NeMo-RL's, with the fields that pull request 3380 gives it."""

    input_ids: torch.Tensor
    input_ids_cp_sharded: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    packed_seq_params: object
    cu_seqlens_padded: torch.Tensor | None
    mtp_loss_mask: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    routed_experts_cp_sharded: torch.Tensor | None = None
    labels_cp_sharded: torch.Tensor | None = None
    loss_mask_cp_sharded: torch.Tensor | None = None


def test_the_nemo_rl_processor_accepts_the_arguments_that_run_sft_binds():
    from production.adapters.nemo_rl import PackedProcessor, format_data
    from production.files.source import open_source

    process = PackedProcessor(prompt_format="nemotron-nano-v2", context_parallel_size=1)
    bound = functools.partial(process, add_bos=True, add_eos=True, add_generation_prompt=False)
    with open_source(SAMPLE) as source:
        datum = format_data({"messages": source[0]})
    row = bound(datum, None, tokenizer(), PACK_LENGTH, 0)
    assert torch.equal(row["input_ids"], nemo_rows(1, 1)[0]["input_ids"])
    assert (row["message_log"], row["extra_env_info"]) == ([], None)


def test_one_nemo_rl_processor_builds_rows_of_each_length_that_it_is_asked_for():
    from production.adapters.nemo_rl import PackedProcessor, format_data
    from production.files.source import open_source

    with open_source(SAMPLE) as source:
        datum = format_data({"messages": source[0]})
    both, words = PackedProcessor(prompt_format="nemotron-nano-v2", context_parallel_size=1), tokenizer()
    for length in (PACK_LENGTH, PACK_LENGTH // 2, PACK_LENGTH):
        alone = PackedProcessor(prompt_format="nemotron-nano-v2", context_parallel_size=1)
        expected = alone(datum, None, words, length, 0)["input_ids"]
        assert len(expected) == length
        assert torch.equal(both(datum, None, words, length, 0)["input_ids"], expected)


def test_the_nemo_rl_adapter_gives_each_rank_the_fields_and_microbatches_of_production():
    from production.adapters.nemo_rl import BATCH_FIELDS, collate, packed_microbatch
    from production.parallel.microbatches import MicrobatchSettings, process_microbatch
    from production.rows.batch import take_rank

    collated = functools.partial(collate, megatron_sft_context_parallel_size=2, container=StandIn)
    batch = collated(nemo_rows(4, 2))
    assert set(batch) == {*BATCH_FIELDS, "idx", "task_name"}
    assert batch["idx"] == [0, 1, 2, 3], "the policy deals the rows out itself"
    whole = expected_batch(4, 2)
    for rank, share in enumerate(batch.dealt(2)):
        assert share["idx"] == [rank, rank + 2]
        assert share["task_name"] == ["megatron_sft_packed"] * 2
        expected = take_rank(whole, rank=rank, size=2)
        for name in BATCH_FIELDS:
            assert torch.equal(share[name], getattr(expected, name)), name
            assert share[name].dtype == getattr(expected, name).dtype
        for cut in range(2):
            settings = MicrobatchSettings(context_parallel_rank=cut, context_parallel_size=2)
            ours = process_microbatch(expected, settings)
            theirs = packed_microbatch(share, settings, inputs=ProcessedInputs)
            assert type(theirs) is ProcessedInputs
            for name, of_ours in (
                ("input_ids_cp_sharded", ours.input_ids),
                ("position_ids", ours.position_ids),
                ("labels_cp_sharded", ours.labels),
                ("loss_mask_cp_sharded", ours.loss_mask),
                ("cu_seqlens_padded", ours.packed_seq_params.cu_seqlens_q_padded),
            ):
                assert torch.equal(getattr(theirs, name), of_ours), name
            assert theirs.input_ids is share["input_ids"]
            assert (theirs.attention_mask, theirs.mtp_loss_mask) == (None, None)
            assert theirs.packed_seq_params.qkv_format == "thd"
    with_mask = packed_microbatch({**share, "mtp_loss_mask": 0}, settings, inputs=ProcessedInputs)
    assert torch.equal(with_mask.mtp_loss_mask, with_mask.loss_mask_cp_sharded)


def test_the_nemo_rl_adapter_takes_a_partial_validation_batch():
    """NeMo-RL fills it up itself, behind the collate function: its last row again with `sample_mask` 0."""
    from production.adapters.nemo_rl import collate

    batch = collate(nemo_rows(3, 1), 1)
    assert (len(batch["input_ids"]), batch["sample_mask"].tolist()) == (3, [1, 1, 1])


def test_the_nemo_rl_adapter_leaves_other_batches_alone_and_refuses_wrong_ones():
    from production.adapters.nemo_rl import collate, packed_microbatch
    from production.errors import BatchRefused, PackproofError
    from production.parallel.microbatches import MicrobatchSettings

    def inputs(**_):
        raise AssertionError("it is refused before")

    rows = nemo_rows(3, 1)
    assert packed_microbatch({"input_ids": rows[0]["input_ids"][None]}, MicrobatchSettings(), inputs=inputs) is None
    filler = {**rows[2], "loss_multiplier": 0.0}
    assert collate([*rows, filler])["sample_mask"].tolist() == [1, 1, 1, 0]
    conversation = {"message_log": [], "length": 1, "loss_multiplier": 1.0, "idx": 3}
    assert collate([conversation]) is None
    for wrong, size, kind in (
        ([*rows, conversation], 1, "mixed_rows"),
        (rows, 2, "context_parallel_size"),
        ([{**rows[0], "packed_max_seqlen": 1}], 1, "max_seqlen"),
        ([{name: value for name, value in rows[0].items() if name != "token_mask"}], 1, "missing_field"),
    ):
        with pytest.raises(BatchRefused) as refused:
            collate(wrong, size)
        assert refused.value.kind == kind
    partial = collate(rows)
    del partial["target_ids"]
    with pytest.raises(PackproofError, match="must have target_ids"):
        packed_microbatch(partial, MicrobatchSettings(), inputs=inputs)


# Plain PyTorch


def test_the_plain_example_trains_two_steps_with_the_losses_and_weights_of_the_reference(monkeypatch):
    from production.adapters import plain_torch
    from reference import loss as reference

    seen = []
    upstream = plain_torch.functional.cross_entropy

    def recording(logits, targets, **options):
        losses = upstream(logits, targets, **options)
        losses.retain_grad()
        seen.append((logits.detach().clone(), targets, losses))
        return losses

    masks = []
    flatten = plain_torch.flatten
    monkeypatch.setattr(plain_torch, "flatten", lambda batch: masks.append(batch.token_mask[0]) or flatten(batch))
    monkeypatch.setattr(plain_torch.functional, "cross_entropy", recording)
    losses = plain_torch.main([SAMPLE, "--tokenizer", TOKENIZER, "--pack-length", str(PACK_LENGTH), "--steps", "2"])
    assert len(losses) == 2
    assert len(seen) == len(masks) == 4  # two rows a step
    assert losses[1] < losses[0]
    for step, loss in enumerate(losses):
        rows, own = seen[2 * step : 2 * step + 2], [masks[2 * step : 2 * step + 2]]
        token_losses = [[each[2].detach() for each in rows]]
        assert loss == float(reference.training_loss(token_losses, own))
        weights = reference.token_weights("per_token", own, context_parallel_size=1)[0]
        for (_, _, each), weight in zip(rows, weights, strict=True):
            assert torch.equal(each.grad, weight.float())
    for logits, targets, found in seen:
        exact = upstream(logits.double(), targets, reduction="none")
        rounded = (reference.cross_entropy(logits, targets).double() - exact).abs().max()
        assert rounded > 0
        # In lower precision a side may be off by at most twice what the reference in that same precision is off.
        assert (found.detach().double() - exact).abs().max() <= 2 * rounded


def test_no_token_of_the_plain_model_sees_another_conversation():
    from production.adapters.plain_torch import Model, Shape

    torch.manual_seed(0)
    model = Model(Shape(vocab_size=50)).double()
    lengths = [5, 1, 10]
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.randint(50, (16,))
    changed = ids.clone()
    changed[7] = (ids[7] + 1) % 50
    before, after = model(ids, positions, lengths), model(changed, positions, lengths)
    assert torch.equal(before[:7], after[:7])  # other conversations, and what stands before it
    assert (before[7:] != after[7:]).any(dim=1).all()
    alone = model(ids[6:], positions[6:], lengths[2:])
    assert torch.allclose(alone, before[6:], rtol=0, atol=1e-13)
