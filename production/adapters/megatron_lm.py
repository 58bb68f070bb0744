"""Run the direct path in a Megatron-LM training script: an external data loader of packed rows, `get_batch` and `forward_step`.

Everything else stays Megatron-LM's: arguments, model, schedules, data parallelism, optimizer, checkpoints. The rank that reads rows builds
them, so no batch is broadcast. With multi-token prediction, call `pretrain` inside `rolls_from_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from production.errors import PackproofError
from production.files.source import open_source
from production.loss import LossResult, LossSettings, loss_function
from production.parallel.microbatches import Microbatch, MicrobatchSettings, process_microbatch
from production.parallel.sizes import RankCoordinates, place
from production.rows.batch import Batch, BatchSettings, collate_checked
from production.rows.builder import RowBuilder, RowSettings


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Settings of the direct path, translated from the script's own arguments."""

    files: Sequence[str]
    """Packed files, end to end (`--train-data-path`)."""
    rows: RowSettings
    """Pack length (`--seq-length`), prompt format (`--sft-tokenizer-prompt-format`), cp and semantics."""
    global_batch_size: int
    """`--global-batch-size`; `--micro-batch-size` must be 1."""
    depths: int = 0
    """`--mtp-num-layers`."""


class DirectPath:
    """Rows and steps of one rank. Make it once megatron-core's parallel state is there: in the data provider, not before."""

    def __init__(self, settings: PathSettings, *, tokenizer: Any) -> None:
        """`tokenizer` is a transformers tokenizer. Raises BadInput for files without rows, PackproofError for a layout that the rows do not fit."""
        self.place: RankCoordinates = place()
        self._settings = settings
        if settings.global_batch_size % self.place.data_size:
            raise PackproofError(
                what=f"must be a multiple of the {self.place.data_size} data-parallel ranks, got {settings.global_batch_size}",
                where="global_batch_size",
                fix="make it a multiple of the data-parallel size",
            )
        self._source = open_source(list(settings.files))
        self._builder = RowBuilder(tokenizer=tokenizer, settings=settings.rows)
        # One row is one microbatch, and this rank has only its own.
        self._batches = BatchSettings(
            context_parallel_size=self.place.context_size,
            data_parallel_size=1,
            global_batch_size=1,
            multi_token_prediction=settings.depths > 0,
            pad_token_id=self._builder.pad_token_id,
        )
        self._microbatches = MicrobatchSettings(
            context_parallel_rank=self.place.context_rank,
            context_parallel_size=self.place.context_size,
            depths=settings.depths if self.place.is_last_stage else 0,
        )

    def rows(self, consumed_samples: int = 0) -> Iterator[Batch]:
        """Yield the microbatches of this data-parallel rank without end, each one row on the host (SPEC R-ORDER-1, wrap).

        All ranks that share a row read and build it. Raises RowRefused for a row that the semantics refuse, BatchRefused for a row that no job accepts.
        """
        position = consumed_samples + self.place.data_rank
        while True:
            row = self._builder.build(self._source[position % len(self._source)])
            yield collate_checked([row], self._batches)
            position += self.place.data_size

    def get_batch(self, data_iterator: Iterator[Batch]) -> Microbatch:
        """Return the next microbatch, cut for this rank and on its device, with its boundaries on every pipeline stage."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        return process_microbatch(next(data_iterator), self._microbatches, device=device)

    def forward_step(
        self, data_iterator: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
        """Run a forward step for Megatron-LM's schedules: return token losses [1, n] (or a stage's hidden states) and their loss function.

        The normalization follows `--calculate-per-token-loss`: `per_token` with the option, `mean_of_means` without.
        """
        microbatch = self.get_batch(data_iterator)
        losses = LossSettings(
            normalization="per_token" if get_model_config(model).calculate_per_token_loss else "mean_of_means",
            num_microbatches=self._settings.global_batch_size // self.place.data_size,
            context_parallel_size=self.place.context_size,
        )
        output = model(
            microbatch.input_ids,
            microbatch.position_ids,
            None,  # attention_mask: the boundaries say it
            labels=microbatch.labels,
            loss_mask=microbatch.loss_mask,
            packed_seq_params=microbatch.packed_seq_params,
        )
        return output, loss_function(microbatch, losses, tensor_group=parallel_state.get_tensor_model_parallel_group())


class Script:
    """The two callables that `pretrain` takes: `data_provider`, and `forward_step`, which needs what the first has made."""

    def __init__(self, settings: Callable[[Any], PathSettings], tokenizer: Callable[[Any], Any]) -> None:
        """`settings` and `tokenizer` are called with Megatron-LM's arguments, once Megatron-LM has parsed them."""
        self._settings, self._tokenizer = settings, tokenizer
        self.path: DirectPath | None = None

    @property
    def is_distributed(self) -> bool:
        """True: every rank reads; otherwise Megatron-LM would let only the first rank of each tensor-parallel group read."""
        return True

    def __call__(self, _samples: Sequence[int], vp_stage: int | None = None) -> tuple[Iterator[Batch], None, None]:
        """Provide the data: rows from where the checkpoint left off, without validation. Needs `--dataloader-type external`."""
        from megatron.training.global_vars import get_args  # noqa: PLC0415 - part of Megatron-LM's script alone

        if vp_stage is not None:
            raise PackproofError(
                what="must not be set: this adapter does not interleave stages",
                where="--num-virtual-stages-per-pipeline-rank",
                fix="leave it out",
            )
        args = get_args()
        self.path = DirectPath(self._settings(args), tokenizer=self._tokenizer(args))
        return self.path.rows(args.consumed_train_samples), None, None

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> Any:
        """Call `DirectPath.forward_step`."""
        assert self.path is not None, "pretrain asks for the data first"
        return self.path.forward_step(data_iterator, model)
