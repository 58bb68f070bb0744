"""Where a run's numbers go (R-RECORD): JSON lines always, TensorBoard beside them, W&B and MLflow (extras) where asked.

One line of JSON costs 20 µs and is with the operating system before the next step begins; a line is not forced to the disk.
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
"""JSON has no such numbers: a line holds these strings instead, and `read_records` turns them back."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every logger is given."""

    kind: Kind
    """`run`: the job's facts, at its beginning and at each resumption; `end`: how it ended."""
    step: int
    """The step that it belongs to; of `run`, the one before the first."""
    values: Mapping[str, Value]
    """By name (`StepNumbers.values`; of a validation, `validation_loss` and the like)."""


class Logger(Protocol):
    """One place that numbers go to."""

    def log(self, record: Record) -> None:
        """Take one record; it is out of this process, or on its way, on return."""

    def close(self) -> None:
        """Nothing follows."""


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """A run of Weights & Biases."""

    project: str
    """Project that the run is put in."""
    name: str | None = None
    """None: it makes one up."""
    entity: str | None = None
    """Team or user; None: the login's own."""
    run_id: str | None = None
    """Of the run, which is gone on with where it is there (a job gives its own); in offline mode the parts of one run are brought together
    by `wandb sync --append`. None: W&B makes one up."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes below the folder, for `wandb sync`."""


@dataclass(frozen=True, kw_only=True)
class MlflowSettings:
    """A run of MLflow."""

    experiment: str
    """Experiment that the run is put in."""
    tracking_uri: str | None = None
    """A server, or `file:///…`; None: the folder `mlruns` below the run's."""
    run_name: str | None = None
    """None: it makes one up."""
    run_id: str | None = None
    """Of a run to go on with."""


@dataclass(frozen=True, kw_only=True)
class LoggerSettings:
    """Which loggers a run has beside the JSON lines."""

    folder: Path
    """`metrics.jsonl` lies there, and what else is kept in files."""
    tensorboard: str | None = "tensorboard"
    """Folder of the event files, below `folder`; None for none."""
    wandb: WandbSettings | None = None
    """None for none."""
    mlflow: MlflowSettings | None = None
    """None for none."""


