"""Compare the dump of each rank of a job in a step with the reference's tensors of the same rows: `--fed FOLDER`.

Rows of the direct path are compared one by one, the online path's global batch as a whole, because its bins are packed as one.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from equivalence.subjects import BATCH_TENSORS, Row
from production.errors import PackproofError
from production.files.source import open_source
from tools.diff_row.dump.bins import ReferenceBins
from tools.diff_row.dump.step_reader import Dumped, ranks_of, read_rank
from tools.diff_row.errors import BadInput, problem
from tools.diff_row.inputs import Beside, load_named
from tools.diff_row.rank.steps import RankFindings
from tools.diff_row.rank.trace import travel
from tools.diff_row.rank_report import RankRequest, checked
from tools.diff_row.report import ComparedMicrobatch, FedStep, Report
from tools.diff_row.row.findings import Side

FED = "fed"
"""The side that the dump is."""


def find_fed(request: RankRequest) -> Report:
    """Compare the dump's ranks (or the one of `--rank`), all microbatches or one. Raises BadInput."""
    assert request.fed is not None
    _check(request)
    maker: _Rows | _Bins | None = None
    looked_at: list[ComparedMicrobatch] = []
    shown: tuple[ComparedMicrobatch, RankFindings] | None = None
    normalization = ""
    ranks = ranks_of(request.fed, request.rank)
    first: Dumped | None = None
    for rank in ranks:
        dumped = read_rank(request.fed, rank, sequence_parallel=request.sequence_parallel)
        normalization = dumped.said.normalization
        if first is None or maker is None:
            first = dumped
            if request.rank is None:
                _check_all_there(request.fed, ranks, dumped.place.ranks)
            maker = _Bins(request, dumped) if dumped.is_online else _Rows(request, dumped)
        elif (dumped.place.ranks, dumped.said.made_with) != (first.place.ranks, first.said.made_with):
            raise problem(
                f"ranks {ranks[0]} and {rank} were not dumped by one job: they say other ranks, or other things that rows were made with",
                where=str(request.fed),
                fix="dump the step again, into an empty folder",
            )
        for number, found in maker.compared(dumped, request.microbatch):
            each = _told(found, rank, number)
            looked_at.append(each)
            if shown is None or (shown[0].equal and not each.equal):
                shown = (each, found)
    assert shown is not None  # a rank has microbatches
    assert first is not None
    made = first.said.made_with
    step = FedStep(
        folder=str(request.fed),
        normalization=normalization,
        looked_at=tuple(looked_at),
        chat_key=made.chat_key,
        chat_template=made.chat_template,
        shown=shown[0],
    )
    return Report(row=shown[1].row, rank=shown[1], fed=step)


def _check_all_there(folder: Path, ranks: Sequence[int], size: int) -> None:
    """Check that no rank's file is missing: a missing file is never equal."""
    if lost := sorted({*range(size)} - {*ranks}):
        told = ", ".join(map(str, lost[:8])) + (" and more" if len(lost) > 8 else "")
        raise problem(
            f"no file of rank{'s' if len(lost) > 1 else ''} {told}, of {size} ranks that the job had",
            where=str(folder),
            fix="bring the files of all ranks together, or look at one: --rank R",
        )


def _check(request: RankRequest) -> None:
    """Refuse options that contradict a dump."""
    sizes = (("tp", request.tp), ("cp", request.cp), ("dp", request.dp), ("pp", request.pp))
    if given := [f"--{name}" for name, size in sizes if size is not None]:
        raise problem("the dump says its own layout", where=", ".join(given), fix="leave them out with --fed")
    if request.row.row is not None or request.row.case is not None or request.row.dump is not None:
        raise problem(
            "the dump names its own rows (rank_R.rows.json)",
            where="--row, --case or --dump with --fed",
            fix="leave them out; --rank and --microbatch choose among the dump's",
        )
    if request.row.settings or request.row.chat_key != "messages" or request.row.dump_row or request.global_batch_size:
        names = [f"--{name.replace('_', '-')}" for name, _ in request.row.settings]
        others = {"--chat-key": request.row.chat_key != "messages", "--dump-row": request.row.dump_row}
        names += [
            name for name, is_given in {**others, "--global-batch-size": request.global_batch_size}.items() if is_given
        ]
        raise problem(
            "the dump says what its rows were made with", where=", ".join(names), fix="leave it out with --fed"
        )
    if request.row.sides is not None:
        raise problem("a dump is held against the reference", where="--sides", fix="leave it out with --fed")
    depths, stop_at = checked(request)
    if depths:
        raise problem("the dump says its own depths", where="--depth", fix="leave it out with --fed")
    if stop_at in ("depth", "weights"):
        raise problem(
            "a dump holds rows and shares (those of its depths, too), no whole depths and no weights",
            where=f"--stop-at {stop_at}",
            fix="leave it out; the same row with FILE --row N --depth K shows the depths of both sides",
        )


