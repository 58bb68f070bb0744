"""Each fault by its name, so that it can be a side: `--sides reference,equivalence.mutants.subjects:shift_twice`."""

from __future__ import annotations

from equivalence.mutants.row_faults import ROW_MUTANTS, Mutant

_BY_NAME = {mutant.name: mutant for mutant in ROW_MUTANTS}


def __getattr__(name: str) -> Mutant:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise AttributeError(f"no fault is called {name!r}; choose one of {', '.join(_BY_NAME)}") from None
