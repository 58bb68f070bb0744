"""Silence what libraries print at every start and no user can fix; import this module before the libraries."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Silence megatron-core's notes on absent kernels and torch's notes on its own callers, for the whole process."""
    warnings.filterwarnings("ignore", module=r"(megatron|apex|transformer_engine)\b.*")
    warnings.filterwarnings("ignore", module=r"torch\b.*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
