"""NeMo-RL's rows as a subject, by the name `nemo_rl`: the checkout that was added, in a process of its own."""

from __future__ import annotations

from equivalence.subjects.external.subject import ExternalSubject
from equivalence.witnesses.nemo_rl import checkout
from equivalence.witnesses.nemo_rl.stand_ins import stand_ins


class NemoRL(ExternalSubject):
    """The rows of the direct path, under the semantics `nemo-rl-direct`."""

    def __init__(self) -> None:
        """Start the checkout's process. InputError where there is no checkout, or one without the direct path."""
        self._checkout = checkout.needed()
        self._checkout.require("rows")
        super().__init__(self._checkout.command)

    @property
    def version(self) -> str:
        """The checkout with its commit, and the version of transformers that tokenizes for it."""
        return f"{self._checkout.text}; {super().version}"

    def stand_ins(self) -> list[str]:
        """Return what is not NeMo-RL as it comes."""
        return stand_ins()
