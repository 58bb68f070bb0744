"""Compare each part of NeMo-RL with reference and production: cases that were recorded, and drawn ones; without a checkout the recorded alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.cuts.microbatches import check_direct_microbatches, check_online_microbatches
from equivalence.checks.rows.recorded import RECORDED, check_recorded
from equivalence.generators.choices import RandomChoices
from equivalence.generators.online import PACKERS, DirectCase, OnlineCase, draw_direct, draw_loss, draw_online
from equivalence.recorded import outcomes
from equivalence.recorded.outcomes import Packing, RecordedConversation, RecordedRow
from equivalence.subjects.protocol import Row
from equivalence.witnesses.nemo_rl.checkout import NAME
from equivalence.witnesses.nemo_rl.losses import LossSide, check_direct_loss, check_online_loss
from equivalence.witnesses.nemo_rl.outcomes_again import again
from equivalence.witnesses.nemo_rl.rows import PRESET
from equivalence.witnesses.nemo_rl.sides import DirectSide, OnlineSide
from equivalence.witnesses.nemo_rl.stand_ins import CheckoutModules

RECORDED_PARTS = ("rows", "batches", "packers", "conversations")
"""Parts with recorded outcomes."""
SEED = 3380
_PACKERS = (*PACKERS, "first_fit_shuffle")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One part of NeMo-RL against reference and production."""

    part: str
    served: str
    """`checkout` or `recorded`: which of the two was compared; `neither` for a part that could not be."""
    cases: int = 0
    equal: int = 0
    refused: int = 0
    """Cases that all sides refuse alike."""
    fields: dict[str, int] = field(default_factory=dict)
    """Tensor, or kind of refusal, to the cases in which it differs."""
    first: str = ""
    """The first case that differs."""
    why: str = ""
    """Reason that nothing was compared."""

    @property
    def text(self) -> str:
        """Return the verdict as one line."""
        if self.why:
            return f"{self.part:<15}{self.served:<10} not compared: {self.why}"
        differ = ", ".join(f"{name} ({count:,})" for name, count in self.fields.items())
        alike = f", {self.refused:,} of them refused alike" if self.refused else ""
        return f"{self.part:<15}{self.served:<10}{self.equal:>6,} of {self.cases:,} equal{alike}" + (
            f"; differ: {differ}" if differ else ""
        )


def from_recorded(part: str) -> Verdict:
    """Hold reference and production to the recorded outcomes of a part."""
    if part not in RECORDED_PARTS:
        return Verdict(part=part, served="neither", why="no outcome of it is recorded, and there is no checkout")
    return _verdict(part, "recorded", map(_checked, _recorded(part)))


def from_checkout(part: str, modules: CheckoutModules, drawn: int) -> Verdict:
    """Hold reference and production to what the checkout makes of recorded inputs and of `drawn` cases."""
    return _verdict(part, "checkout", _RUNNERS[part](modules, drawn))


def _recorded(part: str) -> Iterable[object]:
    read: dict[str, Callable[[], Iterable[object]]] = {
        "rows": lambda: outcomes.rows(PRESET),
        "batches": outcomes.batches,
        "packers": outcomes.packings,
        "conversations": outcomes.conversations,
    }
    return read[part]()


def _checked(outcome: object) -> tuple[object, CheckResult]:
    return outcome, check_recorded(outcome)  # type: ignore[arg-type]  # one of the kinds that it takes


def _verdict(part: str, served: str, results: Iterable[tuple[object, CheckResult]]) -> Verdict:
    fields: Counter[str] = Counter()
    cases = equal = refused = 0
    first = ""
    for case, result in results:
        cases += 1
        equal += result.equal
        refused += result.equal and result.refused is not None
        fields.update(sorted({name for finding in result.findings for name in _fields(finding)}))
        if not result.equal and not first:
            first = f"{result.findings[0]} of {case}"
    return Verdict(
        part=part,
        served=served,
        cases=cases,
        equal=equal,
        refused=refused,
        fields=dict(fields.most_common()),
        first=first,
    )