@dataclass(kw_only=True)
class Loggers:
    """Several loggers as one; a context manager that closes them. On ranks other than 0 there are none."""

    lines: JsonLines | None = None
    """The JSON lines; None on ranks other than 0."""
    others: dict[str, Logger] = field(default_factory=dict)
    """The rest by name."""
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    """Told when one of the rest fails; standard error unless given."""

    def __enter__(self) -> Self:
        """Nothing more to open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all."""
        self.close()

    def log(self, record: Record) -> None:
        """Give the record to all. Raises what the JSON lines raise; another logger that fails is told of and left out."""
        if self.lines is not None:
            self.lines.log(record)
        for name in list(self.others):
            self._try(name, lambda logger: logger.log(record))

    def close(self) -> None:
        """Close all of them, also after one that fails."""
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
    """The loggers of this run, after a `run` record with the facts `run`; none on ranks other than 0.

    With `finished_steps` the run goes on: files are appended to, and what they hold of later steps is overridden by
    what follows. Raises PackproofError where a logger's package is missing, one cannot start (no login, no server), or the folder
    cannot be written.
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
    """One object a line (R-RECORD-1): `kind`, `step`, `time` in seconds since 1970, then the values. NaN and infinities are the strings of
    NOT_NUMBERS.
    """

    def __init__(self, path: Path) -> None:
        """Append to the file (R-RECORD-2). A last line that was cut off is taken away; `repaired` says how many bytes that were."""
        self._path = path
        try:
            self.repaired = _mend_tail(path)
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
    """An event file for TensorBoard. It keeps float32: the JSON lines are the ones to compare losses by."""

    def __init__(self, folder: Path, finished_steps: int) -> None:
        """What earlier event files hold of steps after `finished_steps` is hidden; of a run that begins anew all of it, step 0 too."""
        summaries = _import("torch.utils.tensorboard", package="tensorboard", extra=None)
        self._writer = summaries.SummaryWriter(str(folder), purge_step=finished_steps + 1 if finished_steps else 0)

    def log(self, record: Record) -> None:
        """Scalars by name; facts of the run as text."""
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
    """Weights & Biases; what was logged of steps that are run again stays as it was first."""

    def __init__(self, settings: WandbSettings, folder: Path, run: Mapping[str, Value]) -> None:
        """Begin or go on with a run."""
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
        """Scalars at their step; a run's facts are its config already."""
        if record.kind != "run":
            self._run.log(dict(record.values), step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """An MLflow tracking server, or its folder of files."""

    def __init__(self, settings: MlflowSettings, folder: Path, run: Mapping[str, Value]) -> None:
        """Begin or go on with a run, in an experiment that is made if it is not there."""
        self._mlflow = _import("mlflow", package="mlflow-skinny", extra="mlflow")
        place = settings.tracking_uri
        if place is None:
            place = (folder / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 keeps files only where told so
        self._client = self._mlflow.MlflowClient(tracking_uri=place)
        self._id = settings.run_id
        if self._id is None:
            found = self._client.get_experiment_by_name(settings.experiment)
            number = self._client.create_experiment(settings.experiment) if found is None else found.experiment_id
            self._id = self._client.create_run(number, run_name=settings.run_name).info.run_id
            parameters = [self._mlflow.entities.Param(name, str(value)) for name, value in run.items()]
            self._client.log_batch(self._id, params=parameters)

    def log(self, record: Record) -> None:
        """Numbers at their step."""
        now = time.time_ns() // 1_000_000
        metrics = [
            self._mlflow.entities.Metric(name, float(value), now, record.step)
            for name, value in record.values.items()
            if record.kind != "run" and not isinstance(value, str)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._id)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file of JSON lines, in order; a last line without its end is left out.

    Raises BadInput for a line that is none of ours.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                values = json.loads(line)
                kind, step = values.pop("kind"), values.pop("step")
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise BadInput(
                    kind="bad_record",
                    what=f"no record of a run: {error!r}",
                    mend="give the metrics.jsonl of a run",
                    file=str(path),
                    line=number,
                ) from error
            yield Record(kind=kind, step=step, values={name: _from_json(value) for name, value in values.items()})


_START = {
    "tensorboard": "make logger.tensorboard.log_dir a folder that can be written",
    "wandb": "log in once (`wandb login`), or set logger.wandb.mode to offline",
    "mlflow": "give logger.mlflow.tracking_uri a server that can be reached, or leave it out: runs are kept below logger.log_dir then",
}
"""How a logger that does not start is mended."""


@contextlib.contextmanager
def _starting(name: str) -> Iterator[None]:
    """Says in a job's words why a logger does not start, whatever its package raises."""
    try:
        yield
    except PackproofError:
        raise
    except Exception as error:
        raise PackproofError(
            what=f"{name} cannot start: {type(error).__name__}: {str(error).rstrip('.')}",
            where=f"logger.{name}_enabled",
            mend=f"{_START[name]}; or set logger.{name}_enabled to false",
        ) from error


def _unwritten(error: OSError, path: Path) -> PackproofError:
    return PackproofError(
        what=f"a run's numbers cannot be written: {error.strerror or error}",
        where=str(path),
        mend="make room there or give another logger.log_dir, then start the job again: it goes on from its newest checkpoint",
    )


def _as_json(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: Value) -> Value:
    return NOT_NUMBERS.get(value, value) if isinstance(value, str) else value


def _mend_tail(path: Path) -> int:
    """Cut a last line that has no end, unless it is whole but for that; the number of bytes cut."""
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
            mend=f"install {package}" + (f" (packproof[{extra}])" if extra else "") + ", or leave this logger out",
        ) from error
