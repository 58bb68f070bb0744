"""packproof's own JSON lines."""

from __future__ import annotations

from pathlib import Path

from production.training.metrics.loggers import read_records
from tools.compare_runs.readers.names import Names, no_loss, validation_of
from tools.compare_runs.run import Gathered, Run, to_number

SOURCE = "packproof JSON lines"


def read_lines(path: Path, names: Names) -> Run:
    """Read the run of a `metrics.jsonl`. Raises BadInput for a line that is not a record, InputError for a run without a loss."""
    records = list(read_records(path))
    recorded = {name for record in records if record.kind in ("step", "validation") for name in record.values}
    found = names.find(recorded)
    if not any(meaning.series == "loss" for meaning in found.values()):
        raise no_loss(path, recorded)
    gathered = Gathered()
    for record in records:
        if record.kind == "run":
            gathered.restart(record.step + 1)
            continue
        if record.kind == "step":
            gathered.untrained.discard(record.step)
        if record.values.get("all_masked") is True:
            gathered.untrained.add(record.step)
        for name, value in record.values.items():
            number = to_number(value)
            if name in found and number is not None:
                meaning = found[name]
                gathered.put(meaning.series, record.step + meaning.shift, number * meaning.factor)
    gathered.set_untrained_aside()
    name = path.parent.name if path.name == "metrics.jsonl" and path.parent.name else path.stem
    return Run(
        name=name,
        source=SOURCE,
        place=str(path),
        series=gathered.series,
        remarks=gathered.remarks(),
        untrained=frozenset(gathered.untrained),
        validation=validation_of(found),
    )
