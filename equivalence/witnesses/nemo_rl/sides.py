"""Make with NeMo-RL's own code what the checks of the suite compare: batches, shares and depths, bins, conversations, rows of the online path."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import roll_tensor

from equivalence.checks.cuts.context_parallel import rotary_index
from equivalence.checks.cuts.microbatches import share_name
from equivalence.checks.cuts.pairs import Side
from equivalence.generators import tokenizers
from equivalence.generators.online import DirectCase, OnlineCase
from equivalence.recorded.outcomes import (
    CONVERSATION_MULTIPLE,
    CONVERSATION_PAD,
    Packing,
    RecordedBatch,
    RecordedConversation,
)
from equivalence.subjects.protocol import Row
from equivalence.witnesses.nemo_rl.stand_ins import CheckoutModules
from equivalence.witnesses.nemo_rl.world import one_rank, rank_of

_DATA = "nemo_rl.models.megatron.data"
_BATCHES = "nemo_rl.distributed.batched_data_dict"
_MESSAGES = "nemo_rl.data.llm_message_utils"
_FP8 = {"fp8_blockwise": "blockwise", "fp8_mxfp8": "mxfp8", "fp8_other": "tensorwise"}
_SHIFTED = {"input_ids": "input_ids", "target_ids": "labels", "token_mask": "loss_mask", "position_ids": "position_ids"}


class BatchSide:
    """NeMo-RL's collate function and its padding of a last validation batch."""

    def __init__(self, modules: CheckoutModules) -> None:
        self._collate = modules.get("nemo_rl.data.collate_fn", "_collate_megatron_sft_packed")
        self._pad = modules.get("nemo_rl.algorithms.utils", "maybe_pad_last_batch")

    def batches(self, recorded: RecordedBatch) -> tuple[Any, Any]:
        """Return the batch of these rows, and the same padded."""
        rows = [datum(row, recorded.context_parallel_size, idx) for idx, row in enumerate(recorded.rows)]
        batch = self._collate(rows, recorded.context_parallel_size)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a line for each padded batch
            return copy.copy(batch), self._pad(copy.deepcopy(batch), recorded.data_parallel_size, 1)


class DirectSide:
    """NeMo-RL's microbatches of packed rows, for each rank of a context-parallel group."""

    def __init__(self, modules: CheckoutModules) -> None:
        self._iterator = modules.get(_DATA, "get_microbatch_iterator")
        self._dict = modules.get(_BATCHES, "BatchedDataDict")

    def __call__(self, case: DirectCase) -> Side:
        """Return every rank's tensors at depth 0, and the depths that megatron-core rolls out of the row."""
        found: dict[str, torch.Tensor] = {}
        for rank in range(case.size):
            try:
                with rank_of(case.size, rank):
                    (made,) = self._iterator(self._batch(case), _config(cp=case.size), 1, None)[0]
            except ValueError as error:
                if "must be divisible by" not in str(error):
                    raise
                return "indivisible_segment"
            found |= _share(made, rank)
        return found | self._depths(case)

    def _batch(self, case: DirectCase) -> Any:
        (boundaries,), one = case.boundaries, torch.tensor
        return self._dict(
            **{name: tensor.clone() for name, tensor in case.tensors.items()},
            sample_mask=one(case.sample_mask),
            input_lengths=one([boundaries[-1]]),
            packed_cu_seqlens=one([boundaries], dtype=torch.int32),
            packed_cu_seqlens_lengths=one([len(boundaries)]),
            packed_max_seqlen=one([int(one(boundaries).diff().max())]),
        )

    def _depths(self, case: DirectCase) -> dict[str, torch.Tensor]:
        """Roll NeMo-RL's row by NeMo-RL's parameters as megatron-core does, and cut each depth for every rank."""
        if not case.depths:
            return {}
        with rank_of(1, 0):
            (row,) = self._iterator(self._batch(case), _config(cp=1), 1, None)[0]
        tensors = {
            "input_ids": row.input_ids_cp_sharded,
            "labels": row.labels_cp_sharded,
            "loss_mask": row.loss_mask_cp_sharded,
            "position_ids": row.position_ids,
        }
        cuts = [rotary_index(row.packed_seq_params.cu_seqlens_q.tolist(), rank, case.size) for rank in range(case.size)]
        found = {}
        for ours, theirs in _SHIFTED.items():
            rolled = tensors[theirs]
            for depth in range(1, case.depths + 1):
                rolled, _ = roll_tensor(rolled, -1, -1, None, row.packed_seq_params)
                for rank, index in enumerate(cuts):
                    found[share_name(f"{ours} at depth {depth}", rank)] = rolled[0, index]
        return found


