"""TensorBoard event files, of packproof, Megatron-LM or anyone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.compare_runs.readers.names import Meaning, Names, no_loss, validation_of
from tools.compare_runs.run import FLOAT32, Gathered, Run

PATTERN = "events.out.tfevents.*"


def read_events(path: Path, names: Names) -> Run:
    """Read the run of an event file, or of all event files in one folder. Raises InputError for a run without a loss."""
    # It pulls in gRPC and protobuf: a second that the other readers need not wait.
    from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415

    events: Any = event_accumulator.EventAccumulator(
        str(path), size_guidance={event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    )
    events.Reload()
    tags = events.Tags()
    recorded = {*tags["scalars"], *tags["tensors"]}
    found = names.find(recorded)
    if not any(meaning.series == "loss" for meaning in found.values()):
        raise no_loss(path, recorded)
    gathered = Gathered()
    for tag, meaning in found.items():
        for step, value in _values(events, tag, meaning).items():
            gathered.put(meaning.series, step, value)
    gathered.set_untrained_aside()
    return Run(
        name=path.name if path.is_dir() else path.parent.name or path.name,
        source="TensorBoard event files",
        place=str(path),
        series=gathered.series,
        precisions=dict.fromkeys(gathered.series, FLOAT32),
        untrained=frozenset(gathered.untrained),
        validation=validation_of(found),
        remarks=["TensorBoard keeps float32: seven digits"],
    )


def _values(events: Any, tag: str, meaning: Meaning) -> dict[int, float]:
    """Return the values by step; for a step that was written twice, the last value."""
    if tag in events.Tags()["scalars"]:
        return {event.step + meaning.shift: float(event.value) * meaning.factor for event in events.Scalars(tag)}
    from tensorboard.util.tensor_util import make_ndarray  # noqa: PLC0415

    arrays = ((event.step + meaning.shift, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag))
    return {
        step: float(array) * meaning.factor for step, array in arrays if array.size == 1 and array.dtype.kind == "f"
    }
