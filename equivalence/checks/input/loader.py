"""The job's loader: files to batches through worker processes, in any order and from any step, against the reference row by row.

What the loader drives is what a job drives: the file reader, the data order, the row builder in a worker, the way back through shared
memory, the guards, collation and the counts (R-ORDER, R-ROW, R-BATCH, R-GUARD). No third witness: Megatron-LM's is torch's own loader.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.pairs import Side, compare_sides
from equivalence.generators import tokenizers
from equivalence.generators.loader import LoaderCase
from equivalence.subjects.protocol import RowSettings
from equivalence.subjects.reference import SUBJECT
from production.errors import PackproofError
from production.files.source import open_source
from production.rows import builder
from production.rows.batch import BatchSettings
from production.semantics import parse
from production.training.data.dataset import PackedData
from production.training.data.loader import Loader, LoaderSettings
from production.training.data.order import Order
from production.training.metrics.token_counts import RowCounts
from production.training.order_settings import OrderSettings
from reference import batches, order
from reference.refusals import RowRefused

_TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids", "packed_cu_seqlens", "packed_max_seqlen")
_COUNTS = ("rows", "tokens", "padding_tokens", "trained_tokens", "truncated_rows", "dropped_conversations")
_PRESET = "megatron-lm-main"


def check_loader(case: LoaderCase) -> CheckResult:
    """Compare what one rank is fed in each step, and the sum of the counts of many ranks as a report adds them (in float32)."""
    sides: dict[str, Side] = {"reference": _told(_reference, case), "production": _told(_production, case)}
    return compare_sides("loader", sides)


def _told(side: Callable[[LoaderCase], dict[str, torch.Tensor]], case: LoaderCase) -> Side:
    try:
        return side(case)
    except RowRefused as refused:
        return refused.kind
    except PackproofError as refused:
        return str(getattr(refused, "kind", refused.what))


def _reference(case: LoaderCase) -> dict[str, torch.Tensor]:
    built = [SUBJECT.build(messages, tokenizers.load(case.tokenizer), _settings(case)) for messages in case.messages()]
    samples = order.one_source(
        len(built),
        kind="shuffle",
        seed=case.seed,
        global_batch_size=case.global_batch_size,
        last_batch="wrap",
    )
    whole = order.global_batches(samples, case.global_batch_size, case.consumed)
    found = _added(case, sum)
    for step, batch in enumerate(itertools.islice(whole, case.steps)):
        own = [built[batch[place][1]] for place in batches.rows_of_rank(range(len(batch)), case.rank, case.data_size)]
        made = batches.collate(own)
        found |= {f"{name} of step {step}": getattr(made, name) for name in _TENSORS}
        reports = [row.report for row in own]
        counted = (
            *(len(own), made.input_ids.numel(), sum(report["padding_tokens"] or 0 for report in reports)),
            *(int(made.token_mask.sum()), sum((report["truncated"] or 0) > 0 for report in reports)),
            sum(report["dropped"] or 0 for report in reports),
        )
        found[f"counts of step {step}"] = torch.tensor(counted)
    return found


def _production(case: LoaderCase) -> dict[str, torch.Tensor]:
    found = _added(case, _sum_of_limbs)
    with tempfile.TemporaryDirectory(prefix="packproof-loader-") as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in case.messages()))
        data = PackedData(
            sources=[open_source(path)],
            tokenizer=tokenizers.load(case.tokenizer),
            settings=builder.RowSettings(
                pack_length=case.pack_length,
                prompt_format=case.prompt_format,
                context_parallel_size=case.context_parallel_size,
                semantics=parse(_PRESET),
            ),
            guards=BatchSettings(
                context_parallel_size=case.context_parallel_size,
                data_parallel_size=case.data_size,
                global_batch_size=case.global_batch_size,
            ),
        )
        settings = OrderSettings(
            kind="shuffle",
            last_batch="wrap",
            global_batch_size=case.global_batch_size,
            data_parallel_size=case.data_size,
            seed=case.seed,
        )
        loaded = LoaderSettings(workers=case.workers, prefetch=case.prefetch)
        share = (case.rank, case.data_size)
        with Loader(data, Order(data.rows, settings), share=share, settings=loaded) as loader:
            for _ in range(case.before):  # read ahead, then gone back or on from
                next(loader)
            loader.restore(case.consumed)
            for step in range(case.steps):
                made = next(loader)
                found |= {f"{name} of step {step}": getattr(made.batch, name).clone() for name in _TENSORS}
                found[f"counts of step {step}"] = torch.tensor([getattr(made.counts, name) for name in _COUNTS])
    return found


def _settings(case: LoaderCase) -> RowSettings:
    return RowSettings(
        pack_length=case.pack_length,
        prompt_format=case.prompt_format,
        context_parallel_size=case.context_parallel_size,
        semantics=_PRESET,
    )


def _added(case: LoaderCase, add: Callable[[list[int]], int]) -> dict[str, torch.Tensor]:
    return {"counts added over ranks": torch.tensor(add(list(case.counts)))}


def _sum_of_limbs(counts: list[int]) -> int:
    """Add limbs as a report does: in float32, over ranks."""
    zeros: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(RowCounts)}
    limbs = [torch.tensor(RowCounts(**zeros | {"tokens": count}).limbs(), dtype=torch.float32) for count in counts]
    return RowCounts.of_limbs(torch.stack(limbs).sum(dim=0).tolist()).tokens
