"""An adapter in its own environment as a subject: started when a row is first asked for, and again after it failed."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equivalence.subjects.external.arrays import packed_conversations, read_fields
from equivalence.subjects.external.packed_rows import build_packed_row
from equivalence.subjects.external.process import ChildProcess, SubjectFailed
from equivalence.subjects.external.tokenizer_folder import portable_folder
from equivalence.subjects.protocol import MEGATRON_PRESETS, Messages, Refusal, Row, RowSettings, row_of
from packproof_subject import PROTOCOL, Refused, check_conventions, frame_bytes

START_SECONDS = 120.0
"""Seconds from the start of an adapter to its first answer: it imports torch and its own library."""
SECONDS_VARIABLE = "PACKPROOF_SUBJECT_SECONDS"
"""Environment variable that replaces START_SECONDS and what the adapter says of its rows."""
MOST_FAILURES = 8
"""Failures of a subject in one process after which it is started no more and its rows are left out."""
ROWS_AT_ONCE, ROWS_AHEAD = 8, 16
"""Rows of one request, and how many rows are asked for ahead, so that the adapter builds while an answer is read."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first frame of an adapter: what it says of itself."""

    name: str
    seams: tuple[str, ...]
    conventions: dict[str, str] = field(default_factory=dict)
    takes: dict[str, list[Any]] = field(default_factory=dict)
    """Settings that it takes, by field of RowSettings in the plural; a field that is absent takes all."""
    version: str = ""
    row_seconds: float = 60.0


