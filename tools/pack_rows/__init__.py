"""Packs chat JSONL into the rows that Megatron-LM splits and tokenizes; what it cannot hold is refused by name."""

from tools.pack_rows.cli import main
from tools.pack_rows.packing import Packing, PackSettings, pack_files

__all__ = ["PackSettings", "Packing", "main", "pack_files"]
