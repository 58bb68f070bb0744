"""Sides with one fault each, for the tests of the command line."""

import dataclasses
import os

from equivalence.subjects import ROW_TENSORS, Row, load

REFERENCE = load("reference")


class _Like:
    """The reference, under another name."""

    name = "wrong"

    def build_row(self, messages, tokenizer, settings):
        return self.change(REFERENCE.build_row(messages, tokenizer, settings))

    def collate(self, rows, settings):
        return REFERENCE.collate(rows, settings)

    def change(self, row: Row) -> Row:
        return row


class TrainsBoundaryPadding(_Like):
    """Masks the label at each inner boundary as if it were padding."""

    def change(self, row):
        if row.refusal or len(row.cu_seqlens) < 3:
            return row
        mask = row.token_mask.clone()
        for boundary in row.cu_seqlens.tolist()[1:-1]:
            mask[boundary - 1] = 0
        return dataclasses.replace(row, token_mask=mask)


class Raises(_Like):
    """Cannot take an empty row."""

    def build_row(self, messages, tokenizer, settings):
        if len(messages) > 12:
            raise RuntimeError("thirteen is too many")
        return REFERENCE.build_row(messages, tokenizer, settings)


class Remembers(_Like):
    """Gives every row of as many messages the mask of the first one that it met."""

    def __init__(self):
        self.met = {}

    def build_row(self, messages, tokenizer, settings):
        row = REFERENCE.build_row(messages, tokenizer, settings)
        if row.refusal:
            return row
        mask = self.met.setdefault((len(messages), len(row.token_mask)), row.token_mask)
        return dataclasses.replace(row, token_mask=mask)


class OneFormat(_Like):
    """Takes one format, says so, and returns a dict of tensors."""

    prompt_formats = ("nemotron-h-aligned",)

    def build_row(self, messages, tokenizer, settings):
        if settings.prompt_format not in self.prompt_formats:
            raise RuntimeError("asked for another format")
        row = REFERENCE.build_row(messages, tokenizer, settings)
        if row.refusal:
            return {"refusal": row.refusal.kind}
        return {name: getattr(row, name) for name in ROW_TENSORS}

    def collate(self, rows, settings):
        batch = REFERENCE.collate(rows, settings)
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


class Halved(OneFormat):
    """A dict without the labels, and with a name that is not the protocol's."""

    def build_row(self, messages, tokenizer, settings):
        row = super().build_row(messages, tokenizer, settings)
        if "target_ids" in row:
            row["labels"] = row.pop("target_ids")
        return row


class Dies(_Like):
    """Takes its process with it."""

    def change(self, row):
        os._exit(9 if row else 8)


class Interrupted(_Like):
    """As if Ctrl-C had been pressed in the third row."""

    seen = 0

    def build_row(self, messages, tokenizer, settings):
        self.seen += 1
        if self.seen > 30:
            raise KeyboardInterrupt
        return REFERENCE.build_row(messages, tokenizer, settings)


class Witness:
    """A witness whose library is broken."""

    def __init__(self):
        raise ImportError("libwitness.so: cannot open shared object file")
