"""Turn the arrays of a frame into tensors, with the dtypes that the subject gave them."""

from __future__ import annotations

import array
import math
from collections.abc import Mapping, Sequence
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
            for described in part["arrays"]:
                fields[described["name"]], start = _read(described, body, start)
            found.append(fields)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SubjectFailed(
            f"gave an answer whose arrays cannot be read: {error!r}; docs/protocol.md describes them"
        ) from error
    return found


def _read(described: Mapping[str, Any], body: bytearray, start: int) -> tuple[Any, int]:
    if described["dtype"] not in DTYPES:
        raise ValueError(f"{described['name']} must have a dtype of the protocol, got {described['dtype']!r}")
    dtype: torch.dtype = getattr(torch, described["dtype"])
    shape = [int(size) for size in described["shape"]]
    count = math.prod(shape)
    end = start + count * dtype.itemsize
    if min([0, *shape]) < 0 or end > len(body):
        raise ValueError(f"{described['name']} of shape {shape} reaches beyond the frame")
    if count == 0:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(body, dtype=dtype, count=count, offset=start)
        if len(shape) != 1:
            tensor = tensor.reshape(shape)
    if described.get("list"):
        tensor = typed(described["name"], tensor)
    return tensor, end + -end % ALIGNMENT


def packed_conversations(conversations: Sequence[Mapping[str, Any]]) -> tuple[list[int], bytes]:
    """Return the lengths of conversations, and the body that holds the tokens of all (int64), then a byte for each trained flag.

    ValueError names a conversation whose flags are more or fewer than its tokens.
    """
    for number, each in enumerate(conversations):
        if len(each["tokens"]) != len(each["trained"]):
            raise ValueError(
                f"conversation {number} has {len(each['tokens'])} tokens and {len(each['trained'])} trained flags: give as many of both"
            )
    tokens = array.array("q", (token for each in conversations for token in each["tokens"]))
    trained = bytes(bool(flag) for each in conversations for flag in each["trained"])
    return [len(each["tokens"]) for each in conversations], tokens.tobytes() + trained
