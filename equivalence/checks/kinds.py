"""Names the class of a difference: what a person would look for first, by the tensor's name and else by the check."""

from __future__ import annotations

import re

from equivalence.checks.registry import CHECKS

UNNAMED = "other"
"""Written by a check that leaves the class to this module. No report shows it."""
_NAMES: tuple[tuple[str, str], ...] = (
    (r"^refusal", "refusal"),
    (r"^names", "names"),
    (r"how many", "count"),
    (r"empty.shares", "token_count"),
    (r"steps that Adam", "optimizer_step"),
    (r"learning rate", "learning_rate"),
    (r"weight decay", "weight_decay"),
    (r"gradient norm", "gradient_norm"),
    (r"valid.tokens|divisor|counted|total_tokens|trained tokens", "token_count"),
    (r"gradient of|^gradient", "gradient"),
    (r"^weight of a token|^weight at a depth", "token_weight"),
    (r"^weight ", "weight"),
    (r"^epochs of|^rows of|^rows from", "order"),
    (r"^index of", "cut"),
    (r"loss_mask|token_mask|target_mask|sample_mask|\bmask\b", "mask"),
    (r"target_ids|labels", "label"),
    (r"position_ids", "position"),
    (r"input_ids|\btokens\b(?! losses)", "token"),
    (r"max_seqlen", "max_seqlen"),
    (r"cu_seqlens|boundaries", "boundary"),
    (r"input_lengths", "length"),
    (r"loss|reported|returned", "loss"),
)
"""Patterns in the name of what differs, the most telling first."""


def named(kind: str, *, check: str, tensor: str) -> str:
    """Return the class of a difference: the one that it has, else by the tensor's name, else the check's own."""
    if kind != UNNAMED:
        return kind
    for pattern, found in _NAMES:
        if re.search(pattern, tensor):
            return found
    return CHECKS[check].difference_kind if check in CHECKS else check
