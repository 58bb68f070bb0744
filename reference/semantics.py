"""The behaviours that differ between published paths, as one frozen value with named presets (docs/SPEC.md#presets)."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """One choice for each behaviour that differs. The defaults are Megatron-LM 0.19."""

    identity_prompt: Literal["trained", "masked"] = "trained"
    """Whether `identity` trains the prompt or masks it like the Nemotron formats (R-TARGET-1)."""
    boundary_label: Literal["next", "ignore"] = "next"
    """The label at an inner boundary: the next conversation's first target, or -100 (R-BOUNDARY-1)."""
    padding_mask: Literal["by_value", "by_position"] = "by_value"
    """Padding to mask: every target equal to the pad id, or only positions where padding was put (R-MASK-1)."""
    empty_conversation: Literal["keep", "refuse"] = "keep"
    """A conversation of zero tokens makes an empty segment, or is refused (R-EMPTY-1)."""
    boundaries_beyond_pack_length: Literal["refuse", "stop", "keep"] = "refuse"
    """More than P + 1 boundaries are refused at the end, never begun, or kept (R-LAYOUT-5, R-LAYOUT-7)."""
    long_assistant_prefix: Literal["mask", "refuse"] = "mask"
    """A prefix longer than its turn masks what is there, or is refused (R-TURN-3)."""
    turn_rules: Literal["masked_formats", "no_wrap", "every_format"] = "masked_formats"
    """Formats in which roles, order and emptiness are checked, and the strictness (R-TURN-2)."""
    row_ends: Literal["any", "system_to_assistant"] = "any"
    """Whether a row must start with a system and end with an assistant message (R-ENDS-1)."""
    turn_check: Literal["relative", "exact"] = "relative"
    """Comparison of a turn's own tokens with the whole conversation's (R-TURN-1)."""
    exact_fill: Literal["continue", "stop"] = "continue"
    """Whether a full row still takes the next conversation, and cuts it to nothing (R-LAYOUT-4)."""
    indivisible_segment: Literal["keep", "refuse"] = "keep"
    """A segment that 2·cp does not divide (R-LAYOUT-7)."""
    default_format: Literal["supported", "refuse"] = "supported"
    """Whether the format `default` is there at all (R-FORMAT-1)."""
    lost_conversations: Literal["allow", "refuse"] = "allow"
    """Whether a row may lose conversations, or part of one (R-LAYOUT-7)."""
    unknown_pad_token: Literal["unk", "unk_early", "refuse"] = "unk"
    """A pad token that the vocabulary lacks is the unknown id, or refused; `unk_early` refuses before the conversations where there is
    no unknown id either, `unk` after them (R-PAD-1)."""

    null_content: Literal["nothing", "text"] = "nothing"
    """`identity` renders a null content as nothing, or as the text `None` (R-RENDER-3)."""

    def __post_init__(self) -> None:
        """Refuse a value that its field does not know."""
        for name, choices in _choices().items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"Semantics: {name} cannot be {value!r}; choose one of {', '.join(choices)}")


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return the values of each field."""
    return {name: get_args(hint) for name, hint in get_type_hints(Semantics).items()}


PRESETS = {
    "megatron-lm-0.19": Semantics(),
    "megatron-lm-main": Semantics(identity_prompt="masked"),
    "megatron-lm-0.18": Semantics(boundaries_beyond_pack_length="keep"),
    "megatron-lm-0.17": Semantics(identity_prompt="masked", boundaries_beyond_pack_length="keep", null_content="text"),
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


def semantics(name: str) -> Semantics:
    """Return the semantics of a name: `preset` or `preset,field=value,…`. Raises ValueError for any other name."""
    preset, *overrides = name.split(",")
    if preset not in PRESETS:
        raise ValueError(f"no preset is called {preset!r}; choose one of {', '.join(PRESETS)}")
    changes: dict[str, str] = {}
    for override in overrides:
        field, _, choice = override.partition("=")
        if field not in _choices():
            raise ValueError(f"Semantics has no field {field!r}; its fields are {', '.join(_choices())}")
        if field in changes:
            raise ValueError(f"Semantics: {field} is set twice in {name!r}; set it once")
        changes[field] = choice
    return dataclasses.replace(PRESETS[preset], **changes)  # type: ignore[arg-type]  # __post_init__ checks them
