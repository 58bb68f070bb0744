"""Map the names of other programs to the series of a comparison."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from equivalence.errors import InputError

MILLISECONDS = 1e-3
MICROBATCH_MEANS = "means of microbatch means, over rows that go on from one validation to the next (Megatron-LM)"
TOKEN_MEANS = "means over the trained tokens of the same first rows each time (packproof)"
ROUTER_LOSSES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")
"""Auxiliary losses of experts, as Megatron-LM names them."""
KNOWN: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "lm loss", "train/loss", "train/lm loss", "lm_loss"),
    "gradient_norm": ("gradient_norm", "grad-norm", "grad norm", "train/grad_norm", "grad_norm"),
    "step_seconds": (
        "step_seconds",
        "iteration-time",
        "elapsed time per iteration (ms)",
        "timing/train/total_step_time",
    ),
    "learning_rate": ("learning_rate", "learning-rate", "learning rate", "train/lr", "lr"),
    "consumed_samples": ("consumed_samples", "consumed samples", "samples vs steps"),
    "validation_loss": ("validation_loss", "lm loss validation", "validation/val_loss", "val_loss"),
    **{name: (name,) for name in ROUTER_LOSSES},
}
"""By series, the names of packproof, of Megatron-LM's TensorBoard and log, of NeMo-RL; the first that is there counts."""
NEXT_STEP = ("learning-rate", "learning rate")
"""Names under which Megatron-LM records a number of the step after: it reads the rate when its scheduler has stepped."""
_VALIDATIONS = {"lm loss validation": MICROBATCH_MEANS, "validation_loss": TOKEN_MEANS}
_DEPTH = re.compile(r"(?:train/)?mtp[_ ](\d+)[_ ](loss|acceptance_rate|cumulative_acceptance_rate)")
_GIVEN = re.compile(r"(?:([AB]):)?([^=]+)=(.*)", re.DOTALL)


class Meaning(NamedTuple):
    """Meaning of a recorded name."""

    series: str
    factor: float = 1.0
    """Factor of a value."""
    shift: int = 0
    """Added to a value's step."""


class UnknownKindError(InputError):
    """Error for input of an unknown kind."""


class Names:
    """Mapping from recorded names to series."""

    def __init__(self, given: Sequence[str] = (), *, side: str = "") -> None:
        """`given` are choices such as `loss=train/ce`, which override the known names, or `A:loss=train/ce` for one run; `side` is this run's letter.

        Raises InputError for another form.
        """
        self._given: dict[str, str] = {}
        for choice in given:
            match = _GIVEN.fullmatch(choice)
            if match is None or (match[2] not in KNOWN and not _DEPTH.fullmatch(match[2])):
                raise InputError(
                    f"--names {choice}: say SERIES=NAME, or A:SERIES=NAME for one run, with a series of {', '.join(KNOWN)}, or mtp_1_loss and on"
                )
            if match[1] is None or match[1] == side:
                self._given[match[2]] = match[3]

    def find(self, recorded: Collection[str]) -> Mapping[str, Meaning]:
        """Return the meaning of each recorded name that has one. Raises InputError for a chosen name that is not there."""
        found: dict[str, Meaning] = {}
        for series, names in KNOWN.items():
            chosen = self._given.get(series)
            if chosen is not None and chosen not in recorded:
                raise InputError(
                    f"--names {series}={chosen}: the run has {_some(recorded)}; for one run alone say A:{series}=NAME or B:"
                )
            name = chosen or next((name for name in names if name in recorded), None)
            if name is not None:
                found[name] = Meaning(series, MILLISECONDS if name.endswith("(ms)") else 1.0, int(name in NEXT_STEP))
        for name in recorded:
            if name not in found and (match := _DEPTH.fullmatch(name)):
                found[name] = Meaning(f"mtp_{int(match[1])}_{match[2]}")
        for series, name in self._given.items():
            if series not in KNOWN and name in recorded:
                found[name] = Meaning(series)
        return found


def validation_of(found: Mapping[str, Meaning]) -> str:
    """Return what a validation loss averages over, if its recorded name says so."""
    return next((_VALIDATIONS.get(name, "") for name, each in found.items() if each.series == "validation_loss"), "")


def no_loss(place: object, recorded: Collection[str]) -> InputError:
    """Return the error for a run without a recorded name of a loss."""
    return InputError(f"{place}: no loss among {_some(recorded)}; name it with --names loss=NAME")


def _some(recorded: Collection[str]) -> str:
    names = sorted(recorded)
    return (", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "no series at all"
