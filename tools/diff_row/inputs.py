"""From the command line to findings: opens the file, case or dump, loads tokenizer and sides, builds and compares.

Whatever a user can get wrong here is a `BadInput` of one line.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from equivalence.cases.row import read_case
from equivalence.checks.blame import told
from equivalence.errors import CaseError
from equivalence.generators import tokenizers as named_tokenizers
from equivalence.subjects import BUILT_IN, EXTERNAL, Messages, Row, RowSettings, Subject
from equivalence.subjects.protocol import row_of
from equivalence.subjects.tokenizers import load_folder
from production.errors import PackproofError
from production.files.file_state import is_there
from production.files.manifest import read_manifest
from tools.diff_row.dump.batch_reader import LABELS, Conventions, Dump, read_dump
from tools.diff_row.dump.search import Match, find_row
from tools.diff_row.errors import BadInput
from tools.diff_row.row.findings import Findings, Side, Source, compare
from tools.diff_row.row.inspection import IGNORE_INDEX, Flaw, inspect
from tools.diff_row.row.layout import map_row
from tools.diff_row.sides import covers, subject_named, version_of
from tools.diff_row.tokens import TokenTexts

DEFAULT_PACK_LENGTH = 4096
DUMP = "dump"
"""The side that a dump is."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for a row of a file, a case, a dump, or a dump beside a row or a case."""

    file: Path | None = None
    row: int | None = None
    chat_key: str = "messages"
    case: Path | None = None
    dump: Path | None = None
    dump_row: int = 0
    conventions: Conventions = field(default_factory=Conventions)
    """User's options about the dump's names and labels."""
    only_trained_labels: bool = False
    """Leave labels that no side trains out of the comparison."""
    ignore_manifest: bool = False
    """Take nothing from the manifest beside the file."""
    tokenizer: str | None = None
    """A folder, or a name that `equivalence.generators.tokenizers` knows."""
    sides: tuple[str, ...] | None = None
    """Subjects by name; None for all that are witnesses of these settings."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Fields of RowSettings that were given."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A row's messages with all that is needed to build it."""

    messages: Messages
    tokenizer: Any
    tokenizer_name: str
    settings: RowSettings
    line: int | None = None
    """Of the row in its file, from 1."""
    settings_from: Mapping[str, str] = field(default_factory=dict)
    """Source of each setting that the command line did not give, by name."""


def find(request: Request) -> Findings:
    """Build the row on every side and compare. Raises BadInput."""
    if request.case is None and request.file is None and request.dump is None:
        raise BadInput(
            "nothing to look at: give FILE --row N --tokenizer DIR, --case CASE.json or --dump BATCH.safetensors"
        )
    if request.case is not None and request.file is not None:
        raise BadInput(f"both {request.file} and --case {request.case} are given: a row comes from one of them")
    dump = _dump(request)
    length = dump.row.input_ids.numel() if dump is not None and dump.row.input_ids is not None else None
    dumped = {} if length is None else {"pack_length": length}
    match = None
    if dump is not None and request.file is not None and request.row is None:
        match = _match(request, dump, dumped)
        request = replace(request, row=match.row)
    asked = _asked(request, dumped)
    sides = [] if dump is None else [Side(name=DUMP, version=f"{dump.names} names, {dump.rows} rows", row=dump.row)]
    if asked is not None:
        sides += [_build(name, asked) for name in _side_names(request, asked.settings)]
    elif request.sides is not None:
        raise BadInput("--sides build a row from its messages: give FILE --row N --tokenizer DIR or --case as well")
    if dump is not None and match is None and asked is not None and request.file is not None and _other_ids(sides):
        match = _match(request, dump, dumped)
    notes = list(dump.notes) if dump is not None else []
    if match is not None:
        notes.insert(0, match.note(asked_row=request.row))
    if request.only_trained_labels:
        sides, note = _only_trained(sides)
        notes.append(note)
    elif dump is not None and request.conventions.labels == "unshifted":
        # The dump cannot have a label there, so one that nobody trains is no difference.
        sides, _ = _only_trained(sides, last_only=True)
    return findings_of(
        tuple(sides),
        notes=notes,
        source=Source(
            file=str(request.case or request.file) if asked is not None else None,
            row=request.row,
            line=None if asked is None else asked.line,
            case=request.case is not None,
            dump=None if request.dump is None else str(request.dump),
            dump_row=None if request.dump is None else request.dump_row,
            settings_from={} if asked is None else asked.settings_from,
        ),
        messages=None if asked is None else asked.messages,
        settings=None if asked is None else asked.settings,
        tokenizer=asked.tokenizer if asked is not None else _tokenizer(request.tokenizer),
        tokenizer_name=asked.tokenizer_name if asked is not None else request.tokenizer,
    )


