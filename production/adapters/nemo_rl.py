"""The direct path in NeMo-RL, by its own names: a row processor, a collate function and the packed branch of `process_microbatch`.

Made for the tree of pull request 3380, whose policy deals a packed batch's rows out itself. NeMo-RL brings its own environment, so nothing of
it is imported: `container` is where its `BatchedDataDict` goes, `inputs` where its `ProcessedInputs` goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from production.errors import PackproofError
from production.parallel.microbatches import MicrobatchSettings, process_microbatch
from production.rows.batch import Batch, BatchSettings, collate_checked
from production.rows.builder import RowBuilder, RowSettings
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
    """Return the part of a line that the dataset keeps: the row's messages and the task. It is text and not tensors, because the run's tokenizer decides the tokens."""
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
        """Take the values of `data.default`'s `megatron_sft_…` keys, and packproof's semantics by name."""
        self._options: dict[str, Any] = {
            "prompt_format": prompt_format,
            "context_parallel_size": context_parallel_size,
            "pad_token": pad_token,
            "assistant_prefix_len": assistant_prefix_len,
            "semantics": parse(semantics),
        }
        self._made: tuple[Any, int, RowBuilder] | None = None

    def __call__(
        self,
        datum_dict: Mapping[str, Any],
        _task_data_spec: Any,
        tokenizer: Any,
        max_seq_length: int,
        idx: int,
        *,
        add_bos: bool = False,
        add_eos: bool = False,
        add_generation_prompt: bool = False,
    ) -> dict[str, Any]:
        """Return one row as a DatumSpec: tensors [max_seq_length] as `production.rows.builder.Row` has them, under ROW_FIELDS. Raises RowRefused.

        `run_sft.py` passes the three keywords to every processor; a packed row takes its tokens from its text alone (R-ENCODE-1).
        """
        del add_bos, add_eos, add_generation_prompt
        row = self._builder(tokenizer, max_seq_length).build(datum_dict["packed_messages"])
        return {
            "message_log": [],
            **{theirs: getattr(row, ours) for theirs, ours in ROW_FIELDS.items()},
            "length": max_seq_length,
            "extra_env_info": None,
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
    megatron_sft_context_parallel_size: int | None = None,
    *,
    container: Callable[[dict[str, Any]], Any] = dict,
) -> Any:
    """Return the batch of these rows under BATCH_FIELDS, checked on the host (SPEC R-GUARD-1), with `idx` and `task_name` as lists; None if no row is packed.

    Rows keep their order: the policy gives data-parallel rank r the rows r, r + dp, … itself (R-BATCH-3). A batch may have any number of rows:
    NeMo-RL fills a partial validation batch afterwards (`maybe_pad_last_batch`), and its policy refuses a number that dp does not divide.
    Without a size, the rows' own context-parallel size is taken, and all rows must have the same. Raises BatchRefused.
    """
    packed = [{ours: row[theirs] for theirs, ours in ROW_FIELDS.items() if theirs in row} for row in data_batch]
    if not any("cu_seqlens" in row for row in packed):
        return None
    sizes = [row["context_parallel_size"] for row in packed if "context_parallel_size" in row]
    settings = BatchSettings(
        context_parallel_size=megatron_sft_context_parallel_size or next(iter(sizes), 1),
        data_parallel_size=1,
        global_batch_size=None,
    )
    batch = collate_checked(packed, settings)
    multipliers = torch.tensor([float(row["loss_multiplier"]) for row in data_batch], dtype=torch.float32)
    return container(
        {
            **{name: getattr(batch, name) for name in BATCH_FIELDS},
            "sample_mask": multipliers,
            "idx": [row["idx"] for row in data_batch],
            "task_name": [row.get("task_name") for row in data_batch],
        }
    )


def packed_microbatch(
    data_dict: Mapping[str, Any], settings: MicrobatchSettings, *, inputs: Callable[..., Any]
) -> Any | None:
    """Return the packed branch of `process_microbatch`, as the `ProcessedInputs` of pull request 3380 (`inputs`); None if the batch is not packed.

    This rank's tensors are [1, n], with `thd` parameters; labels and loss mask go to the model. NeMo-RL has moved the batch to the device
    already, so its fields are copied back for the checks, which waits for the device once per microbatch. Raises BatchRefused, PackproofError.
    """
    if "packed_cu_seqlens" not in data_dict:
        return None
    if missing := [name for name in BATCH_FIELDS if name not in data_dict]:
        raise PackproofError(
            what=f"a packed batch must have {', '.join(missing)}",
            where="process_microbatch",
            fix="collate it with collate()",
        )
    device = data_dict["input_ids"].device
    batch = Batch(**{name: data_dict[name].cpu() for name in BATCH_FIELDS})
    made = process_microbatch(batch, settings, device=None if device.type == "cpu" else device)
    return inputs(
        input_ids=data_dict["input_ids"],
        input_ids_cp_sharded=made.input_ids,
        attention_mask=None,
        position_ids=made.position_ids,
        packed_seq_params=made.packed_seq_params,
        cu_seqlens_padded=made.packed_seq_params.cu_seqlens_q_padded,
        mtp_loss_mask=made.loss_mask if "mtp_loss_mask" in data_dict else None,
        labels_cp_sharded=made.labels,
        loss_mask_cp_sharded=made.loss_mask,
    )
