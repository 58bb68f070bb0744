"""Write a run's numbers (R-RECORD): always JSON lines, TensorBoard beside them, W&B and MLflow (extras) where asked
for.

One line of JSON costs 20 µs and is with the operating system before the next step begins; a line is not forced to the
disk.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from production.errors import BadInput, PackproofError

Value = float | int | bool | str
Kind = Literal["run", "step", "validation", "end"]
FILE = "metrics.jsonl"
NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Strings that stand for numbers which JSON lacks; `read_records` turns the strings back."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Holds one record for all loggers."""

    kind: Kind
    """Kind of record; `run` holds the job's facts, at its start and at each resumption, and `end` the way the run
    ended.
    """
    step: int
    """Step of the record; of `run`, the step before the first."""
    values: Mapping[str, Value]
    """Values by name (`StepNumbers.values`; of a validation, `validation_loss` and the like)."""


MLFLOW_TAG = "packproof.run"
"""Tag of a run of MLflow that names the job's run."""


class Logger(Protocol):
    """A destination of records."""

    def log(self, record: Record) -> None:
        """Take one record, which has left this process, or is on its way, on return."""

    def close(self) -> None:
        """Close the logger; no record follows."""


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Settings of a run of Weights & Biases."""

    project: str
    """Project that the run is put in."""
    name: str | None = None
    """Name of the run; None: W&B makes a name."""
    entity: str | None = None
    """Team or user; None: the login's own."""
    run_id: str | None = None
    """Identifier of the run, which continues where it exists (a job gives its own); None: W&B makes one up.

    In offline mode `wandb sync --append` joins the parts of one run.
    """
    mode: Literal["online", "offline"] = "online"
    """`offline` writes below the folder, for `wandb sync`."""


@dataclass(frozen=True, kw_only=True)
class MlflowSettings:
    """Settings of a run of MLflow."""

    experiment: str
    """Experiment that the run is put in."""
    tracking_uri: str | None = None
    """A server, or `file:///…`; None: the folder `mlruns` below the run's."""
    run_name: str | None = None
    """Name of the run; None: MLflow makes a name."""
    run: str | None = None
    """Name of a job's run, which is kept as a tag: a run of MLflow with this tag is continued; None begins one."""


@dataclass(frozen=True, kw_only=True)
class LoggerSettings:
    """Settings of a run's loggers beside the JSON lines."""

    folder: Path
    """Folder of `metrics.jsonl` and of all other files of loggers."""
    tensorboard: str | None = "tensorboard"
    """Folder of the event files, below `folder`; None writes no event file."""
    wandb: WandbSettings | None = None
    """Settings of W&B; None does not log there."""
    mlflow: MlflowSettings | None = None
    """Settings of MLflow; None does not log there."""


@dataclass(kw_only=True)
class Loggers:
    """Joins several loggers in one; a context manager that closes them. Ranks other than 0 have no logger."""

    lines: JsonLines | None = None
    """The JSON lines; None on ranks other than 0."""
    others: dict[str, Logger] = field(default_factory=dict)
    """The other loggers by name."""
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    """Called when one of the other loggers fails; prints to standard error unless given."""

    def __enter__(self) -> Self:
        """Return the loggers, which are already open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all loggers."""
        self.close()

    def log(self, record: Record) -> None:
        """Give the record to all loggers.

        Raises what the JSON lines raise; another logger that fails is reported and left out.
        """
        if self.lines is not None:
            self.lines.log(record)
        for name in list(self.others):
            self._try(name, lambda logger: logger.log(record))

    def close(self) -> None:
        """Close all loggers, also after one that fails."""
        for name in list(self.others):
            self._try(name, lambda logger: logger.close())
        self.others.clear()
        if self.lines is not None:
            self.lines.close()

    def _try(self, name: str, call: Callable[[Logger], None]) -> None:
        try:
            call(self.others[name])
        except Exception as error:  # noqa: BLE001 - a lost server must not end a run whose numbers are all in its file
            del self.others[name]
            self.say(f"{name} failed and is left out from here on ({FILE} has every number): {error!r}")


