"""All fault classes by name: the one list that the runner, the report and the matrices read."""

from __future__ import annotations

from collections.abc import Mapping

from equivalence.generators.faults import contents, layout, numbers, settings
from equivalence.generators.faults.fault_class import FaultClass

_EVERY = (contents.FAULTS, layout.FAULTS, numbers.FAULTS, settings.FAULTS)


def classes() -> Mapping[str, FaultClass]:
    """Return all classes by name, in the order of the report."""
    return _CLASSES


_CLASSES: dict[str, FaultClass] = {name: found for faults in _EVERY for name, found in faults.items()}
assert len(_CLASSES) == sum(map(len, _EVERY)), "two fault classes have one name"
