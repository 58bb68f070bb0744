"""Serve NeMo-RL's rows: `python -m equivalence.witnesses.nemo_rl.serve ROOT`, started by the subject `nemo_rl`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from equivalence.subjects import tokenizers
from equivalence.subjects.protocol import ROW_TENSORS, RowSettings
from equivalence.witnesses.nemo_rl.checkout import NAME
from equivalence.witnesses.nemo_rl.rows import FORMATS, PRESET, Rows
from equivalence.witnesses.nemo_rl.stand_ins import checkout_modules
from packproof_subject import Refused, serve


def main(argv: Sequence[str] | None = None) -> None:
    """Answer until the other side closes stdin."""
    (root,) = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with checkout_modules(Path(root)) as modules:
        rows = Rows(modules)

        def build_row(messages: Any, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
            row = rows.build_row(messages, tokenizers.load_folder(Path(folder)), RowSettings(**settings))
            if row.refusal is not None:
                raise Refused(row.refusal.kind, row.refusal.message)
            return {name: getattr(row, name) for name in ROW_TENSORS}

        serve(
            build_row=build_row,
            name=NAME,
            version=f"checkout {root}, transformers {transformers.__version__}",
            semantics=[PRESET],
            prompt_formats=FORMATS,
        )


if __name__ == "__main__":
    main()
