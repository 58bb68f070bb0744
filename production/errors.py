"""Define the errors that a user can meet: each says what is wrong, where, and how to fix it, and keeps the three parts for machines."""

import sys
from typing import Any


class _Kind(type):
    """Lets errors be called with their fields by name, or with one text, as code does that raises an error again in its own class."""

    def __call__(cls, *text: str, **fields: Any) -> Any:
        if len(text) != 1 or fields:
            return super().__call__(*text, **fields)
        # megatron-core's build_module and torch's loader say `type(error)(f"{error} …")`: the fields are those of the error at hand.
        kind: Any = cls  # of exceptions, which a type checker does not see
        now = sys.exception()
        is_again = isinstance(now, kind) and str(now) in text[0]
        fields = dict(vars(now)) if is_again else {"what": text[0], "where": "", "fix": ""}
        return _rebuild(kind, text[0], fields)


class PackproofError(ValueError, metaclass=_Kind):
    """Base of every error that a user can fix; its `str()` has all three fields on one line.

    An error that is raised again as `type(error)(text)` while it is handled, as megatron-core does, has the new text and keeps its fields.
    """

    what: str
    """Fault."""
    where: str
    """Place of the fault: file and line, row, setting or rank."""
    fix: str
    """Way to fix it."""

    def __init__(self, *, what: str, where: str, fix: str) -> None:
        super().__init__(f"{where}: {what}. To fix it: {fix}")
        self.what = what
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException would call the class with the one message, which keyword-only fields refuse: workers send errors.
        return _rebuild, (type(self), str(self), self.__dict__.copy())


class BadInput(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A file that cannot be read as packed rows (SPEC R-FILE); nothing of the row is used."""

    kind: str
    """One word for the fault, of SPEC R-FILE."""
    file: str
    """The path as the user wrote it."""
    line: int | None
    byte: int | None

    def __init__(
        self, *, kind: str, what: str, fix: str, file: str, line: int | None = None, byte: int | None = None
    ) -> None:
        where = file if line is None else f"{file}, line {line}"
        super().__init__(what=what, where=where if byte is None else f"{where}, byte {byte}", fix=fix)
        self.kind = kind
        self.file = file
        self.line = line
        """1-based; None where the file as a whole is at fault."""
        self.byte = byte
        """0-based offset of the fault in the file, decompressed where it is compressed."""


class RowRefused(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A row that can be read but must not be trained on, such as one with an empty assistant turn."""

    kind: str
    """One word for the fault, of docs/SPEC.md#refusals."""
    conversation: int | None
    turn: int | None

    def __init__(
        self, *, kind: str, what: str, where: str, fix: str, conversation: int | None = None, turn: int | None = None
    ) -> None:
        super().__init__(what=what, where=where, fix=fix)
        self.kind = kind
        self.conversation = conversation
        """0-based conversation within the row."""
        self.turn = turn
        """0-based message within the conversation."""


class BatchRefused(PackproofError):  # noqa: N818 - reads as the verdict it is
    """Rows that cannot form one batch, refused on the host before any copy to a device."""

    kind: str
    """One word for the fault, of R-GUARD-1."""
    row: int | None

    def __init__(self, *, kind: str, what: str, where: str, fix: str, row: int | None = None) -> None:
        super().__init__(what=what, where=where, fix=fix)
        self.kind = kind
        self.row = row
        """0-based row within the batch."""


def _rebuild(kind: Any, message: str, fields: dict[str, Any]) -> Any:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(fields)
    return error