class _Rows:
    """The direct path: a row is a microbatch, and the reference builds it for itself."""

    def __init__(self, request: RankRequest, dumped: Dumped) -> None:
        self._request = request
        made = dumped.said.made_with
        self._beside = Beside(
            _named(request, dumped).row, settings=msgspec.structs.asdict(made.rows), chat_template=made.chat_template
        )

    def compared(self, dumped: Dumped, wanted: int | None) -> Iterator[tuple[int, RankFindings]]:
        """Yield the microbatches of a rank with their findings. Raises BadInput."""
        for number in dumped.chosen(wanted):
            with _of_a_row(dumped, number):
                found = self._compare(dumped, number)
            yield number, found

    def _compare(self, dumped: Dumped, number: int) -> RankFindings:
        fields: dict[str, Any] = dumped.of(number, "row", BATCH_TENSORS[:9])
        count = int(fields["packed_cu_seqlens_lengths"][0])
        # The job's rows were collated together, so -1 fills each up to the longest of them; this row stands alone.
        fields["packed_cu_seqlens"] = fields["packed_cu_seqlens"][:, :count]
        row = Row(
            input_ids=fields["input_ids"][0],
            target_ids=fields["target_ids"][0],
            token_mask=fields["token_mask"][0],
            position_ids=fields["position_ids"][0],
            cu_seqlens=fields["packed_cu_seqlens"][0, :count],
            max_seqlen=int(fields["packed_max_seqlen"][0]),
        )
        named = dumped.said.rows[number]
        file = self._request.row.file or Path(named.file)
        findings = self._beside.findings(
            Side(name=FED, version=f"microbatch {number} of the dump", row=row),
            file=file,
            row=_at_line(file, named.line, dumped)[0],
        )
        batch = SimpleNamespace(**fields, flat_cu_seqlens=None, flat_max_seqlen=None)
        return travel(
            findings,
            dumped.place,
            subjects={FED: SimpleNamespace(collate=lambda *_: batch)},
            depths=dumped.said.depths,
            layout=self._request.layout,
            stop_at=_stop_at(self._request, dumped),
            at=self._request.at,
            ways={FED: ("the job", dumped.way(number))},
        )


class _Bins:
    """The online path: a bin is a microbatch, and the reference packs the global batch for itself."""

    def __init__(self, request: RankRequest, dumped: Dumped) -> None:
        self._request = request
        name = _named(request, dumped).row.tokenizer
        assert name is not None
        tokenizer = load_named(name, dumped.said.made_with.chat_template)
        given = request.row.file
        if given is not None and len({each.file for each in dumped.said.rows}) > 1:
            raise problem(
                "the dump's conversations come from several files",
                where=f"{given} with --fed",
                fix="leave it out, and go where the job ran",
            )
        lines = [_at_line(given or Path(each.file), each.line, dumped)[1] for each in dumped.said.rows]
        self._bins = ReferenceBins(dumped, lines, tokenizer=tokenizer, tokenizer_name=name, layout=request.layout)

    def compared(self, dumped: Dumped, wanted: int | None) -> Iterator[tuple[int, RankFindings]]:
        """Yield the bins of a rank, also bins that only one side has, with their findings. Raises BadInput."""
        every = range(max(dumped.microbatches, self._bins.count(dumped.place.data_rank)))
        for number in every if wanted is None else dumped.chosen(wanted):
            with _of_a_row(dumped, number):
                both = self._bins.compare(dumped, number, name=FED)
                found = travel(
                    both.findings,
                    dumped.place,
                    subjects=None,
                    depths=dumped.said.depths,
                    layout=self._request.layout,
                    stop_at=_stop_at(self._request, dumped),
                    at=self._request.at,
                    ways={side: ("the job" if side == FED else side, way) for side, way in both.ways.items()},
                )
            yield number, found


@contextlib.contextmanager
def _of_a_row(dumped: Dumped, number: int) -> Iterator[None]:
    """Context manager that reports tensors in shapes that no row has as bad input."""
    try:
        yield
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise problem(
            f"its tensors cannot be a row ({error})",
            where=f"rank {dumped.place.rank}, microbatch {number}",
            fix="dump the step again",
        ) from error


def _named(request: RankRequest, dumped: Dumped) -> RankRequest:
    """Return the request with the job's tokenizer, if none is given, and its chat key."""
    made = dumped.said.made_with
    row = replace(request.row, tokenizer=request.row.tokenizer or made.tokenizer, chat_key=made.chat_key)
    return replace(request, row=row)


def _stop_at(request: RankRequest, dumped: Dumped) -> str:
    return request.stop_at or ("slice" if dumped.place.tp > 1 and dumped.place.sequence_parallel else "share")


def _at_line(file: Path, line: int, dumped: Dumped) -> tuple[int, dict[str, Any]]:
    """Return the row at a line, and its object: rows are numbered without lines that hold no row."""
    if not file.is_file():
        raise problem(
            f"there is no file {file}",
            where="rows.json",
            fix="go where the job ran, or name the file: FILE --fed FOLDER",
        )
    try:
        chat_key = dumped.said.made_with.chat_key
        with open_source([file], chat_key=chat_key, takes_tool_calls=dumped.is_online) as source:
            row = bisect.bisect_left(range(len(source)), line, key=lambda each: source.locate(each).line)
            if row < len(source) and source.locate(row).line == line:
                return row, source.record(row)
    except PackproofError as error:
        raise problem(str(error), where="rows.json", fix="give the file that the job read") from error
    raise problem(f"no row stands at line {line} of {file}", where="rows.json", fix="give the file that the job read")


def _told(found: RankFindings, rank: int, number: int) -> ComparedMicrobatch:
    step, source = found.first, found.row.source
    return ComparedMicrobatch(
        rank=rank,
        microbatch=number,
        file=str(source.file),
        row=source.row,
        line=source.line,
        told=source.place,
        equal=found.equal,
        first="" if step is None else f"{step.label}: {step.differences[0].tensor}",
    )
