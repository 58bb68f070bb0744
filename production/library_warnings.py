"""Keep from the terminal what libraries print at every start and no user can fix: absent kernels, forks beside idle threads.

Everything that silences a warning is here. Call `quiet_process` before the libraries are imported.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


def quiet_process() -> None:
    """Silence megatron-core's notes on absent kernels and torch's notes on its own callers, for the whole process."""
    warnings.filterwarnings("ignore", module=r"(megatron|apex|transformer_engine)\b.*")
    warnings.filterwarnings("ignore", module=r"torch\b.*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Context manager that silences all warnings: megatron-core says on import that CUDA and optional kernels are absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def quiet_fork() -> Iterator[None]:
    """Context manager that silences Python's warning of a fork beside threads; those of torch and the tokenizers' library are idle."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        yield
