"""Check microbatches: both paths give every rank the same tensors and boundaries on every side (R-ONLINE, R-MEET-1).

Third witnesses of the direct path are megatron-core's flatten, its roll of the whole row, and its rotary embedding's index; of the online depths,
its roll. `get_batch_on_this_tp_rank` only broadcasts the data of tensor-parallel rank 0 on a CUDA device, so no part of it runs here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from megatron.core.utils import flatten_batch_for_packed_sequences

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.cuts.context_parallel import rotary_index
from equivalence.checks.cuts.pairs import Side, compare_sides
from equivalence.generators.online import DirectCase, OnlineCase
from production.errors import BatchRefused, PackproofError
from production.online import bins as squeeze
from production.online import packing, padded_batch
from production.parallel import microbatches as production
from production.parallel.multi_token_feed import MultiTokenParams
from production.rows import batch as batches
from reference import batches as reference_batches
from reference import microbatches as reference
from reference import packing as reference_packing
from reference.refusals import RowRefused

NAMES = ("input_ids", "position_ids", "labels", "loss_mask", "target_ids", "target_mask")
_FIELDS = {"input_ids": "tokens", "target_ids": "labels", "token_mask": "loss_mask", "position_ids": "position_ids"}


def check_direct_microbatches(
    case: DirectCase, witnesses: Mapping[str, Callable[[DirectCase], Side]] | None = None
) -> CheckResult:
    """Compare rows flattened, masked and cut for every rank, and every depth of multi-token prediction.

    `witnesses` are further sides by name, with tensors named by `share_name`; a witness may have fewer of them.
    """
    sides: dict[str, Side] = {"reference": _reference_direct(case), "production": _production_direct(case)}
    if case.layout == "zigzag" and not isinstance(sides["reference"], str):
        sides["megatron_lm"] = _megatron_direct(case)
    sides |= {name: side(case) for name, side in (witnesses or {}).items()}
    return _compared("direct_microbatches", sides)


def check_online_microbatches(
    case: OnlineCase, witnesses: Mapping[str, Callable[[OnlineCase], Side]] | None = None
) -> CheckResult:
    """Compare conversations from the padded batch to every rank's share and depth; a refusal is named by the step that refuses.

    The third witness of the depths is megatron-core's roll of ids and mask, which its multi-token loss uses without labels. Production's input
    to the model is the same where megatron-core rolls for itself. `witnesses` as in `check_direct_microbatches`.
    """
    rows: list[tuple[tuple[int, int], reference.Squeezed]] = []
    sides: dict[str, Side] = {
        "reference": _reference_online(case, rows),
        "production": _production_online(case, "tables"),
    }
    if case.depths and not isinstance(sides["reference"], str):
        sides["megatron_lm"] = _megatron_depths(case, rows)
        sides["production, upstream_roll"] = _production_online(case, "upstream_roll")
    sides |= {name: side(case) for name, side in (witnesses or {}).items()}
    return _compared("online_microbatches", sides)


def _compared(check: str, sides: dict[str, Side]) -> CheckResult:
    """Compare all pairs to the bit; the two sides must also name the same tensors, and Megatron-LM makes some of them."""
    found = compare_sides(check, sides)
    left, right = (set(side) for side in (sides["reference"], sides["production"]))
    if any(isinstance(side, str) for side in sides.values()) or left == right:
        return found
    missing = Difference(
        tensor="names", position=None, left=sorted(left - right), right=sorted(right - left), kind="other"
    )
    found.findings.append(Finding(left="reference", right="production", differences=[missing]))
    return found


def _reference_direct(case: DirectCase) -> Side:
    count = [len(each) for each in case.boundaries]
    cu = [[*each, *[-1] * (max(count) - len(each))] for each in case.boundaries]
    longest = [max(b - a for a, b in itertools.pairwise(each)) for each in case.boundaries]
    batch = reference_batches.Batch(
        **case.tensors,
        packed_cu_seqlens=torch.tensor(cu, dtype=torch.int32),
        packed_cu_seqlens_lengths=torch.tensor(count),
        packed_max_seqlen=torch.tensor(longest),
        input_lengths=torch.tensor([each[-1] for each in case.boundaries]),
        sample_mask=torch.tensor(case.sample_mask),
    )
    found: dict[str, torch.Tensor] = {}
    try:
        for rank in range(case.size):
            made = reference.process_microbatch(
                batch, rank=rank, context_parallel_size=case.size, depths=case.depths, layout=case.layout
            )
            found |= _reference_share(made, rank)
    except RowRefused as refused:
        return refused.kind
    return found


def _production_direct(case: DirectCase) -> Side:
    rows = [
        {
            **{name: tensor[number] for name, tensor in case.tensors.items()},
            "cu_seqlens": torch.tensor(cu, dtype=torch.int32),
            "max_seqlen": int(torch.tensor(cu).diff().max()),
            "context_parallel_size": case.size,
        }
        for number, cu in enumerate(case.boundaries)
    ]
    batch = batches.collate(rows)
    batch.sample_mask.copy_(torch.tensor(case.sample_mask))
    found: dict[str, torch.Tensor] = {}
    try:
        for rank in range(case.size):
            settings = production.MicrobatchSettings(
                context_parallel_rank=rank, context_parallel_size=case.size, layout=case.layout, depths=case.depths
            )
            found |= _production_share(production.process_microbatch(batch, settings), rank)
    except BatchRefused as refused:
        return refused.kind
    return found


def _megatron_direct(case: DirectCase) -> Side:
    """Make the installed package's microbatch of the rows as its dataset collates them: boundaries right-filled with
    P.
    """
    longest = max(map(len, case.boundaries))
    cu = [[*each, *[each[-1]] * (longest - len(each))] for each in case.boundaries]
    masked = case.tensors | {"token_mask": case.tensors["token_mask"] * torch.tensor(case.sample_mask)[:, None]}
    batch: dict[str, Any] = {theirs: masked[ours] for ours, theirs in _FIELDS.items()}
    batch |= {
        "cu_seqlens": torch.tensor(cu, dtype=torch.int32),
        "max_seqlen": torch.tensor([int(torch.tensor(each).diff().max()) for each in cu], dtype=torch.int32),
    }
    flat = flatten_batch_for_packed_sequences(batch)
    boundaries = flat["cu_seqlens"][0]
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries)
    found: dict[str, torch.Tensor] = {}
    for rank in range(case.size):
        index = rotary_index(boundaries.tolist(), rank, case.size)
        own = {theirs: flat[theirs][0, index] for theirs in _FIELDS.values()}
        own |= {"input_ids": own.pop("tokens")}
        own |= {"target_ids": own["labels"], "target_mask": own["loss_mask"], "cu_seqlens": boundaries}
        own["max_seqlen"] = flat["max_seqlen"][0].long()
        found |= {share_name(name, rank): tensor for name, tensor in own.items()}
        for ours, theirs in _FIELDS.items():
            rolled = flat[theirs]
            for depth in range(1, case.depths + 1):
                rolled, _ = roll_tensor(rolled, -1, -1, None, params)
                found[share_name(f"{ours} at depth {depth}", rank)] = rolled[0, index]
    return found


def _megatron_depths(case: OnlineCase, rows: Sequence[tuple[tuple[int, int], reference.Squeezed]]) -> Side:
    """Return every depth of these rows, which the reference squeezed: labels are the ids rolled once, with the tokens' mask rolled along."""
    found: dict[str, torch.Tensor] = {}
    for place, row in rows:
        boundaries = row.cu_seqlens_padded
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(boundaries, dtype=torch.int32))
        rolled = {"input_ids": row.input_ids}
        rolled["target_ids"], _ = roll_tensor(row.input_ids, -1, -1, None, params)
        rolled["token_mask"], _ = roll_tensor(row.token_mask, -1, -1, None, params)
        cuts = [rotary_index(boundaries, rank, case.size) for rank in range(case.size)]
        found |= {share_name("cu_seqlens", (*place, rank)): params.cu_seqlens_q for rank in range(case.size)}
        for depth in range(1, case.depths + 1):
            rolled = {name: roll_tensor(tensor, -1, -1, None, params)[0] for name, tensor in rolled.items()}
            for rank, index in enumerate(cuts):
                for name, tensor in rolled.items():
                    found[share_name(f"{name} at depth {depth}", (*place, rank))] = tensor[index]
    return found


