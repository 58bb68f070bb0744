"""Sides with one fault each, for the tests of the command line."""

import dataclasses
import os

from equivalence.subjects import Row, load

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
