"""Cut a built row to a rank's share by three backends: the reference, production, and the installed Megatron-LM.

Any other side without a `cut_row` of its own uses the reference's backend, so that only its row can differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from equivalence.subjects import Row
from production.errors import BatchRefused
from production.library_warnings import quiet_libraries
from reference import batches as reference_batches
from reference import context_parallel as reference_context
from reference import microbatches as reference
from reference.refusals import RowRefused
from tools.diff_row.errors import problem
from tools.diff_row.rank.steps import TENSORS, Has, Refused

Way = Mapping[str, Has]
"""By `microbatch`, `depth K`, `share`, `share, depth K`: a side's tensors there, or why it has none."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Settings for cutting a row."""

    rank: int
    """Among the cp ranks."""
    size: int
    """cp."""
    layout: str
    """One of `reference.context_parallel.LAYOUTS`."""
    depths: int
    """K, 0 for none."""


def walk(side: str, row: Row, cut: Cut, subject: Any = None) -> tuple[str, Way]:
    """Return the backend that continues from the side's row, and its tensors. A subject may have its own `cut_row(row, cut) -> Way`."""
    own = getattr(subject, "cut_row", None)
    if own is not None:
        try:
            return side, own(row, cut)
        except Exception as error:  # whatever a user's own side raises
            raise problem(
                f"side {side!r} could not go on from its row ({type(error).__name__}: {error})",
                where="cut_row",
                fix="let it give tensors by step, or a Refused",
            ) from error
    if side == "production":
        return "production", _production(row, cut)
    if side == "megatron_lm":
        return "megatron-core", _megatron(row, cut)
    return "reference", reference_way(row, cut)


def reference_way(row: Row, cut: Cut) -> Way:
    """Cut by `reference.microbatches.process_microbatch`, once for the whole row and once for the rank."""
    batch = reference_batches.collate([row])  # type: ignore[list-item] # the same five fields
    whole = reference.process_microbatch(
        batch, rank=0, context_parallel_size=1, depths=cut.depths, layout="zigzag"
    )  # at cp 1 nothing is cut, in any layout
    found: dict[str, Has] = {"microbatch": _reference_tensors(whole)}
    for depth, each in enumerate(whole.depths, 1):
        found[f"depth {depth}"] = {name: getattr(each, name) for name in TENSORS}
    try:
        made = reference.process_microbatch(
            batch, rank=cut.rank, context_parallel_size=cut.size, depths=cut.depths, layout=cut.layout
        )
        owned = reference_context.owned_positions(whole.cu_seqlens, cut.rank, cut.size, cut.layout)
    except RowRefused as refused:
        return found | _ended(cut, Refused(kind=refused.kind, message=refused.why))
    found["share"] = {"positions": torch.tensor(owned), **_reference_tensors(made)}
    for depth, each in enumerate(made.depths, 1):
        found[f"share, depth {depth}"] = {name: getattr(each, name) for name in TENSORS}
    return found


def _reference_tensors(made: reference.Microbatch) -> dict[str, torch.Tensor]:
    assert made.position_ids is not None
    return {
        "input_ids": made.input_ids,
        "target_ids": made.target_ids,
        "token_mask": made.target_mask,
        "position_ids": made.position_ids,
        "cu_seqlens": torch.tensor(made.cu_seqlens, dtype=torch.int32),
        "max_seqlen": torch.tensor(made.max_seqlen),
    }


def _production(row: Row, cut: Cut) -> Way:
    """Cut by `production.parallel.microbatches.process_microbatch`, once for the whole row and once for the rank."""
    with quiet_libraries():
        from production.parallel import microbatches as production  # noqa: PLC0415 - heavy, and needed only here
        from production.parallel.context_parallel import shard_index  # noqa: PLC0415

    fields = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens", "max_seqlen")
    from production.rows.batch import collate  # noqa: PLC0415

    batch = collate([{name: getattr(row, name) for name in fields}])
    found: dict[str, Has] = {}
    try:
        made = production.process_microbatch(batch, production.MicrobatchSettings(depths=cut.depths))
        found |= _production_tensors(made, "microbatch", "depth {}")
        settings = production.MicrobatchSettings(
            context_parallel_rank=cut.rank, context_parallel_size=cut.size, layout=cut.layout, depths=cut.depths
        )
        share = production.process_microbatch(batch, settings)
        index = shard_index(made.packed_seq_params.cu_seqlens_q, cut.rank, cut.size, layout=cut.layout)
    except BatchRefused as refused:
        told = Refused(kind=refused.kind, message=f"{refused.where}: {refused.what}. To fix it: {refused.fix}")
        begun = {} if found else {"microbatch": told} | {f"depth {depth}": told for depth in range(1, cut.depths + 1)}
        return begun | _ended(cut, told) | found
    cut_up = _production_tensors(share, "share", "share, depth {}")
    return found | cut_up | {"share": {"positions": index, **_named(cut_up["share"])}}


