"""What libraries print at every start and nobody can mend, kept from the terminal; imports no library, to come before them."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """megatron-core says a dozen times that optional kernels are absent, torch that its own callers are old; for the whole process."""
    warnings.filterwarnings("ignore", module=r"(megatron|apex|transformer_engine)\b.*")
    warnings.filterwarnings("ignore", module=r"torch\b.*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