def _reference_online(case: OnlineCase, rows: list[tuple[tuple[int, int], reference.Squeezed]]) -> Side:
    """Return the reference's microbatches; store every squeezed row with its place in `rows`."""
    try:
        whole = reference.padded_batch(case.conversations, case.multiple)
        whole.sample_mask[case.uncounted] = 0
        bins = reference.bins(whole.input_lengths, case.multiple, case.capacity, case.packer, case.data_parallel_size)
    except reference_packing.PackingError:
        return "bins"
    lengths = [reference.round_up(length, case.multiple) for length in whole.input_lengths]
    ranks = [
        reference_packing.bins_of_rank(bins, data_rank, case.data_parallel_size)
        for data_rank in range(case.data_parallel_size)
    ]
    try:
        hows = [
            reference.padding(
                multiple=case.multiple,
                context_parallel_size=case.size,
                tensor_parallel_size=case.tensor_parallel_size,
                sequence_parallel=case.sequence_parallel,
                pipeline_parallel_size=case.pipeline_parallel_size,
                precision=case.precision,
                hybrid_expert_parallel=case.hybrid_expert_parallel,
                longest_bin=max(sum(lengths[member] for member in members) for members in own),
            )
            for own in ranks
        ]
    except reference.PaddingError:
        return "padding"
    found = _padded_batch(whole.input_ids, whole.token_mask, whole.sample_mask, whole.input_lengths)
    found["divisor"] = torch.tensor(reference.valid_tokens(whole), dtype=torch.float64)
    try:
        for data_rank, own in enumerate(ranks):
            for number, members in enumerate(own):
                for rank in range(case.size):
                    made = reference.process_microbatch(
                        reference.take(whole, members),
                        rank=rank,
                        context_parallel_size=case.size,
                        how=hows[data_rank],
                        depths=case.depths,
                    )
                    found |= _reference_share(made, (data_rank, number, rank))
                    if rank == 0 and made.row is not None:
                        rows.append(((data_rank, number), made.row))
    except RowRefused as refused:
        return refused.kind
    return found


