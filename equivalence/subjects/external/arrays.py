"""Turn the arrays of a frame into tensors, with the dtypes that the subject gave them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from equivalence.subjects.external.process import SubjectFailed
from equivalence.subjects.protocol import typed
from packproof_subject import ALIGNMENT, DTYPES


def read_fields(parts: list[Mapping[str, Any]], body: bytearray) -> list[dict[str, Any]]:
    """Return the fields of each part of an answer: numbers and texts as they are, arrays as tensors.

    A list has no dtype of its own: it gets that of its field. Raises SubjectFailed for arrays that the body does not hold.
    """
    found, start = [], 0
    try:
        for part in parts:
            fields = dict(part["values"])
            for array in part["arrays"]:
                fields[array["name"]], start = _read(array, body, start)
            found.append(fields)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SubjectFailed(
            f"gave an answer whose arrays cannot be read: {error!r}; docs/protocol.md describes them"
        ) from error
    return found


def _read(array: Mapping[str, Any], body: bytearray, start: int) -> tuple[Any, int]:
    if array["dtype"] not in DTYPES:
        raise ValueError(f"{array['name']} has dtype {array['dtype']!r}")
    dtype: torch.dtype = getattr(torch, array["dtype"])
    shape = [int(size) for size in array["shape"]]
    count = math.prod(shape)
    end = start + count * dtype.itemsize
    if min([0, *shape]) < 0 or end > len(body):
        raise ValueError(f"{array['name']} of shape {shape} reaches beyond the frame")
    if count == 0:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(body, dtype=dtype, count=count, offset=start).reshape(shape)
    if array.get("list"):
        tensor = typed(array["name"], tensor)
    return tensor, end + -end % ALIGNMENT


def packed_conversations(conversations: list[Mapping[str, Any]]) -> tuple[list[int], Iterator[bytes]]:
    """Return the lengths of conversations, and the bytes of their tokens (int64) and of their trained flags (one byte each)."""
    lengths = [len(each["tokens"]) for each in conversations]
    tokens = torch.tensor([token for each in conversations for token in each["tokens"]], dtype=torch.int64)
    trained = torch.tensor([bool(flag) for each in conversations for flag in each["trained"]], dtype=torch.uint8)
    return lengths, iter((tokens.numpy().tobytes(), trained.numpy().tobytes()))