def findings_of(
    sides: Sequence[Side],
    *,
    source: Source,
    notes: Sequence[Flaw] = (),
    messages: Messages | None = None,
    settings: RowSettings | None = None,
    tokenizer: Any | None = None,
    tokenizer_name: str | None = None,
) -> Findings:
    """Compare sides that are built already: for tests and for callers that hold rows. `notes` are those of the dump."""
    built = [side for side in sides if side.row.refusal is None]
    # A side that builds from the messages knows its boundaries better than a dump that may be at fault.
    guide = next((side for side in built if side.name != DUMP), built[0] if built else None)
    compared = compare(sides)
    cp = None if settings is None else settings.context_parallel_size
    # What a dump has against itself is always shown; of other sides only what explains a difference.
    flaws = {
        side.name: [flaw for flaw in inspect(side.row, cp) if side.name == DUMP or not flaw.note] for side in sides
    }
    if notes:
        flaws[DUMP] = [*flaws.get(DUMP, ()), *notes]
    return Findings(
        source=source,
        settings=settings,
        tokenizer=tokenizer_name,
        texts=TokenTexts(tokenizer),
        sides=tuple(sides),
        map=map_row(messages, tokenizer, settings, None if guide is None else guide.row),
        pairs=compared.pairs,
        listed=compared.listed,
        differing=compared.differing,
        flaws={name: found for name, found in flaws.items() if found},
    )


def build_rows(request: Request, rows: Sequence[int], sides: Sequence[str]) -> dict[str, list[Row]]:
    """Build several rows of the file on each of these sides, for results that depend on a row's neighbors. Raises BadInput."""
    if request.file is None or not rows:
        raise BadInput("several rows come from a file: give FILE")
    asked = _asked(replace(request, row=rows[0]), {})
    assert asked is not None
    every = [replace(asked, messages=messages_of(request.file, row, request.chat_key)[0]) for row in rows]
    return {side: [_build(side, one).row for one in every] for side in sides}


class Beside:
    """Builds rows of files with the reference, beside a side that is there already, with one tokenizer for all."""

    def __init__(self, request: Request, *, settings: Mapping[str, Any], chat_template: str | None) -> None:
        """Take the request's tokenizer, with a chat template instead of its own if one is given, and the settings of the side."""
        self._request, self._settings, self._chat_template = request, settings, chat_template
        self._known: _Asked | None = None

    def findings(self, side: Side, *, file: Path, row: int) -> Findings:
        """Build row `row` of the file with the reference. Raises BadInput."""
        if self._known is None:
            asked = _asked(replace(self._request, file=file, row=row), self._settings)
            assert asked is not None
            tokenizer = load_named(asked.tokenizer_name, self._chat_template)
            self._known = replace(asked, tokenizer=tokenizer)
        messages, line = messages_of(file, row, self._request.chat_key)
        asked = replace(self._known, messages=messages)
        return findings_of(
            (_build("reference", asked), side),
            source=Source(file=str(file), row=row, line=line, settings_from=asked.settings_from),
            messages=asked.messages,
            settings=asked.settings,
            tokenizer=asked.tokenizer,
            tokenizer_name=asked.tokenizer_name,
        )


def load_named(name: str, chat_template: str | None = None) -> Any:
    """Load the tokenizer of a folder or a name, with this chat template instead of its own if one is given. Raises BadInput."""
    tokenizer = _tokenizer(name)
    if chat_template is not None:
        tokenizer = copy.copy(tokenizer)  # loaded once for all that ask for it
        tokenizer.chat_template = chat_template
    return tokenizer


def subject_of(side: str) -> Subject | None:
    """Return the subject of a side; None for a dump, which builds nothing."""
    return None if side == DUMP else subject_named(side)


