"""Pack chat JSONL into the rows that Megatron-LM splits and tokenizes, and refuse by name what a row cannot hold."""

from tools.pack_rows.cli import main
from tools.pack_rows.packing import Packing, PackSettings, pack_files

__all__ = ["PackSettings", "Packing", "main", "pack_files"]