class PackerSide:
    """NeMo-RL's four packers."""

    def __init__(self, modules: CheckoutModules) -> None:
        self._module = modules.module("nemo_rl.data.packing.algorithms")
        self._get_packer = modules.get("nemo_rl.data.packing.algorithms", "get_packer")

    def bins(self, packing: Packing) -> list[list[int]] | None:
        """Return the bins, in the order that is given for `first_fit_shuffle`; None where NeMo-RL refuses."""
        multiple = packing.multiple_of
        packer = self._get_packer(
            packing.algorithm, packing.capacity, min_bin_count=multiple, bin_count_multiple=multiple
        )
        before = self._module.random
        self._module.random = SimpleNamespace(shuffle=lambda items: _put_in_order(items, packing.order))  # type: ignore[attr-defined]
        try:
            bins: list[list[int]] = packer.pack(list(packing.lengths))
        except ValueError:
            return None
        finally:
            self._module.random = before  # type: ignore[attr-defined]
        return bins


class ConversationSide:
    """NeMo-RL's processor of chat conversations, its mask and its padding."""

    def __init__(self, modules: CheckoutModules) -> None:
        self._processor = modules.get("nemo_rl.data.processors", "sft_processor")
        self._add_mask = modules.get(_MESSAGES, "add_loss_mask_to_message_log")
        self._flatten = modules.get(_MESSAGES, "batched_message_log_to_flat_message")
        self._spec = modules.get("nemo_rl.data.interfaces", "TaskDataSpec")

    def sequence(self, case: RecordedConversation) -> dict[str, Any]:
        """Return ids, mask, length and weight by the names of a recorded conversation."""
        tokenizer = copy.deepcopy(tokenizers.load("word"))
        tokenizer.chat_template = case.template
        if case.without_bos_token:
            tokenizer.bos_token = None
        datum = self._processor(
            {"task_name": "chat", "messages": copy.deepcopy(list(case.messages)), "tools": copy.deepcopy(case.tools)},
            self._spec(task_name="chat"),
            tokenizer,
            case.max_length,
            0,
            add_bos=case.add_bos,
            add_eos=case.add_eos,
            add_generation_prompt=case.add_generation_prompt,
        )
        logs = [datum["message_log"]]
        self._add_mask(logs, roles_to_train_on=["assistant"])
        flat, lengths = self._flatten(logs, {"token_ids": CONVERSATION_PAD}, CONVERSATION_MULTIPLE)
        return {
            "input_ids": tuple(flat["token_ids"][0].tolist()),
            "token_mask": tuple(flat["token_loss_mask"][0].tolist()),
            "input_length": int(lengths[0]),
            "weight": float(datum["loss_multiplier"]),
        }


class OnlineSide:
    """NeMo-RL's online path: from tokenized conversations to the rows of every rank."""

    def __init__(self, modules: CheckoutModules) -> None:
        self._iterator = modules.get(_DATA, "get_microbatch_iterator")
        self._global_batch = modules.get(_DATA, "process_global_batch")
        self._dict = modules.get(_BATCHES, "BatchedDataDict")
        self._flatten = modules.get(_MESSAGES, "batched_message_log_to_flat_message")

    def __call__(self, case: OnlineCase) -> Side:
        """Return padded batch, divisor, and each rank's rows; the step that refuses names a refusal."""
        whole = self.padded_batch(case)
        try:
            shards = self.shards(case, whole)
        except ValueError:
            return "bins"
        found = {
            "padded batch": whole["input_ids"],
            "mask of the padded batch": whole["token_mask"].float(),
            "sample mask": whole["sample_mask"],
            "lengths": whole["input_lengths"].long(),
            "divisor": self.divisor(whole).double(),
        }
        for data_rank, shard in enumerate(shards):
            for rank in range(case.size):
                try:
                    for number, made in enumerate(self.rows(case, shard, rank)):
                        found |= _online_share(made, (data_rank, number, rank), has_depths=case.depths > 0)
                except AssertionError as error:
                    if "make_sequence_length_divisible_by" not in str(error):
                        raise
                    return "padding"
        return found

    def padded_batch(self, case: OnlineCase) -> Any:
        """Return the batch that a step of supervised fine-tuning makes of the conversations."""
        logs = [
            [{"token_ids": torch.tensor(ids), "token_loss_mask": torch.tensor(mask)}]
            for ids, mask in case.conversations
        ]
        flat, lengths = self._flatten(logs, {"token_ids": 0}, case.multiple)
        weights = torch.ones(len(logs))
        weights[case.uncounted] = 0
        return self._dict(
            input_ids=flat["token_ids"],
            input_lengths=lengths,
            token_mask=flat["token_loss_mask"],
            sample_mask=weights,
        )

    def shards(self, case: OnlineCase, whole: Any) -> list[Any]:
        """Return each data-parallel rank's part, packed. ValueError for sequences that cannot be packed."""
        packing = {
            "algorithm": case.packer,
            "max_tokens_per_microbatch": case.capacity,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_pad_multiple": case.multiple,
        }
        shards, _ = whole.shard_by_batch_size(
            case.data_parallel_size, batch_size=len(case.conversations), sequence_packing_args=packing
        )
        return list(shards)

    def divisor(self, whole: Any) -> torch.Tensor:
        """Return the loss's divisor, as NeMo-RL reduces it over its data-parallel group."""
        with one_rank():
            made = self._global_batch(whole, None, None, batch_idx=0, batch_size=len(whole["input_ids"]))
        valid: torch.Tensor = made["global_valid_toks"]
        return valid

    def rows(self, case: OnlineCase, shard: Any, rank: int) -> Iterator[Any]:
        """Yield the microbatches of one context-parallel rank. AssertionError for a padding that cannot be."""
        batch = shard.get_batch(0)
        if case.depths:
            batch["mtp_loss_mask"] = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
        with rank_of(case.size, rank):
            yield from self._iterator(batch, online_config(case), 1, None)[0]