def _fields(finding: Finding) -> set[str]:
    """Return the tensors of a finding with its sides; the recorded side is NeMo-RL's, of today or of the day of the recording."""
    left, right = (NAME if side == RECORDED else side for side in (finding.left, finding.right))
    names = {each.tensor.partition(" of rank ")[0].partition(" by ")[0] for each in finding.differences}
    return {f"{name} of {left} and {right}" for name in names}


def _fresh(part: str, modules: CheckoutModules, extra: Iterable[object]) -> Iterator[tuple[object, CheckResult]]:
    """Yield checks of outcomes that the checkout makes anew, of recorded inputs and of others."""
    remake = again(part, modules)
    for outcome in (*_recorded(part), *extra):
        yield _checked(remake(outcome))


def _rows(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    del drawn  # generated rows, by fault class, are those of `equivalence run --subjects`
    return _fresh("rows", modules, ())


def _batches(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    return _fresh("batches", modules, (_draw_batch(place) for place in range(drawn)))


def _packers(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    return _fresh("packers", modules, (_draw_packing(place) for place in range(drawn)))


def _conversations(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    return _fresh("conversations", modules, (_draw_conversation(place) for place in range(drawn)))


def _shares(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    return _direct(modules, itertools.chain(_recorded_direct(), map(_draw_one_row, range(drawn))), depths=0)


def _depths(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    # Shares of all rows are compared without depths; a roll of a row is slower than its cut, and of a smaller kind.
    rows = itertools.islice(_recorded_direct(), None, None, 4)
    return _direct(modules, itertools.chain(rows, map(_draw_one_row, range(drawn))), depths=3)


def _direct(
    modules: CheckoutModules, cases: Iterable[DirectCase], *, depths: int
) -> Iterator[tuple[object, CheckResult]]:
    """Yield checks of rows, with one to `depths` depths in turn."""
    side = DirectSide(modules)
    for place, case in enumerate(cases):
        asked = dataclasses.replace(case, depths=depths and 1 + place % depths)
        yield asked, check_direct_microbatches(asked, {NAME: side})


def _online_rows(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    side = OnlineSide(modules)
    for place in range(drawn):
        case = _draw_online(place)
        yield case, check_online_microbatches(case, {NAME: side})


def _direct_loss(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    side = LossSide(modules)
    for place in range(drawn):
        case = draw_loss(RandomChoices(SEED, place))
        yield case, check_direct_loss(case, side)


def _online_loss(modules: CheckoutModules, drawn: int) -> Iterator[tuple[object, CheckResult]]:
    rows, side = OnlineSide(modules), LossSide(modules)
    for place in range(drawn):
        case = _draw_trainable(place)
        yield case, check_online_loss(case, rows, side)


_RUNNERS: Mapping[str, Callable[[CheckoutModules, int], Iterator[tuple[object, CheckResult]]]] = {
    "rows": _rows,
    "batches": _batches,
    "shares": _shares,
    "depths": _depths,
    "packers": _packers,
    "conversations": _conversations,
    "online rows": _online_rows,
    "direct loss": _direct_loss,
    "online loss": _online_loss,
}


def _recorded_direct() -> Iterator[DirectCase]:
    """Yield NeMo-RL's recorded rows as they would be trained on, with their own cp."""
    for recorded in outcomes.rows(PRESET):
        row = recorded.outcome
        # A boundary that repeats is refused by NeMo-RL; its own rows have none.
        if row is not None and row.refusal is None and row.cu_seqlens is not None:
            yield _one_row(row, recorded.case.settings.context_parallel_size)


def _one_row(row: Row, size: int) -> DirectCase:
    assert row.cu_seqlens is not None
    tensors = {name: getattr(row, name)[None] for name in ("input_ids", "target_ids", "token_mask", "position_ids")}
    return DirectCase(
        boundaries=[row.cu_seqlens.tolist()], tensors=tensors, sample_mask=[1.0], size=size, layout="zigzag", depths=0
    )


def _draw_one_row(place: int) -> DirectCase:
    """Draw rows and take the last one: a microbatch of NeMo-RL has one row, and its cut is the zigzag."""
    case = draw_direct(RandomChoices(SEED, place))
    tensors = {name: tensor[-1:] for name, tensor in case.tensors.items()}
    return dataclasses.replace(
        case, boundaries=case.boundaries[-1:], tensors=tensors, sample_mask=case.sample_mask[-1:], layout="zigzag"
    )


def _draw_online(place: int) -> OnlineCase:
    """Draw conversations whose number the data-parallel ranks divide, which NeMo-RL asks of a global batch."""
    case = draw_online(RandomChoices(SEED, place))
    count = len(case.conversations)
    size = max(each for each in range(1, case.data_parallel_size + 1) if count % each == 0)
    return dataclasses.replace(case, data_parallel_size=size)


def _draw_trainable(place: int) -> OnlineCase:
    """Draw conversations for one context-parallel rank that can be packed and padded, with ids below the width of the logits."""
    case = _draw_online(place)
    factor = case.tensor_parallel_size if case.sequence_parallel else 1
    multiple = factor * (1 + place % 4)
    longest = max(len(ids) for ids, _ in case.conversations)
    conversations = [([1 + each % 22 for each in ids], mask) for ids, mask in case.conversations]
    return dataclasses.replace(
        case,
        conversations=conversations,
        size=1,
        multiple=multiple,
        capacity=-(-longest // multiple) * multiple * (1 + place % 3),
        data_parallel_size=1,
        pipeline_parallel_size=1,
        depths=0,
    )


def _draw_packing(place: int) -> Packing:
    choices = RandomChoices(SEED, place)
    lengths = choices.integers(1, choices.one_of([8, 60, 600]), fewest=1, longest=40)
    algorithm = choices.one_of(_PACKERS)
    return Packing(
        algorithm=algorithm,
        lengths=tuple(lengths),
        capacity=max(lengths) + choices.integer(-1, max(lengths)),
        multiple_of=choices.integer(1, 9),
        order=tuple(choices.order(range(len(lengths)))) if algorithm == "first_fit_shuffle" else None,
        bins=None,
    )


def _draw_conversation(place: int) -> RecordedConversation:
    """Draw other settings for a recorded conversation."""
    choices = RandomChoices(SEED, place)
    case = choices.one_of(outcomes.conversations())
    return dataclasses.replace(
        case,
        template=choices.one_of(
            sorted({each.template for each in outcomes.conversations() if bool(each.tools) == bool(case.tools)})
        ),
        max_length=choices.one_of([100, 100, choices.integer(4, 40)]),
        without_bos_token=choices.one_of([False, False, True]),
        add_bos=choices.one_of([True, False]),
        add_eos=choices.one_of([True, False]),
        add_generation_prompt=choices.one_of([False, True]),
    )


def _draw_batch(place: int) -> outcomes.RecordedBatch:
    """Draw a batch of recorded rows of one length and one cp."""
    choices = RandomChoices(SEED, place)
    built = [each for each in outcomes.rows(PRESET) if each.outcome is not None and each.outcome.refusal is None]
    first = choices.one_of(built)
    alike = [each for each in built if _shape(each) == _shape(first)]
    nothing: dict[str, torch.Tensor] = {}
    rows = [choices.one_of(alike).outcome for _ in range(choices.integer(1, 6))]
    return outcomes.RecordedBatch(
        rows=tuple(row for row in rows if row is not None),
        context_parallel_size=first.case.settings.context_parallel_size,
        data_parallel_size=choices.integer(1, 5),
        batch=nothing,
        padded=nothing,
    )


def _shape(row: RecordedRow) -> tuple[int, int]:
    return row.case.settings.pack_length, row.case.settings.context_parallel_size