class ExternalSubject:
    """A subject that runs as a child process. It builds rows or packs and collates nothing: batches are made of rows of other sides."""

    is_witness = False

    def __init__(self, command: str) -> None:
        """Start the adapter once, so that one that cannot start is told before anything runs. ValueError says why."""
        self.command = command
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ValueError(
                f'exec:"{command}" cannot be read as a command line ({error}): close its quotes'
            ) from error
        if not self._words:
            raise ValueError('exec: names no command: give exec:"PYTHON my_adapter.py"')
        self._child: ChildProcess | None = None
        self._owner = 0
        self._failures = 0
        try:
            self.hello = self._start()
        except SubjectFailed as failed:
            raise ValueError(f'exec:"{command}" {failed}') from failed

    @property
    def name(self) -> str:
        """The name that the adapter gives itself."""
        return self.hello.name

    @property
    def version(self) -> str:
        """The version that the adapter gives itself, with those of the libraries that it has loaded."""
        return self.hello.version

    def covers(self, settings: RowSettings) -> bool:
        """Return whether the adapter takes these settings, and has not failed too often in this process.

        An adapter that only packs is not told the semantics: unless it says otherwise, it takes Megatron-LM's.
        """
        if self._failures >= MOST_FAILURES:
            return False
        takes = self.hello.takes
        if "build_row" not in self.hello.seams:
            takes = {"semantics": [MEGATRON_PRESETS[0]], **takes}
        fields = ("prompt_format", "context_parallel_size", "semantics")
        return all(
            getattr(settings, name) in takes.get(plural, [getattr(settings, name)])
            for name, plural in zip(fields, ("prompt_formats", "context_parallel_sizes", "semantics"), strict=True)
        )

    def build_row(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row:
        """Return the adapter's row or refusal. Raises SubjectFailed for an exception, a crash, a hang or no row at all.

        An adapter that only packs is given the tokens of the reference, and its pack is compared through its declared conventions;
        raises NotComparable where that cannot be done.
        """
        if "build_row" not in self.hello.seams:
            return build_packed_row(self.pack, self.hello.conventions, messages, tokenizer, settings)
        (built,) = self.build_rows([messages], tokenizer, settings)
        if isinstance(built, SubjectFailed):
            raise built
        return built

    def build_rows(self, rows: Sequence[Messages], tokenizer: Any, settings: RowSettings) -> list[Row | SubjectFailed]:
        """Return the row of each, or its failure; one that fails costs the others nothing."""
        shared = {"tokenizer": str(portable_folder(tokenizer)), "settings": dataclasses.asdict(settings)}
        built: list[Row | SubjectFailed] = []
        sent = 0
        while len(built) < len(rows):
            try:
                child = self._running()
                while sent < min(len(built) + ROWS_AHEAD, len(rows)):
                    wanted = range(sent, min(sent + ROWS_AT_ONCE, len(rows)))
                    request = [{"id": at, "messages": list(rows[at]), **shared} for at in wanted]
                    child.send(frame_bytes({"type": "build_row", "rows": request}))
                    sent = wanted.stop
                built.append(self._row(child, len(built)))
            except SubjectFailed as failed:
                self._fail()
                built.append(failed)
                sent = len(built)
        return built

    def pack(
        self,
        conversations: Sequence[Mapping[str, Any]],
        *,
        pack_length: int,
        pad_id: int,
        eos_id: int,
        context_parallel_size: int = 1,
    ) -> list[dict[str, Any]]:
        """Return the packs that the adapter makes of conversations, each {"tokens": ids, "trained": flags}: its arrays as lists.

        Raises packproof_subject.Refused for the adapter's refusal, SubjectFailed for an exception, a crash, a hang or no packs at all.
        """
        lengths, buffer = packed_conversations(conversations)
        request = {
            "type": "pack",
            "id": 0,
            "lengths": lengths,
            "pack_length": pack_length,
            "pad_id": pad_id,
            "eos_id": eos_id,
            "context_parallel_size": context_parallel_size,
        }
        try:
            child = self._running()
            child.send(frame_bytes(request, [buffer]))
            header, body = child.receive(self._seconds(self.hello.row_seconds), what="packs")
        except SubjectFailed:
            self._fail()
            raise
        kind = header.get("type")
        if kind == "error":
            raise raised(header)
        if kind == "refusal":
            raise Refused(str(header.get("kind")), str(header.get("message", "")))
        if kind != "packs":
            self._fail()
            raise SubjectFailed(f"answered a request for packs with {kind!r}")
        packs = read_fields(header.get("packs", []), body)
        return [
            {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
            for fields in packs
        ]

    def close(self) -> None:
        """End the child process; the next row starts another."""
        if self._child is not None and self._owner == os.getpid():
            self._child.close()
        self._child = None

    def _row(self, child: ChildProcess, at: int) -> Row | SubjectFailed:
        header, body = child.receive(self._seconds(self.hello.row_seconds), what=f"row {at} of a request")
        kind = header.get("type")
        if header.get("id") != at or kind not in ("row", "refusal", "error"):
            raise SubjectFailed(f"answered row {at} of a request with {kind!r} of id {header.get('id')!r}")
        if kind == "error":
            return raised(header)
        if kind == "refusal":
            return Row(refusal=Refusal(kind=str(header.get("kind")), message=str(header.get("message", ""))))
        try:
            (fields,) = read_fields([header], body)
            return _checked(row_of(fields))
        except (TypeError, ValueError, RuntimeError, SubjectFailed) as error:
            return error if isinstance(error, SubjectFailed) else SubjectFailed(str(error))

    def _running(self) -> ChildProcess:
        if self._owner != os.getpid():  # forked: the child is another process's
            self._child = None
        if self._child is None:
            if self._failures >= MOST_FAILURES:
                raise SubjectFailed(f"failed {self._failures} times in this process and is not started again")
            self._start()
        assert self._child is not None
        return self._child

    def _start(self) -> Hello:
        child, self._owner = ChildProcess(self._words), os.getpid()
        self._child = child
        try:
            header, _ = child.receive(self._seconds(START_SECONDS), what="its first frame", skips_noise=True)
            return read_hello(header)
        except SubjectFailed:
            self._end()
            raise

    def _fail(self) -> None:
        self._failures += 1
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close(at_once=True)
        self._child = None

    def _seconds(self, otherwise: float) -> float:
        text = os.environ.get(SECONDS_VARIABLE)
        if text is None:
            return otherwise
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{SECONDS_VARIABLE} must be a number of seconds, got {text!r}") from None


def raised(header: dict[str, Any]) -> SubjectFailed:
    """Return the exception of an adapter as a failure, with the line at which it was raised."""
    where = header.get("where")
    return SubjectFailed(f"raised {header.get('error')}" + (f" (at {where})" if where else ""))


def read_hello(header: dict[str, Any]) -> Hello:
    """Return the first frame of an adapter. Raises SubjectFailed for another protocol or what cannot be read."""
    if header.get("type") != "hello":
        raise SubjectFailed(f"began with {header.get('type')!r} and not with hello: call packproof_subject.serve")
    if header.get("protocol") != PROTOCOL:
        raise SubjectFailed(
            f"speaks protocol {header.get('protocol')!r} and packproof speaks {PROTOCOL}: copy packproof_subject.py of this packproof"
        )
    try:
        versions = [f"{name} {version}" for name, version in dict(header.get("versions", {})).items()]
        hello = Hello(
            name=str(header["name"]),
            seams=tuple(header["seams"]),
            conventions=check_conventions(header.get("conventions", {})),
            takes={str(name): list(values) for name, values in header.get("takes", {}).items()},
            version=", ".join([part for part in [str(header.get("version", "")), *versions] if part]),
            row_seconds=float(header.get("row_seconds", 60.0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SubjectFailed(f"gave a first frame that cannot be read: {error!r}") from error
    if not hello.name or not set(hello.seams) & {"build_row", "pack"}:
        raise SubjectFailed("gave a first frame without a name or without a seam: build_row, pack or both")
    return hello


def _checked(row: Row) -> Row:
    """Return the row if it can be compared: one-dimensional tensors, and ids that are numbers. Raises SubjectFailed."""
    for name in ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens"):
        tensor = getattr(row, name)
        if tensor is None:
            continue
        if tensor.dim() != 1:
            raise SubjectFailed(f"gave {name} of shape {tuple(tensor.shape)}: a row's {name} has one dimension")
        if name != "token_mask" and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise SubjectFailed(f"gave {name} with NaN or infinity: every value must be a finite number")
    return row