def _production_online(case: OnlineCase, mtp: production.Mtp) -> Side:
    try:
        whole = padded_batch.build_padded_batch(
            [
                padded_batch.Conversation(
                    token_ids=torch.tensor(ids), token_mask=torch.tensor(mask, dtype=torch.float32)
                )
                for ids, mask in case.conversations
            ],
            make_sequence_length_divisible_by=case.multiple,
        )
        whole.sample_mask[case.uncounted] = 0
        bins = padded_batch.fill_bins(
            whole,
            case.capacity,
            algorithm=case.packer,
            make_sequence_length_divisible_by=case.multiple,
            data_parallel_size=case.data_parallel_size,
        )
    except PackproofError:
        return "bins"
    ranks = [
        packing.take_rank(bins, rank=data_rank, size=case.data_parallel_size)
        for data_rank in range(case.data_parallel_size)
    ]
    try:
        paddings = [
            squeeze.choose_padding(
                make_sequence_length_divisible_by=case.multiple,
                context_parallel_size=case.size,
                tensor_parallel_size=case.tensor_parallel_size,
                sequence_parallel=case.sequence_parallel,
                pipeline_parallel_size=case.pipeline_parallel_size,
                precision=case.precision,  # type: ignore[arg-type] # one of them
                hybrid_expert_parallel=case.hybrid_expert_parallel,
                longest_bin=padded_batch.longest_bin(whole, own, make_sequence_length_divisible_by=case.multiple),
            )
            for own in ranks
        ]
    except PackproofError:
        return "padding"
    found = _padded_batch(whole.input_ids, whole.token_mask, whole.sample_mask, whole.input_lengths.tolist())
    found["divisor"] = whole.valid_tokens()
    # What the padded batch holds behind a sequence must not be read.
    behind = torch.arange(whole.input_ids.shape[1]) >= whole.input_lengths[:, None]
    whole.input_ids[behind], whole.token_mask[behind] = 999_999, torch.nan
    try:
        for data_rank, own in enumerate(ranks):
            for number, members in enumerate(own):
                for rank in range(case.size):
                    settings = production.MicrobatchSettings(
                        context_parallel_rank=rank,
                        context_parallel_size=case.size,
                        padding=paddings[data_rank],
                        depths=case.depths,
                        mtp=mtp,
                    )
                    made = production.process_microbatch(padded_batch.take_sequences(whole, members), settings)
                    found |= _production_share(made, (data_rank, number, rank))
    except BatchRefused as refused:
        return refused.kind
    return found


