"""End every command line alike: with an exit status that has a meaning, whatever the terminal can show."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TextIO

CANNOT_RUN = 2
"""Bad input, or a fault of the tool's own: never to be taken for "the sides differ"."""
PIPE_CLOSED = 141
"""Whoever read the output went away, as a shell reports it."""


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """Call `main`; a fault of its own is CANNOT_RUN with its traceback, a closed pipe PIPE_CLOSED.

    Characters that the terminal's encoding lacks are written escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        _escape_what_it_lacks(stream)
    try:
        status = main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end: give it somewhere to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except SystemExit as stopped:
        if isinstance(stopped.__context__, BrokenPipeError):  # rich's own way out, with status 1
            return PIPE_CLOSED
        raise
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"the output cannot be written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT_RUN
    except UnicodeEncodeError as error:
        name = ascii(error.object[max(0, error.start - 40) : error.end + 40])
        print(f"{name} cannot be written as UTF-8: give another name or text", file=sys.stderr)
        return CANNOT_RUN
    except MemoryError as error:
        print(f"there is not enough memory{f' ({error})' if str(error) else ''}: give smaller numbers", file=sys.stderr)
        return CANNOT_RUN
    except Exception:  # noqa: BLE001 - whatever it is, it is no result
        traceback.print_exc()
        return CANNOT_RUN
    return status


def _escape_what_it_lacks(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