def _dump(request: Request) -> Dump | None:
    """Return the dumped row, if requested; split a flattened batch by the given pack length, or by the manifest's."""
    if request.dump is None:
        return None
    if request.conventions.labels not in LABELS:
        raise BadInput(f"--labels must be one of {', '.join(LABELS)}, got {request.conventions.labels!r}")
    length = dict(request.settings).get("pack_length")
    if length is None and request.file is not None:
        length = _manifest(request)[0].get("pack_length")
    return read_dump(request.dump, request.dump_row, replace(request.conventions, pack_length=length))


def _match(request: Request, dump: Dump, dumped: Mapping[str, Any]) -> Match:
    """Return the row of the file that matches the dump's row, by its ids. Raises BadInput."""
    first = _asked(replace(request, row=0), dumped)
    assert first is not None
    assert request.file is not None
    assert dump.row.input_ids is not None
    if (length := dump.row.input_ids.numel()) != first.settings.pack_length:
        raise BadInput(
            f"the dump's rows have {length:,} tokens, and --pack-length says {first.settings.pack_length:,}: leave --pack-length out"
        )
    return find_row(dump.row.input_ids, request.file, first.tokenizer, first.settings, chat_key=request.chat_key)


def _other_ids(sides: Sequence[Side]) -> bool:
    """Return whether the dump's tokens differ from those of every side that built the row."""
    ids = [side.row.input_ids for side in sides if side.row.input_ids is not None]
    return len(ids) > 1 and not any(torch.equal(ids[0], other) for other in ids[1:])


def _only_trained(sides: Sequence[Side], *, last_only: bool = False) -> tuple[list[Side], Flaw]:
    """Return the sides with -100 as the label of every position, or of the last one, that no side trains, because conventions differ there."""
    built = [side for side in sides if side.row.refusal is None]
    sizes = {side.row.target_ids.numel() for side in built if side.row.target_ids is not None}
    if len(sizes) != 1 and last_only:
        return list(sides), Flaw(what="rows of several lengths", rule="#tensors", count=1, position=None, note=True)
    if len(sizes) != 1:
        raise BadInput("--only-trained-labels: the sides have rows of several lengths: give the dump's --pack-length")
    trained = torch.stack([side.row.token_mask.reshape(-1) != 0 for side in built if side.row.token_mask is not None])
    untrained = ~trained.any(dim=0)
    if last_only:
        untrained[:-1] = False
    made = []
    for side in sides:
        row = side.row
        if row.refusal is None and row.target_ids is not None:
            row = replace(row, target_ids=row.target_ids.reshape(-1).masked_fill(untrained, IGNORE_INDEX))
        made.append(replace(side, row=row))
    what = f"labels of {int(untrained.sum()):,} positions that no side trains were left out of the comparison"
    return made, Flaw(what=what, rule="R-MASK-1", count=1, position=None, note=True)


def _asked(request: Request, dumped: Mapping[str, Any]) -> _Asked | None:
    given = dict(request.settings)
    if request.case is not None:
        try:
            case = read_case(request.case)
            settings = replace(case.settings, **given)
        except CaseError as error:
            raise BadInput(str(error)) from error
        except ValueError as error:
            raise BadInput(f"{request.case}: {error}") from error
        name = request.tokenizer or case.tokenizer
        return _Asked(messages=case.messages, tokenizer=_tokenizer(name), tokenizer_name=name, settings=settings)
    if request.file is None:
        return None
    if request.row is None:
        raise BadInput(f"which row of {request.file}? Give --row N, the first is 0, or --dump BATCH to find its row")
    if request.tokenizer is None:
        raise BadInput("which tokenizer? Give --tokenizer DIR, the folder of a Hugging Face tokenizer")
    chosen, settings_from = _chosen(request, given, dumped)
    try:
        settings = RowSettings(**chosen)
    except ValueError as error:
        raise BadInput(str(error)) from error
    messages, line = messages_of(request.file, request.row, request.chat_key)
    return _Asked(
        messages=messages,
        tokenizer=_tokenizer(request.tokenizer),
        tokenizer_name=request.tokenizer,
        settings=settings,
        line=line,
        settings_from=settings_from,
    )