def _padded_batch(
    ids: torch.Tensor, mask: torch.Tensor, sample_mask: torch.Tensor, lengths: list[int]
) -> dict[str, torch.Tensor]:
    return {
        "padded batch": ids.clone(),
        "mask of the padded batch": mask.clone(),
        "sample mask": sample_mask.clone(),
        "lengths": torch.tensor(lengths),
    }


def _reference_share(made: reference.Microbatch, rank: object) -> dict[str, torch.Tensor]:
    named = {name: getattr(made, name) for name in NAMES}
    named |= {
        "cu_seqlens": torch.tensor(made.cu_seqlens, dtype=torch.int32),
        "max_seqlen": torch.tensor(made.max_seqlen),
        "total_tokens": torch.tensor(made.total_tokens),
    }
    for depth, each in enumerate(made.depths, 1):
        named |= {f"{name} at depth {depth}": getattr(each, name) for name in _FIELDS}
    if made.row is not None:
        named |= {f"{name} of the row": getattr(made.row, name) for name in ("input_ids", "target_ids", "target_mask")}
        named["true cu_seqlens"] = torch.tensor(made.row.cu_seqlens, dtype=torch.int32)
    return _told(named, rank)


def _production_share(made: production.Microbatch, rank: object) -> dict[str, torch.Tensor]:
    params = made.packed_seq_params
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert torch.equal(getattr(params, name), params.cu_seqlens_q)
    assert params.qkv_format == "thd"
    assert params.max_seqlen_q == params.max_seqlen_kv
    named = {name: None if (tensor := getattr(made, name)) is None else tensor[0] for name in NAMES}
    named |= {
        "cu_seqlens": params.cu_seqlens_q,
        "max_seqlen": torch.tensor(params.max_seqlen_q),
        "total_tokens": torch.tensor(made.total_tokens),
    }
    if isinstance(params, MultiTokenParams) and params.feed is not None:
        tables = params.feed.tables
        for depth in range(1, tables.depths + 1):
            for name in _FIELDS:
                table = getattr(tables, name)
                named[f"{name} at depth {depth}"] = None if table is None else table[depth, 0]
    if made.row is not None:
        named |= {
            f"{name} of the row": getattr(made.row, name)[0] for name in ("input_ids", "target_ids", "target_mask")
        }
        named["true cu_seqlens"] = made.row.cu_seqlens
    return _told(named, rank)


def _told(named: dict[str, torch.Tensor | None], rank: object) -> dict[str, torch.Tensor]:
    """Replace None by an empty tensor, so that missing tensors are compared too."""
    return {share_name(name, rank): torch.empty(0) if tensor is None else tensor for name, tensor in named.items()}


def share_name(name: str, rank: object) -> str:
    """Return a tensor's name among those of all ranks; `rank` is a number, or (data-parallel rank, microbatch, rank) online."""
    return f"{name} of rank {rank}"
