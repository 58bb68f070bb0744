"""List every fault of a packed file: one kind each, with the fix; kinds are part of the interface."""

from production.errors import BadInput

FIXES = {
    # bytes
    "bom": "save the file as UTF-8 without a byte order mark",
    "nul_byte": "write the file again: a copy or a crash left zeros in it",
    "invalid_utf8": "write the file again as UTF-8; other encodings are not guessed",
    "blank_line": "remove the line; rows stand one a line, and an empty one would shift the row numbers of other readers",
    "line_too_long": "write one row a line; a file that is one JSON array is not JSONL",
    # JSON
    "truncated_last_line": "write the file again: the last row was cut while it was written or copied",
    "invalid_json": "write the row with a JSON encoder (NaN and Infinity are not JSON)",
    "number_out_of_range": "write the number as text, or within the range of a double or 4300 digits",
    "nested_too_deep": "flatten the value, or write it as text",
    "duplicate_key": "keep one of the two; readers disagree on which of them counts",
    "lone_surrogate": "write the character whole: half of a surrogate pair is not text and cannot be tokenized",
    # shape
    "row_not_object": "write each row as an object with a list of messages",
    "missing_chat_key": "write the messages under that key, or name the key they stand under (chat_key)",
    "row_not_list": "write the row's messages as a list",
    "empty_row": "drop the row, or write its messages",
    "message_not_object": 'write each message as {"role": ..., "content": ...}',
    "missing_role": "give the message its role",
    "role_not_text": "write the role as text",
    "missing_content": 'give the message its content ("" where it says nothing)',
    "content_null": 'write "" where the message says nothing; packed rows have no tool calls: render them into the text, or train the chat '
    "file on the online path (dataset_name: openai_format), whose template renders tool_calls beside a null content",
    "content_parts": "join the parts into one text; images and other parts are not trained on",
    "content_not_text": "write the content as text",
    # files
    "no_files": "name at least one file",
    "missing_file": "check the path",
    "not_a_file": "name a regular file; a folder's files must be named one by one, in order",
    "unreadable_file": "give this user leave to read it",
    "other_format": "write its rows as JSON lines, one row a line",
    "json_array": "write each row of the array on one line",
    "indented_json": "write each row on one line",
    "empty_file": "write the rows again, or leave the file out",
    "no_rows_left": "fix the file, or leave it out",
    "file_changed": "open the source again once nobody writes to the file any more; the rows may have moved",
    "truncated_compressed": "copy or compress the file again: its end is missing",
    "corrupt_compressed": "copy or compress the file again",
    "no_space": "free some disk, or name a folder with room (cache_folder)",
    "no_cache_folder": "name a folder that can be written to (cache_folder)",
}


class LineError(ValueError):
    """A fault within one line, not yet placed in a file."""

    def __init__(self, kind: str, offset: int, what: str, *, at_end: bool = False, fix: str | None = None) -> None:
        super().__init__(what)
        self.kind = kind
        self.offset = offset
        """0-based byte within the line."""
        self.what = what
        self.fix = FIXES[kind] if fix is None else fix
        """Fix for the fault."""
        self.at_end = at_end
        """Whether the only fault is that the line ends too early."""


def bad_line(fault: LineError, *, file: str, line: int, start: int) -> BadInput:
    """Place a line's fault: `line` is 1-based, `start` the byte at which the line begins."""
    return BadInput(kind=fault.kind, what=fault.what, fix=fault.fix, file=file, line=line, byte=start + fault.offset)


def bad_file(kind: str, what: str, *, file: str, line: int | None = None, byte: int | None = None) -> BadInput:
    """Return a fault of the file as a whole."""
    return BadInput(kind=kind, what=what, fix=FIXES[kind], file=file, line=line, byte=byte)
