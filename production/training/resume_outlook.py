"""Tell without starting a run which checkpoint it would go on from, and why it could not: for a dry run.

No file of the data is read and nothing is written: whether the contents of the data and of the checkpoint are what they
were is found by the run itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.tokens.fingerprint import fingerprint_tokenizer
from production.training.checkpoint.manifest import Manifest, check_optimizer, damaged, read_manifest, whole_checkpoints
from production.training.config import Job, order_settings, sizes
from production.training.data.fingerprint import fed_identity
from production.training.data.order import Order
from production.training.data.tokenizer import vocabulary_size
from production.training.layout_change import check_going_on
from production.training.run_identity import identity


def resume_outlook(job: Job, world_size: int, tokenizer: Any | None) -> tuple[list[PackproofError], list[str]]:
    """Return why the run could not go on from its newest checkpoint, and notes; both empty without a checkpoint."""
    saved = job.checkpointing
    whole = whole_checkpoints(Path(saved.checkpoint_dir)) if saved.enabled and saved.resume else []
    if not whole:
        return [], []
    path = whole[-1]
    try:
        manifest = read_manifest(path)
        check_whole(path, manifest)
        if tokenizer is not None:
            now = _identity(job, path, manifest, world_size, tokenizer)
            check_going_on(job, manifest, now, fingerprint_tokenizer(tokenizer))
    except PackproofError as error:
        return [error], []
    unseen = "the contents of the data and of the checkpoint" + (
        "" if tokenizer is not None else ", and every setting, for lack of the tokenizer"
    )
    run = f"step {manifest.step}, run {manifest.run}"
    return [], [f"the run goes on from {path} ({run}); not checked here: {unseen}"]


def check_whole(path: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint without the optimizer's state, or of which a file is missing or has another size."""
    check_optimizer(path, manifest)
    for name, (size, *_) in manifest.files.items():
        if not (path / name).is_file():
            raise damaged(f"the checkpoint is damaged: {name} is missing", path)
        if (path / name).stat().st_size != size:
            raise damaged(f"the checkpoint is damaged: {name} was changed after it was written", path)


def _identity(job: Job, path: Path, manifest: Manifest, world_size: int, tokenizer: Any) -> dict[str, Any]:
    """Return what the run would be with the files of the checkpoint."""
    data, files = sizes(job).data(world_size), manifest.fingerprint.get("files")
    if not isinstance(files, list) or not all(isinstance(each, dict) and "rows" in each for each in files):
        raise damaged("the checkpoint does not say which files its run read", path)
    order = Order([int(file["rows"]) for file in files], order_settings(job, data))
    limits = [each for each in (job.sft.max_num_steps, order.total_steps) if each is not None]
    return identity(
        job,
        fed_identity(job, files, tokenizer=tokenizer, data_parallel_size=data),
        world_size=world_size,
        vocab_size=vocabulary_size(job, tokenizer),
        run_steps=min(limits, default=None),
    )