def open_loggers(settings: LoggerSettings, *, rank: int, run: Mapping[str, Value], finished_steps: int = 0) -> Loggers:
    """Open the loggers of this run and log a `run` record with the facts `run`; ranks other than 0 open no logger.

    With `finished_steps` the run continues: files are appended to, and new records override older ones of later
    steps. Raises PackproofError where a logger's package is missing, a logger cannot start (no login, no server), or
    the folder cannot be written.
    """
    if rank != 0:
        return Loggers()
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(error, settings.folder) from error
    loggers = Loggers(lines=JsonLines(settings.folder / FILE))
    try:
        if settings.tensorboard is not None:
            with _starting("tensorboard"):
                loggers.others["tensorboard"] = TensorBoard(settings.folder / settings.tensorboard, finished_steps)
        if settings.wandb is not None:
            with _starting("wandb"):
                loggers.others["wandb"] = Wandb(settings.wandb, settings.folder, run)
        if settings.mlflow is not None:
            with _starting("mlflow"):
                loggers.others["mlflow"] = Mlflow(settings.mlflow, settings.folder, run)
        loggers.log(Record(kind="run", step=finished_steps, values=run))
    except BaseException:
        loggers.close()
        raise
    return loggers


class JsonLines:
    """Writes one JSON object a line (R-RECORD-1): `kind`, `step`, `time` in seconds since 1970, then the values.

    NaN and infinities are written as the strings of NOT_NUMBERS.
    """

    def __init__(self, path: Path) -> None:
        """Append to the file (R-RECORD-2). An incomplete last line is removed; `repaired` holds its number of bytes."""
        self._path = path
        try:
            self.repaired = _fix_tail(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritten(error, path) from error

    def log(self, record: Record) -> None:
        """Write one whole line at once."""
        values = {name: _as_json(value) for name, value in record.values.items()}
        said = {"kind": record.kind, "step": record.step, "time": round(time.time(), 3), **values}
        line = json.dumps(said, allow_nan=False, ensure_ascii=False)
        rest = line.encode("utf-8", "backslashreplace") + b"\n"
        try:
            while rest:  # a disk that fills up takes a part of it and refuses the next
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise _unwritten(error, self._path) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes an event file for TensorBoard, in float32: compare losses by the JSON lines."""

    def __init__(self, folder: Path, finished_steps: int) -> None:
        """Hide steps after `finished_steps` of earlier event files; a new run hides all steps, step 0
        too.
        """
        summaries = _import("torch.utils.tensorboard", package="tensorboard", extra=None)
        self._writer = summaries.SummaryWriter(str(folder), purge_step=finished_steps + 1 if finished_steps else 0)

    def log(self, record: Record) -> None:
        """Log scalars by name, and facts of the run as text."""
        for name, value in record.values.items():
            if record.kind == "run" or isinstance(value, str):
                self._writer.add_text(f"{record.kind}/{name}", str(value), record.step)
            else:
                self._writer.add_scalar(name, value, record.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """Logs to Weights & Biases. A step that a resumed run repeats keeps the values of its first run."""

    def __init__(self, settings: WandbSettings, folder: Path, run: Mapping[str, Value]) -> None:
        """Begin or continue a run."""
        wandb = _import("wandb", package="wandb", extra="wandb")
        self._run: Any = wandb.init(
            project=settings.project,
            name=settings.name,
            entity=settings.entity,
            id=settings.run_id,
            resume="allow" if settings.mode == "online" else None,
            mode=settings.mode,
            dir=str(folder),
            config=dict(run),
            settings=wandb.Settings(silent=True),
        )

    def log(self, record: Record) -> None:
        """Log scalars at their step. The facts of a `run` record are left out, because they are in the run's config."""
        if record.kind != "run":
            self._run.log(dict(record.values), step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """Logs to an MLflow tracking server, or to a folder of files. A step that a resumed run repeats gets a second value."""

    def __init__(self, settings: MlflowSettings, folder: Path, run: Mapping[str, Value]) -> None:
        """Begin or continue a run, in an experiment that is made if it does not exist."""
        self._mlflow = _import("mlflow", package="mlflow-skinny", extra="mlflow")
        place = settings.tracking_uri
        if place is None:
            place = (folder / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 keeps files only where told so
        self._client = self._mlflow.MlflowClient(tracking_uri=place)
        found = self._client.get_experiment_by_name(settings.experiment)
        number = self._client.create_experiment(settings.experiment) if found is None else found.experiment_id
        self._id = self._begun(number, settings.run)
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return  # the facts of a run are kept as they began: MLflow refuses other values
        tags = {} if settings.run is None else {MLFLOW_TAG: settings.run}
        self._id = self._client.create_run(number, run_name=settings.run_name, tags=tags).info.run_id
        parameters = [self._mlflow.entities.Param(name, str(value)) for name, value in run.items()]
        self._client.log_batch(self._id, params=parameters)

    def _begun(self, experiment: str, run: str | None) -> Any:
        """Return the identifier of the run with this tag; None where there is none."""
        if run is None:
            return None
        wanted = f"tags.`{MLFLOW_TAG}` = '{run}'"
        runs = self._client.search_runs([experiment], filter_string=wanted, max_results=1)
        return runs[0].info.run_id if runs else None

    def log(self, record: Record) -> None:
        """Log numbers at their step."""
        now = time.time_ns() // 1_000_000
        metrics = [
            self._mlflow.entities.Metric(name, float(value), now, record.step)
            for name, value in record.values.items()
            if record.kind != "run" and not isinstance(value, str)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)


def read_records(path: Path) -> Iterator[Record]:
    """Return the records of a file of JSON lines, in order; an incomplete last line is left out.

    Raises BadInput for a line that no logger of this module wrote.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                values = json.loads(line)
                kind, step = values.pop("kind"), values.pop("step")
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise BadInput(
                    kind="bad_record",
                    what=f"the line must be a record of a run, and is not: {error!r}",
                    fix="give the file metrics.jsonl of a run",
                    file=str(path),
                    line=number,
                ) from error
            yield Record(kind=kind, step=step, values={name: _from_json(value) for name, value in values.items()})


_START = {
    "tensorboard": "make logger.tensorboard.log_dir a folder that can be written",
    "wandb": "log in once (`wandb login`), or set logger.wandb.mode to offline",
    "mlflow": "give logger.mlflow.tracking_uri a server that can be reached, or leave it out: runs are kept below logger.log_dir then",
}
"""Fixes for a logger that does not start."""


@contextlib.contextmanager
def _starting(name: str) -> Iterator[None]:
    """Raise in a job's words why a logger does not start, whatever its package raises."""
    try:
        yield
    except PackproofError:
        raise
    except Exception as error:
        raise PackproofError(
            what=f"{name} cannot start: {type(error).__name__}: {str(error).rstrip('.')}",
            where=f"logger.{name}_enabled",
            fix=f"{_START[name]}; or set logger.{name}_enabled to false",
        ) from error


def _unwritten(error: OSError, path: Path) -> PackproofError:
    return PackproofError(
        what=f"a run's numbers cannot be written: {error.strerror or error}",
        where=str(path),
        fix="make room in the folder or give another logger.log_dir, then start the job again: it resumes from its newest checkpoint",
    )


def _as_json(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: Value) -> Value:
    return NOT_NUMBERS.get(value, value) if isinstance(value, str) else value


def _fix_tail(path: Path) -> int:
    """Cut an incomplete last line, unless only its newline is missing; return the number of bytes cut."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        tail = b""
        while size - len(tail) > 0 and b"\n" not in tail:
            start = max(0, size - len(tail) - 65_536)
            file.seek(start)
            tail = file.read(size - start)
        rest = tail.rpartition(b"\n")[2]
        if not rest:
            return 0
        try:
            whole = isinstance(json.loads(rest), dict)
        except ValueError:
            whole = False
        if whole:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return 0
        file.truncate(size - len(rest))
        return len(rest)


def _import(module: str, *, package: str, extra: str | None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PackproofError(
            what=f"{package} cannot be imported: {error}",
            where=f"logger.{module.rpartition('.')[2]}",
            fix=f"install {package}" + (f" (packproof[{extra}])" if extra else "") + ", or leave this logger out",
        ) from error
