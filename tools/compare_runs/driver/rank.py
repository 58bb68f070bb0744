"""Run a rank of Megatron-LM's driver, and a rank of packproof's job, each in a world of its own.

`pretrain_gpt.py` runs as `__main__`, byte for byte, on the installed `megatron` package. Observed from outside are the scalars that it hands
to its TensorBoard writer, in full precision, the learning rate before each step, which it reports a step late, and the optimizer's gradient
norm, which it reports rounded to float32. The weights that it drew are saved before its
first step, for packproof's job to start from.
"""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from equivalence.workers import Worker
from production.model.device.shim import cpu_shim
from production.training.config import Job
from production.training.export import stored_weights
from tools.compare_runs.driver.source import SCRIPT
from tools.compare_runs.driver.stand_ins import standing_in
from tools.compare_runs.readers.names import ROUTER_LOSSES

Series = dict[str, dict[int, float]]
_RATE, _NORM = "learning rate of the step", "gradient norm of the optimizer"
_NAMES = {"lm loss": "loss", _NORM: "gradient_norm", _RATE: "learning_rate"}
"""Name of a scalar to the name of its series, beside those of depths and routers."""


@dataclass(frozen=True, kw_only=True)
class DriverRun:
    """Holds what a rank needs to run the driver."""

    source: str
    """Folder of the source tree."""
    words: Sequence[str]
    """Command line behind the script."""
    start: str
    """Folder that the drawn weights are saved to."""
    log: str
    """File that the output of all ranks is appended to."""
    depths: int
    """Depths of multi-token prediction."""


def drive(payload: DriverRun, worker: Worker) -> Series:
    """Run the driver on this rank; return what it reported, under the names of `Run.series`."""
    del worker
    recorder = _Recorder()
    with contextlib.ExitStack() as undo:
        log = undo.enter_context(Path(payload.log).open("a", buffering=1, encoding="utf-8"))
        undo.enter_context(contextlib.redirect_stdout(log))
        undo.enter_context(contextlib.redirect_stderr(log))
        undo.enter_context(warnings.catch_warnings(action="ignore"))
        undo.enter_context(_deterministic())
        undo.enter_context(standing_in())
        undo.enter_context(_beside_the_installed_megatron(payload.source))
        undo.enter_context(_observed(recorder, payload.start))
        script = str(Path(payload.source) / SCRIPT)
        undo.enter_context(mock.patch.object(sys, "argv", [script, *payload.words]))
        runpy.run_path(script, run_name="__main__")
    return _series(recorder.scalars, payload.depths)


def train(job: Job, worker: Worker) -> Series:
    """Run packproof's job on this rank, as `python -m production.training` does; return what it reported."""
    del worker
    from production.training.trainer import run  # noqa: PLC0415 - megatron-core

    found: Series = {}
    for numbers in run(job).numbers:
        wanted = {"loss", "gradient_norm", "learning_rate", *numbers.router_losses}
        values = {name: float(value) for name, value in numbers.values().items() if name in wanted}
        for depth, loss in enumerate(numbers.mtp_losses, 1):
            if loss is not None:
                values[f"mtp_{depth}_loss"] = loss
        for depth, rate in enumerate(numbers.mtp_acceptance_rates, 1):
            # Of no position that counts Megatron-LM writes a rate of 0, where our records have none.
            values[f"mtp_{depth}_acceptance_rate"] = 0.0 if math.isnan(rate) else rate
        for name, value in values.items():
            found.setdefault(name, {})[numbers.step] = value
    return found


def unequal_weights(payload: tuple[str, str], worker: Worker) -> list[str]:
    """Return the names of weights that two checkpoints do not both hold with the same values; in a world of one rank."""
    del worker
    with cpu_shim():
        first, second = (stored_weights(Path(each)) for each in payload)
    both = first.keys() & second.keys()
    wrong = {name for name in both if not torch.equal(first[name], second[name])}
    return sorted(wrong | (first.keys() ^ second.keys()))


class _Recorder:
    """A TensorBoard writer that keeps every scalar in full precision."""

    def __init__(self) -> None:
        self.scalars: Series = {}

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.scalars.setdefault(name, {})[step] = float(value)

    def flush(self) -> None:
        """Everything is kept already."""

    def close(self) -> None:
        """Nothing is open."""


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@contextlib.contextmanager
def _beside_the_installed_megatron(source: str) -> Iterator[None]:
    """Let the script import its neighbours, such as `model_provider`, but `megatron` only from where it is installed.

    `megatron` is a namespace package, which would otherwise silently join both trees.
    """
    import megatron  # noqa: PLC0415 - megatron-core

    installed = list(megatron.__path__)
    with mock.patch.object(megatron, "__path__", installed), mock.patch.object(sys, "path", [*sys.path, source]):
        yield


@contextlib.contextmanager
def _observed(recorder: _Recorder, start: str) -> Iterator[None]:
    from megatron.training import checkpointing, get_args, training  # noqa: PLC0415 - seconds

    train, step = training.train, training.train_step

    def with_start(forward_step: Any, model: Any, *rest: Any, **options: Any) -> Any:
        args = get_args()
        with mock.patch.object(args, "save", start):
            checkpointing.save_checkpoint(0, model, None, None, 0)
        return train(forward_step, model, *rest, **options)

    def observed(forward_step: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        number = 1 + len(recorder.scalars.get(_RATE, {}))
        recorder.add_scalar(_RATE, optimizer.param_groups[0]["lr"], number)
        update = optimizer.step

        def updated() -> Any:
            found = update()
            if found[1] is not None:
                recorder.add_scalar(_NORM, found[1], number)
            return found

        with mock.patch.object(optimizer, "step", updated):
            return step(forward_step, data, model, optimizer, *rest, **options)

    with (
        mock.patch.object(training, "train", with_start),
        mock.patch.object(training, "train_step", observed),
        mock.patch.object(training, "get_tensorboard_writer", return_value=recorder),
    ):
        yield


def _series(scalars: Series, depths: int) -> Series:
    names = dict(_NAMES)
    for depth in range(1, depths + 1):
        names |= {
            f"mtp_{depth} loss": f"mtp_{depth}_loss",
            f"mtp_{depth}_acceptance_rate": f"mtp_{depth}_acceptance_rate",
        }
    # A loss of a router whose coefficient is 0 is reported as 0 throughout.
    names |= {name: name for name in ROUTER_LOSSES if any(scalars.get(name, {}).values()) or name == "z_loss"}
    return {ours: scalars[theirs] for theirs, ours in names.items() if theirs in scalars}
