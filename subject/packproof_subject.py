"""Serve a packing function to packproof: the adapter's side of the protocol of docs/protocol.md.

This file needs Python 3.8 and the standard library only. Copy the file beside your adapter, or install `packproof-subject`.
"""

from __future__ import annotations

__version__ = "0.1.0"

PROTOCOL = 1
"""Version of the protocol: both sides must have the same one."""

CONVENTIONS = {
    "shift": ("model", "data"),
    "last_token": ("kept", "dropped"),
    "tail": ("joins", "own", "each", "none"),
    "pad_label": ("pad", "ignore"),
    "pad_positions": ("continue", "restart", "zero"),
    "overlong": ("cut", "drop", "split", "refuse"),
    "row_length": ("P", "P+1", "multiple", "ragged"),
    "order": ("kept", "sorted"),
}
"""Conventions that a `pack` subject may declare, each with its values."""
