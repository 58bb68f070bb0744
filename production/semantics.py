"""Choose among behaviors in which published paths differ (docs/SPEC.md#presets): one frozen value, chosen by name and never by accident."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from production.errors import PackproofError

DEFAULT_PRESET = "megatron-lm-0.19"


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """The behaviours that differ between presets. The defaults are those of `megatron-lm-0.19`; an unknown value is an error."""

    identity_prompt: Literal["trained", "masked"] = "trained"
    """Whether the format identity trains on system, user and tool turns."""
    boundary_label: Literal["next", "ignore"] = "next"
    """The label at an inner boundary: the next conversation's first target, or -100 (R-BOUNDARY-1)."""
    padding_mask: Literal["by_value", "by_position"] = "by_value"
    """Whether padding is known by its id, also where that is content, or by where it was put (R-MASK-1)."""
    empty_conversation: Literal["keep", "refuse"] = "keep"
    """A conversation of zero tokens (R-EMPTY-1)."""
    boundaries_beyond_pack_length: Literal["refuse", "stop", "keep"] = "refuse"
    """More than P + 1 entries of cu (R-LAYOUT-5, R-LAYOUT-7)."""
    long_assistant_prefix: Literal["mask", "refuse"] = "mask"
    """An assistant prefix that is longer than its turn (R-TURN-3)."""
    turn_rules: Literal["masked_formats", "no_wrap", "every_format"] = "masked_formats"
    """Formats in which roles, empty answers and order are checked, and whether a first assistant turn wraps (R-TURN-2)."""
    row_ends: Literal["any", "system_to_assistant"] = "any"
    """Required first and last role of a row (R-ENDS-1)."""
    turn_check: Literal["relative", "exact"] = "relative"
    """Comparison of a turn's own tokens with the conversation's (R-TURN-1e)."""
    exact_fill: Literal["continue", "stop"] = "continue"
    """Whether a conversation is begun on a row that is exactly full (R-LAYOUT-4)."""
    indivisible_segment: Literal["keep", "refuse"] = "keep"
    """A segment whose length 2·cp does not divide (R-LAYOUT-7)."""
    default_format: Literal["supported", "refuse"] = "supported"
    """Whether the tokenizer's own chat template may be used (R-FORMAT-1)."""
    lost_conversations: Literal["allow", "refuse"] = "allow"
    """Whether a row may lose what does not fit (R-LAYOUT-7)."""
    unknown_pad_token: Literal["unk", "unk_early", "refuse"] = "unk"
    """Handling of a pad token outside the vocabulary: the unknown id, or a refusal. Without an unknown id the row is refused after its
    conversations (`unk`) or before them (`unk_early`) (R-PAD-1)."""

    null_content: Literal["nothing", "text"] = "nothing"
    """Text of a null content in the format identity: nothing, or `None` (R-RENDER-3)."""

    def __post_init__(self) -> None:
        """Refuse values that no field has."""
        for name, value in dataclasses.asdict(self).items():
            if value not in CHOICES[name]:
                raise PackproofError(
                    what=f"must be one of {', '.join(CHOICES[name])}, got {value!r}; the nearest is {nearest(value, CHOICES[name])!r}",
                    where=f"semantics field {name}",
                    fix=f"choose one of {', '.join(CHOICES[name])}",
                )


def parse(text: str) -> Semantics:
    """Return the semantics of a name, `preset` or `preset,field=value,…`. Raises PackproofError with the nearest valid name."""
    preset, *overrides = text.split(",")
    if preset not in PRESETS:
        raise PackproofError(
            what=f"must begin with a preset, got {preset!r}; the nearest is {nearest(preset, PRESETS)!r}",
            where=f"semantics {text!r}",
            fix=f"begin with one of {', '.join(PRESETS)}, then write field=value for each field that differs",
        )
    changes: dict[str, str] = {}
    for override in overrides:
        field, equals, value = override.partition("=")
        if not equals or field not in CHOICES:
            raise PackproofError(
                what=f"an override must set a field, got {override!r}; the nearest is {nearest(field, CHOICES)!r}",
                where=f"semantics {text!r}",
                fix=f"write field=value, the field one of {', '.join(CHOICES)}",
            )
        if field in changes:
            raise PackproofError(
                what=f"{field} must be set once, got two values", where=f"semantics {text!r}", fix="set it once"
            )
        changes[field] = value
    return dataclasses.replace(PRESETS[preset], **changes)  # type: ignore[arg-type]  # __post_init__ checks the values


def nearest(name: object, names: Iterable[str]) -> str:
    """Return the valid name that is most similar to `name`."""
    names = list(names)
    return next(iter(difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.0)), names[0])


CHOICES: dict[str, tuple[str, ...]] = {
    name: typing.get_args(hint) for name, hint in typing.get_type_hints(Semantics).items()
}
"""Every field and its values."""

_MEGATRON_LM = Semantics()

PRESETS: dict[str, Semantics] = {
    DEFAULT_PRESET: _MEGATRON_LM,
    "megatron-lm-main": dataclasses.replace(_MEGATRON_LM, identity_prompt="masked"),
    "megatron-lm-0.18": dataclasses.replace(_MEGATRON_LM, boundaries_beyond_pack_length="keep"),
    "megatron-lm-0.17": dataclasses.replace(
        _MEGATRON_LM, identity_prompt="masked", boundaries_beyond_pack_length="keep", null_content="text"
    ),
    "nemo-rl-direct": Semantics(
        boundary_label="ignore",
        empty_conversation="refuse",
        boundaries_beyond_pack_length="stop",
        long_assistant_prefix="refuse",
        turn_rules="no_wrap",
        row_ends="system_to_assistant",
        turn_check="exact",
        exact_fill="stop",
        indivisible_segment="refuse",
        default_format="refuse",
        unknown_pad_token="unk_early",
    ),
    "strict": Semantics(
        identity_prompt="masked",
        boundary_label="ignore",
        padding_mask="by_position",
        empty_conversation="refuse",
        boundaries_beyond_pack_length="stop",
        long_assistant_prefix="refuse",
        turn_rules="every_format",
        row_ends="system_to_assistant",
        turn_check="exact",
        exact_fill="stop",
        indivisible_segment="refuse",
        unknown_pad_token="refuse",
    ),
}
"""The published combinations, by name (the table of docs/SPEC.md#presets)."""