def _manifest(request: Request) -> tuple[dict[str, Any], Path | None]:
    """Return the settings of the manifest beside the file, and the manifest's path. Raises BadInput."""
    assert request.file is not None
    if request.ignore_manifest:
        return {}, None
    try:
        manifest = read_manifest(request.file)
    except PackproofError as error:
        raise BadInput(f"{error} (or give --ignore-manifest)") from error
    return ({}, None) if manifest is None else (dict(manifest.settings), manifest.path)


def _chosen(
    request: Request, given: Mapping[str, Any], dumped: Mapping[str, Any]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the settings of a row of a file, and the source of each setting that was not given: a dump, the manifest, the default.

    A given setting must not contradict a manifest's setting that decided which conversation is in which row: BadInput. Another cp or other
    semantics are allowed.
    """
    said, path = _manifest(request)
    for name in ("pack_length", "prompt_format"):
        if name in given and name in said and given[name] != said[name]:
            option = f"--{name.replace('_', '-')}"
            raise BadInput(
                f"{option} {given[name]}, and {request.file} was packed for {said[name]} (its manifest {path} says so): "
                f"leave {option} out, or give --ignore-manifest"
            )
    where = dict.fromkeys(said, "manifest")
    if path is not None and "pack_length" in said:
        where["pack_length"] = f"from {path.name}"
    for name, value in dumped.items():
        packed = said.get(name, value)
        where[name] = "of the dump" + (f"; packed for {packed}" if packed != value else "")
        said[name] = value
    if "pack_length" not in said:
        said["pack_length"], where["pack_length"] = (
            DEFAULT_PACK_LENGTH,
            ("the default: the file has no manifest" if path is None else f"the default: {path.name} says none"),
        )
    return {**said, **given}, {name: origin for name, origin in where.items() if name not in given}


def messages_of(file: Path, row: int, chat_key: str) -> tuple[Messages, int]:
    """Read the messages of a row and its line (from 1) by production's reader, whose errors name file, line and byte."""
    from production.files.source import open_source  # noqa: PLC0415 - cases and dumps need no file reader

    if not is_there(file):
        raise BadInput(f"there is no file {file}: give a packed file, one row a line")
    try:
        with open_source([file], chat_key=chat_key) as source:
            if not 0 <= row < len(source):
                raise BadInput(
                    f"{file} has rows 0 to {len(source) - 1}, there is no row {row}: choose one with --row (line N of the file is row N - 1)"
                )
            messages: Messages = source[row]
            line = source.locate(row).line
    except PackproofError as error:
        raise BadInput(str(error)) from error
    return messages, line


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    try:
        made = name in named_tokenizers.names() and not Path(name).is_dir()
        return named_tokenizers.load(name) if made else load_folder(Path(name))
    except Exception as error:  # transformers raises whatever its parts raise
        known = ", ".join(named_tokenizers.names())
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"tokenizer {name} cannot be loaded ({first}): give a folder, or one of {known}") from error


def _side_names(request: Request, settings: RowSettings) -> tuple[str, ...]:
    """Return the requested sides, or all built-in witnesses of these semantics; beside a dump the reference."""
    if request.sides is not None:
        if len(set(request.sides)) < len(request.sides) or DUMP in request.sides:
            raise BadInput(f"--sides {','.join(request.sides)}: each side once, and the dump is one by itself")
        if len(request.sides) < 2 and request.dump is None:
            raise BadInput(f"--sides {','.join(request.sides)}: nothing to compare with, give two or more")
        return request.sides
    if request.dump is not None:
        return ("reference",)
    return tuple(name for name in BUILT_IN if covers(subject_named(name), settings))


def _build(name: str, asked: _Asked) -> Side:
    """Build one side's row. An error of a built-in side is an error of the input; for the user's own side the text also names the place."""
    subject = subject_named(name)
    if not covers(subject, asked.settings):
        raise BadInput(
            f"side {name!r} is not a witness of semantics {asked.settings.semantics!r}: leave it out of --sides"
        )
    try:
        row = row_of(subject.build_row(asked.messages, asked.tokenizer, asked.settings))
    except Exception as error:
        raise BadInput(f"side {name!r} could not run ({told(error)}): it must build a row or refuse it") from error
    # A command line is no heading: a subject outside the process goes by the name that it gives itself.
    shown = subject.name if name.startswith(EXTERNAL) else name
    return Side(name=shown, version=version_of(subject, name), row=row)
