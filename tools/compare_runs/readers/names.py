"""What the series of a comparison are called elsewhere."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from equivalence.errors import InputError

MILLISECONDS = 1e-3
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
}
"""By series, the names of packproof, of Megatron-LM's TensorBoard and log, of NeMo-RL; the first that is there counts."""
_DEPTH = re.compile(r"(?:train/)?mtp[_ ](\d+)[_ ]loss")


class UnknownKindError(InputError):
    """What was given is none of the kinds that can be read."""


class Names:
    """Which recorded name is which series."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        """`given` are choices such as `loss=train/ce`, which go before what is known. Raises InputError for another form."""
        self._given: dict[str, str] = {}
        for choice in given:
            series, equals, name = choice.partition("=")
            if not equals or (series not in KNOWN and not _DEPTH.fullmatch(series)):
                raise InputError(
                    f"--names {choice}: say SERIES=NAME, with a series of {', '.join(KNOWN)}, or mtp_1_loss and on"
                )
            self._given[series] = name

    def find(self, recorded: Collection[str]) -> Mapping[str, tuple[str, float]]:
        """By recorded name: its series, and what a value is multiplied by. Raises InputError for a chosen name that is not there."""
        found: dict[str, tuple[str, float]] = {}
        for series, names in KNOWN.items():
            chosen = self._given.get(series)
            if chosen is not None and chosen not in recorded:
                raise InputError(f"--names {series}={chosen}: the run has {_some(recorded)}")
            name = chosen or next((name for name in names if name in recorded), None)
            if name is not None:
                found[name] = (series, MILLISECONDS if name.endswith("(ms)") else 1.0)
        for name in recorded:
            if name not in found and (match := _DEPTH.fullmatch(name)):
                found[name] = (f"mtp_{int(match[1])}_loss", 1.0)
        for series, name in self._given.items():
            if series not in KNOWN and name in recorded:
                found[name] = (series, 1.0)
        return found


def no_loss(place: object, recorded: Collection[str]) -> InputError:
    """That none of the recorded names is a loss."""
    return InputError(f"{place}: no loss among {_some(recorded)}; name it with --names loss=NAME")


def _some(recorded: Collection[str]) -> str:
    names = sorted(recorded)
    return (", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "no series at all"