def _production_tensors(made: Any, name: str, deeper: str) -> dict[str, Has]:
    params = made.packed_seq_params
    found: dict[str, Has] = {
        name: {
            "input_ids": made.input_ids[0],
            "target_ids": made.target_ids[0],
            "token_mask": made.target_mask[0],
            "position_ids": made.position_ids[0],
            "cu_seqlens": params.cu_seqlens_q_padded,
            "max_seqlen": torch.tensor(params.max_seqlen_q),
        }
    }
    if (feed := getattr(params, "feed", None)) is not None:
        for depth in range(1, feed.tables.depths + 1):
            found[deeper.format(depth)] = {each: getattr(feed.tables, each)[depth, 0] for each in TENSORS}
    return found


def _megatron(row: Row, cut: Cut) -> Way:
    """Cut by megatron-core's roll of the whole row and the index of its rotary embedding, in pure torch."""
    with quiet_libraries():
        from megatron.core.packed_seq_params import PackedSeqParams  # noqa: PLC0415
        from megatron.core.transformer.multi_token_prediction import roll_tensor  # noqa: PLC0415
        from megatron.core.utils import flatten_batch_for_packed_sequences  # noqa: PLC0415

        from equivalence.checks.cuts.context_parallel import rotary_index  # noqa: PLC0415

    theirs = {
        "input_ids": "tokens",
        "target_ids": "labels",
        "token_mask": "loss_mask",
        "position_ids": "position_ids",
    }
    batch = {name: _of(row, ours)[None] for ours, name in theirs.items()}
    batch |= {
        "cu_seqlens": _of(row, "cu_seqlens")[None],
        "max_seqlen": torch.tensor([row.max_seqlen], dtype=torch.int32),
    }
    flat = flatten_batch_for_packed_sequences(batch)
    cu = flat["cu_seqlens"][0]
    bounds = {"cu_seqlens": cu, "max_seqlen": flat["max_seqlen"][0].long()}
    whole = {ours: flat[name][0] for ours, name in theirs.items()}
    found: dict[str, Has] = {"microbatch": whole | bounds}
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu)
    deeper = [whole]
    for depth in range(1, cut.depths + 1):
        deeper.append({name: roll_tensor(tensor, -1, -1, None, params)[0] for name, tensor in deeper[-1].items()})
        found[f"depth {depth}"] = deeper[-1]
    if cut.layout != "zigzag":
        return found | _ended(
            cut, Refused(kind=None, message=f"nothing installed of Megatron-LM cuts as {cut.layout!r}")
        )
    if cut.size > 1 and bool((cu.diff() % (2 * cut.size)).any()):
        return found | _ended(cut, Refused(kind=None, message="cuts what does not divide, wrongly: no witness of that"))
    index = rotary_index(cu.tolist(), cut.rank, cut.size) if cut.size > 1 else torch.arange(int(cu[-1]))
    for depth, tensors in enumerate(deeper):
        found[f"share, depth {depth}" if depth else "share"] = {n: tensor[index] for n, tensor in tensors.items()}
    return found | {"share": {"positions": index, **_named(found["share"]), **bounds}}


def _ended(cut: Cut, why: Refused) -> dict[str, Has]:
    """Return the same reason for each step of a share."""
    ended: dict[str, Has] = {"share": why}
    return ended | {f"share, depth {depth}": why for depth in range(1, cut.depths + 1)}


def _named(has: Has) -> Mapping[str, torch.Tensor]:
    assert not isinstance(has, Refused)
    return has


def _of(row: Row, name: str) -> torch.Tensor:
    tensor = getattr(row, name)
    assert isinstance(tensor, torch.Tensor)
    return tensor
