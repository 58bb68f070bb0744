"""Multi-token prediction: ids, positions, labels and masks of every depth on every rank are equal (R-MTP).

Third witness is megatron-core's roll of the whole row, applied once more for each depth, cut by its rotary embedding's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.context_parallel import rotary_index
from equivalence.checks.cuts.pairs import Side, compare_sides
from production.errors import BatchRefused
from production.parallel.multi_token import depth_tables
from production.rows.batch import FlatBatch
from reference import context_parallel, multi_token
from reference.refusals import RowRefused

NAMES = ("input_ids", "target_ids", "token_mask", "position_ids")


def check_multi_token(
    tensors: Mapping[str, torch.Tensor], cu_seqlens: Sequence[int], size: int, depths: int
) -> CheckResult:
    """Shift a row's four tensors [P] to depths 1 to `depths` and cut them for every rank of `size`, on each side."""
    sides: dict[str, Side] = {
        "reference": _reference(tensors, cu_seqlens, size, depths),
        "production": _production(tensors, cu_seqlens, size, depths),
    }
    if not isinstance(sides["reference"], str):
        sides["megatron_lm"] = _megatron(tensors, cu_seqlens, size, depths)
    return compare_sides("multi_token", sides)


def _reference(tensors: Mapping[str, torch.Tensor], cu_seqlens: Sequence[int], size: int, depths: int) -> Side:
    found: dict[str, torch.Tensor] = {}
    shifted = multi_token.depths(**{name: tensors[name] for name in NAMES}, cu_seqlens=cu_seqlens, count=depths)
    try:
        for rank in range(size):
            for depth in range(depths + 1):
                for name in NAMES:
                    whole = tensors[name] if depth == 0 else getattr(shifted[depth - 1], name)
                    found[_name(name, depth, rank)] = context_parallel.shard(whole, cu_seqlens, rank, size)
    except RowRefused as refused:
        return refused.kind
    masks = [tensors["token_mask"], *(each.token_mask for each in shifted)]
    return found | {f"count at depth {depth}": mask.sum() for depth, mask in enumerate(masks)}


def _production(tensors: Mapping[str, torch.Tensor], cu_seqlens: Sequence[int], size: int, depths: int) -> Side:
    boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
    row = FlatBatch(
        input_ids=tensors["input_ids"][None],
        target_ids=tensors["target_ids"][None],
        token_mask=tensors["token_mask"][None],
        position_ids=tensors["position_ids"][None],
        cu_seqlens=boundaries,
        max_seqlen=int(boundaries.diff().max()),
    )
    found: dict[str, torch.Tensor] = {}
    try:
        for rank in range(size):
            tables = depth_tables(row, depths, rank=rank, size=size)
            for depth in range(depths + 1):
                found |= {_name(name, depth, rank): getattr(tables, name)[depth, 0] for name in NAMES}
                # Each rank says the same of the rows; the last one is compared.
                found[f"count at depth {depth}"] = tables.row_counts[depth]
    except BatchRefused as refused:
        return refused.kind
    return found


def _megatron(tensors: Mapping[str, torch.Tensor], cu_seqlens: Sequence[int], size: int, depths: int) -> Side:
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(cu_seqlens, dtype=torch.int32))
    ranks = [rotary_index(cu_seqlens, rank, size) for rank in range(size)]
    found: dict[str, torch.Tensor] = {}
    for name in NAMES:
        tensor, count = tensors[name], tensors[name].sum()
        for depth in range(depths + 1):
            if depth:
                tensor, count = roll_tensor(tensor, -1, -1, None, params)
            found |= {_name(name, depth, rank): tensor[index] for rank, index in enumerate(ranks)}
            if name == "token_mask":
                found[f"count at depth {depth}"] = count
    return found


def _name(name: str, depth: int, rank: int) -> str:
    return f"{name} at depth {depth} of rank {rank}"
