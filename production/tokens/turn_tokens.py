"""Check the turns of a conversation and decide which of its tokens train, one conversation at a time.

Conversations in which nothing is odd, nearly all, take the vectorised way in `conversations`; this module decides the
others.

Reference: `reference/prompts.py`, docs/SPEC.md#targets-and-turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from production.refusals import refusal
from production.semantics import Semantics
from production.tokens.prompts import TURN_ROLES, Conversation, RowMessages

IGNORE_INDEX = -100

_ANSWER, _PRECEDES = 1, 2
_CODES = {"system": 0, "assistant": _ANSWER, "user": _PRECEDES, "tool": _PRECEDES}


class TurnRules:
    """Applies R-TURN-1 to 3 and R-EMPTY-1 under one choice of semantics."""

    def __init__(self, *, semantics: Semantics, is_masked: bool, assistant_prefix_len: int) -> None:
        self._semantics = semantics
        self._is_masked = is_masked
        self._prefix = assistant_prefix_len

    def find_prompts(self, row: RowMessages, first: int, last: int) -> NDArray[np.bool_] | None:
        """Return which messages of conversations first to last are prompts; None where a role or an answer is odd.

        Odd is a turn that R-TURN-1, 1 to 4, or R-TURN-2 might refuse, and a role that is not in lower case: `targets`
        decides.
        """
        bounds = np.array(row.bounds[first : last + 1]) - row.bounds[first]
        roles = row.roles[row.bounds[first] : row.bounds[last]]
        try:
            codes = np.fromiter(map(_CODES.__getitem__, roles), dtype=np.int8, count=len(roles))
        except (KeyError, TypeError):  # another role, or one that is a list or an object
            return None
        is_answer = codes == _ANSWER
        may_precede = codes == _PRECEDES
        follows = np.empty_like(may_precede)
        follows[1:] = may_precede[:-1]
        wraps = self._semantics.turn_rules == "masked_formats"
        follows[bounds[:-1]] = may_precede[bounds[1:] - 1] if wraps else False
        if not follows[is_answer].all():
            return None
        messages = row.messages[row.bounds[first] : row.bounds[last]]
        answers = [message.get("content") for message, role in zip(messages, roles, strict=True) if role == "assistant"]
        return ~is_answer if all(answers) and set(map(type, answers)) <= {str} else None

    def targets(
        self,
        conversation: Conversation,
        number: int,
        tokens: NDArray[np.int64],
        turns: Sequence[NDArray[np.int64]] | None,
    ) -> NDArray[np.int64]:
        """Return the targets of a conversation, turn by turn (R-TARGET-1), or RowRefused for the first fault.

        `tokens` are those of the whole conversation, `turns` those of each turn alone in a masked format, else None.
        `number` is the conversation's place in the row.
        """
        targets = tokens.copy()
        checks_roles = self._is_masked or self._semantics.turn_rules == "every_format"
        done = 0
        for turn in range(len(conversation) if checks_roles else 0):
            self._check_roles_and_content(conversation, number, turn)
            if turns is None:
                continue
            alone = turns[turn]
            if conversation[turn]["role"].lower() == "assistant":
                if len(alone) < self._prefix and self._semantics.long_assistant_prefix == "refuse":
                    what = f"an assistant turn of {len(alone)} tokens and a prefix of {self._prefix}"
                    raise refusal("prefix_too_long", what, conversation=number, turn=turn)
                targets[done : done + self._prefix] = IGNORE_INDEX
            else:
                targets[done : done + len(alone)] = IGNORE_INDEX
            if not self._equal(tokens[done : done + len(alone)], alone):
                what = f"encoded alone the turn is other tokens than from token {done} of its conversation"
                raise refusal("turn_mismatch", what, conversation=number, turn=turn)
            done += len(alone)
        if turns is not None and done != len(tokens):
            what = f"its turns have {done} tokens when encoded alone and {len(tokens)} together"
            raise refusal("turn_mismatch", what, conversation=number)
        self.check_empty(len(tokens), number)
        return targets

    def check_empty(self, length: int, number: int) -> None:
        """Refuse a conversation of no token, where that is asked for (R-EMPTY-1)."""
        if length == 0 and self._semantics.empty_conversation == "refuse":
            raise refusal("empty_conversation", "the conversation has no token", conversation=number)

    def _check_roles_and_content(self, conversation: Conversation, number: int, turn: int) -> None:
        """Apply checks 1 to 4 of R-TURN-1, in the order of R-TURN-2."""
        message = conversation[turn]
        role = message["role"]
        rules = self._semantics.turn_rules
        if not isinstance(role, str):
            raise refusal(
                "bad_message", f"the role must be text, got a {type(role).__name__}", conversation=number, turn=turn
            )
        if rules == "every_format" and role not in TURN_ROLES:
            raise refusal(
                "unknown_role",
                f"the role must be one of {', '.join(sorted(TURN_ROLES))}, got {role!r}",
                conversation=number,
                turn=turn,
            )
        if role.lower() == "assistant":
            try:
                length = len(message["content"])
            except (KeyError, TypeError):
                what = "an assistant message whose content is missing or has no length"
                raise refusal("bad_content", what, conversation=number, turn=turn) from None
            if length == 0:
                raise refusal(
                    "empty_assistant", "an assistant message must have content", conversation=number, turn=turn
                )
            if turn == 0 and rules != "masked_formats":
                raise refusal(
                    "role_order",
                    "the conversation must not begin with an assistant turn",
                    conversation=number,
                    turn=turn,
                )
            before = conversation[turn - 1]["role"]  # of the first turn, the last
            if not isinstance(before, str):
                what = f"the turn before this one has a role that is a {type(before).__name__}"
                raise refusal("bad_message", what, conversation=number, turn=turn)
            if before.lower() not in {"user", "tool"}:
                what = f"an assistant turn must follow a user or tool turn, got {before!r}"
                raise refusal("role_order", what, conversation=number, turn=turn)
        if role.lower() not in TURN_ROLES:
            raise refusal(
                "unknown_role",
                f"the role must be one of {', '.join(sorted(TURN_ROLES))}, got {role!r}",
                conversation=number,
                turn=turn,
            )

    def _equal(self, whole: NDArray[np.int64], alone: NDArray[np.int64]) -> bool:
        """Apply R-TURN-1e."""
        if self._semantics.turn_check == "exact":
            return np.array_equal(whole, alone)
        if len(whole) != len(alone) and 1 not in (len(whole), len(alone)):
            return False
        return bool(np.all(np.abs(whole - alone) <= 1e-8 + 1e-5 * alone))
