"""The direct path in NeMo-RL: a row processor, a collate function and the packed branch of `process_microbatch`, by its field names.

NeMo-RL cannot be installed beside this (it brings its own environment), so nothing of it is imported and nothing here has run in it:
`container` is where its `BatchedDataDict` goes, and the suite puts a dictionary of the same few methods there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from production.batches import Batch, BatchSettings, collate_checked
from production.errors import PackproofError
from production.microbatches import Microbatch, MicrobatchSettings, process_microbatch
from production.rows import RowBuilder, RowSettings
from production.semantics import parse

TASK = "megatron_sft_packed"
"""The name of the response dataset, and of its task."""
ROW_FIELDS = {
    **{name: name for name in ("input_ids", "target_ids", "token_mask", "position_ids")},
    "packed_cu_seqlens": "cu_seqlens",
    "packed_max_seqlen": "max_seqlen",
    "packed_context_parallel_size": "context_parallel_size",
}
"""The row's fields: NeMo-RL's name, and production's."""
BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(Batch))
"""A collated batch has the same names on both sides."""


def format_data(data: Mapping[str, Any], *, chat_key: str = "messages") -> dict[str, Any]:
    """What the dataset keeps of a line: the row's messages and the task. Text, not tensors: the run's tokenizer decides the tokens."""
    return {"packed_messages": list(data[chat_key]), "task_name": TASK}


class PackedProcessor:
    """A NeMo-RL data processor that builds rows. One for each worker process: it keeps its tokenizer."""

    def __init__(
        self,
        *,
        prompt_format: str,
        context_parallel_size: int,
        pad_token: str | None = None,
        assistant_prefix_len: int | None = None,
        semantics: str = "nemo-rl-direct",
    ) -> None:
        """The values of `data.default`'s `megatron_sft_…` keys, and packproof's semantics by name."""
        self._options: dict[str, Any] = {
            "prompt_format": prompt_format,
            "context_parallel_size": context_parallel_size,
            "pad_token": pad_token,
            "assistant_prefix_len": assistant_prefix_len,
            "semantics": parse(semantics),
        }
        self._made: tuple[Any, int, RowBuilder] | None = None

    def __call__(
        self, datum_dict: Mapping[str, Any], _task_data_spec: Any, tokenizer: Any, max_seq_length: int, idx: int
    ) -> dict[str, Any]:
        """One row as a DatumSpec: tensors [max_seq_length] as `production.rows.Row` has them, under ROW_FIELDS. Raises RowRefused."""
        row = self._builder(tokenizer, max_seq_length).build(datum_dict["packed_messages"])
        return {
            **{theirs: getattr(row, ours) for theirs, ours in ROW_FIELDS.items()},
            "length": max_seq_length,
            "loss_multiplier": 1.0,
            "idx": idx,
            "task_name": datum_dict["task_name"],
        }

    def _builder(self, tokenizer: Any, pack_length: int) -> RowBuilder:
        if self._made is None or self._made[0] is not tokenizer or self._made[1] != pack_length:
            settings = RowSettings(pack_length=pack_length, **self._options)
            self._made = tokenizer, pack_length, RowBuilder(tokenizer=tokenizer, settings=settings)
        return self._made[2]


def collate(
    data_batch: Sequence[Mapping[str, Any]],
    *,
    settings: BatchSettings,
    container: Callable[[dict[str, Any]], Any] = dict,
) -> Any:
    """The batch of these rows under BATCH_FIELDS, checked on the host (SPEC R-GUARD-1), with `idx` and `task_name` as lists.

    NeMo-RL gives each data-parallel rank a run of neighboring rows; Megatron-LM gives rank r rows r, r + dp, … (R-BATCH-3). So rows are
    dealt out here, and its cut into runs then leaves each rank what Megatron-LM would. For a batch in which any row has
    `packed_cu_seqlens`; raises BatchRefused, also where not all have it.
    """
    packed = [{ours: row[theirs] for theirs, ours in ROW_FIELDS.items() if theirs in row} for row in data_batch]
    batch = collate_checked(packed, settings)
    size = settings.data_parallel_size
    if len(data_batch) % size:
        raise PackproofError(
            what=f"{len(data_batch)} rows over {size} data-parallel ranks",
            where="collate",
            mend="pad a validation batch first: repeat its last row with loss_multiplier 0 (R-BATCH-4)",
        )
    order = [number for rank in range(size) for number in range(rank, len(data_batch), size)]
    multipliers = torch.tensor([float(row["loss_multiplier"]) for row in data_batch], dtype=torch.float32)
    fields = {name: getattr(batch, name)[order] for name in BATCH_FIELDS}
    return container(
        {
            **fields,
            "sample_mask": multipliers[order],
            "idx": [data_batch[number]["idx"] for number in order],
            "task_name": [data_batch[number].get("task_name") for number in order],
        }
    )


def packed_microbatch(
    data_dict: Mapping[str, Any], settings: MicrobatchSettings, *, device: torch.device | str | None = None
) -> Microbatch | None:
    """The packed branch of NeMo-RL's `process_microbatch`: None where the batch has no `packed_cu_seqlens`, and the other branches go on.

    Gives this rank's tensors [1, n] and `thd` parameters; labels and loss mask go to the model. Raises BatchRefused, PackproofError.
    """
    if "packed_cu_seqlens" not in data_dict:
        return None
    if missing := [name for name in BATCH_FIELDS if name not in data_dict]:
        raise PackproofError(
            what=f"a packed batch without {', '.join(missing)}",
            where="process_microbatch",
            mend="collate it with collate()",
        )
    return process_microbatch(Batch(**{name: data_dict[name] for name in BATCH_FIELDS}), settings, device=device)
