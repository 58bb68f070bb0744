"""Run Megatron-LM's driver, then packproof's job from the same weights, and compare their last weights.

The driver draws the first weights and saves them; where the job starts from a checkpoint, both programs do.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from equivalence.errors import InputError, SuiteError
from equivalence.workers import CaseFailed, Deadlines, open_world, preload
from production.training.checkpoint.manifest import MANIFEST
from production.training.checkpoint.megatron_lm import TRACKER
from production.training.config import Job, load, multi_token_depths, print_config
from production.training.data.tokenizer import load_tokenizer, vocabulary_size
from production.training.export import export_megatron_lm
from tools.compare_runs.driver.arguments import command_line, round_trip_differences
from tools.compare_runs.driver.rank import DriverRun, Series
from tools.compare_runs.driver.source import SCRIPT, check_source
from tools.compare_runs.driver.stand_ins import STAND_INS
from tools.compare_runs.live_rank import Measured, agreed

DRIVER, PACKPROOF = "Megatron-LM's driver", "packproof"
"""Names of the two programs."""
_RANK = "tools.compare_runs.driver.rank"
_MODULES = (
    _RANK,
    "megatron.training.training",
    "production.training.trainer",
    "transformers.models.auto.tokenization_auto",
)
"""Modules that ranks need beside megatron-core."""
_DAY = 86_400.0
_DEADLINES = Deadlines(case_s=_DAY, idle_s=120.0)


def measure(job: Job, world_size: int, *, source: Path, keep: Path | None) -> Measured:
    """Run both programs and return what they reported, and which of their last weights differ.

    Raises InputError for a folder that is no source tree of this version or a folder to keep that is not empty, PackproofError for a
    job that the driver cannot run, SuiteError with the end of the driver's log where it fails.
    """
    tree = check_source(source)
    vocab_size = vocabulary_size(job, load_tokenizer(job))
    with _folder(keep) as folder:
        start = None if job.model.initial == "scratch" else folder / "load"
        words = command_line(job, vocab_size=vocab_size, save=folder / "driver", start=start)
        if unlike := round_trip_differences(job, words, vocab_size=vocab_size, world_size=world_size):
            raise InputError(
                f"the driver's command line would not train this job: {'; '.join(unlike)}. Set values that Megatron-LM has"
            )
        if start is not None:
            _write_start(job, start)
        (folder / "driver_command_line.txt").write_text(f"{SCRIPT} {shlex.join(words)}\n", encoding="utf-8")
        preload(*_MODULES)
        series = {
            DRIVER: _drive(world_size, DriverRun(
                source=str(source.resolve()), words=words, start=str(folder / "start"), log=str(folder / "driver.log"),
                depths=multi_token_depths(job),
            )),
        }  # fmt: skip
        ours = _ours(job, folder, vocab_size)
        with open_world(world_size, deadlines=_DEADLINES) as world:
            series[PACKPROOF] = agreed(PACKPROOF, world.run(f"{_RANK}:train", ours))
        steps = job.sft.max_num_steps or 0
        ends = str(folder / "driver" / f"iter_{steps:07d}"), str(folder / "packproof" / f"step_{steps:08d}")
        with open_world(1, deadlines=_DEADLINES) as world:
            (unequal,) = world.run(f"{_RANK}:unequal_weights", ends)
    return Measured(
        series=series,
        unequal_weights=unequal,
        stand_ins=STAND_INS,
        upstream=(f"{SCRIPT} of {tree}, unmodified", "megatron.core and megatron.training as installed"),
        is_interleaved=False,
    )


def _drive(world_size: int, payload: DriverRun) -> Series:
    with open_world(world_size, deadlines=_DEADLINES) as world:
        try:
            return agreed(DRIVER, world.run(f"{_RANK}:drive", payload))
        except CaseFailed as error:
            log = Path(payload.log)
            end = log.read_text(encoding="utf-8").splitlines()[-20:] if log.exists() else []
            raise SuiteError(
                "\n".join([error.failure.why, error.failure.first.stack, "the driver's log ends:", *end])
            ) from None


def _write_start(job: Job, folder: Path) -> None:
    """Make the folder of the driver's --load, of the checkpoint that the job starts from."""
    assert job.model.initial_path is not None
    checkpoint = Path(job.model.initial_path)
    if (checkpoint / MANIFEST).is_file():  # a checkpoint of packproof's
        export_megatron_lm(checkpoint, folder)
        return
    folder.mkdir()
    (folder / "iter_0000001").symlink_to(checkpoint.resolve(), target_is_directory=True)
    (folder / TRACKER).write_text("1", encoding="utf-8")


def _ours(job: Job, folder: Path, vocab_size: int) -> Job:
    """Return the job that saves its last weights, and starts from those that the driver drew if the job says no others."""
    path = folder / "job.yaml"
    path.write_text(print_config(job), encoding="utf-8")
    more = {
        "model.vocab_size": vocab_size,
        "checkpointing.enabled": "true",
        "checkpointing.checkpoint_dir": folder / "packproof",
        "checkpointing.save_period": job.sft.max_num_steps,
        "checkpointing.save_optimizer": "false",
        "logger.log_dir": folder / "logs",
        "logger.tensorboard_enabled": "false",
        "logger.progress": "false",
        "logger.report_period": 1,
    }
    if job.model.initial == "scratch":
        more |= {"model.initial": "megatron", "model.initial_path": folder / "start" / "iter_0000000"}
    return load(path, [f"{key}={value}" for key, value in more.items()])


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="packproof-driver-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(f"--keep {keep} must be an empty folder or a new one: it holds something already")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()