def datum(row: Row, context_parallel_size: int, idx: int) -> dict[str, Any]:
    """Return a row as NeMo-RL's preprocessor hands it over."""
    assert row.input_ids is not None
    tensors = {name: getattr(row, name) for name in ("input_ids", "target_ids", "token_mask", "position_ids")}
    return {
        **tensors,
        "packed_cu_seqlens": row.cu_seqlens,
        "packed_max_seqlen": row.max_seqlen,
        "packed_context_parallel_size": context_parallel_size,
        "length": len(row.input_ids),
        "loss_multiplier": 1.0,
        "idx": idx,
    }


def online_config(case: OnlineCase) -> dict[str, Any]:
    """Return the keys of NeMo-RL's policy that decide an online row."""
    megatron: dict[str, Any] = {
        "tensor_model_parallel_size": case.tensor_parallel_size,
        "pipeline_model_parallel_size": case.pipeline_parallel_size,
        "sequence_parallel": case.sequence_parallel,
    }
    if case.precision != "unquantized":
        megatron["fp8_cfg"] = {"enabled": True, "fp8_recipe": _FP8[case.precision]}
    if case.hybrid_expert_parallel:
        megatron |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    return _config(cp=case.size, packs=True, multiple=case.multiple, **megatron)


def _config(*, cp: int, packs: bool = False, multiple: int = 1, **megatron: Any) -> dict[str, Any]:
    alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False}
    return {
        "sequence_packing": {"enabled": packs},
        "dynamic_batching": {"enabled": False},
        "make_sequence_length_divisible_by": multiple,
        "megatron_cfg": {**alone, "context_parallel_size": cp, **megatron},
    }


def _share(made: Any, rank: int) -> dict[str, torch.Tensor]:
    named = {
        "input_ids": made.input_ids_cp_sharded[0],
        "position_ids": made.position_ids[0],
        "labels": made.labels_cp_sharded[0],
        "loss_mask": made.loss_mask_cp_sharded[0],
        "target_ids": made.labels_cp_sharded[0],
        "target_mask": made.loss_mask_cp_sharded[0],
    }
    return {share_name(name, rank): tensor for name, tensor in (named | _boundaries(made)).items()}


def _online_share(made: Any, rank: object, *, has_depths: bool) -> dict[str, torch.Tensor]:
    nothing = torch.empty(0)
    assert made.position_ids is None
    assert getattr(made, "labels_cp_sharded", None) is None  # a checkout without the direct path has no such field
    named = {
        "input_ids": made.input_ids_cp_sharded[0],
        "input_ids of the row": made.input_ids[0],
        "position_ids": nothing,
        "labels": nothing,
        "loss_mask": made.mtp_loss_mask[0] if has_depths else nothing,
    }
    return {share_name(name, rank): tensor for name, tensor in (named | _boundaries(made)).items()}


def _boundaries(made: Any) -> dict[str, torch.Tensor]:
    params = made.packed_seq_params
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert torch.equal(getattr(params, name), params.cu_seqlens_q)
    assert params.qkv_format == "thd"
    assert params.max_seqlen_q == params.max_seqlen_kv
    return {
        "cu_seqlens": params.cu_seqlens_q,
        "max_seqlen": torch.tensor(params.max_seqlen_q),
        "total_tokens": torch.tensor(params.total_tokens),
    }


def _put_in_order(items: list[tuple[int, int]], order: Sequence[int] | None) -> None:
    """Put (length, index) pairs into an order, in place of a shuffle."""
    if order is None:
        random.shuffle(items)
        return
    by_index: Mapping[int, tuple[int, int]] = {item[1]: item for item in items}
    items[:] = [by_index[index] for index in order]
