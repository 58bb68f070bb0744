"""Encode a built row, or its refusal, as the bytes of one cache record, and decode these bytes to equal bits.

A record is a header of msgpack behind its length, then the arrays, each at a multiple of 64 bytes. Ids are stored as int32 where they
fit and the mask as one byte a token, so that a record is about half of the row's memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from production.errors import RowRefused
from production.rows.builder import Row

VERSION = 1
"""Version of the record's form; a part of every cache key."""
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")
_INT32 = np.iinfo(np.int32)


class DamagedRecord(ValueError):  # noqa: N818 - reads as the verdict it is
    """The bytes are no record of this version."""


class _Array(msgspec.Struct, frozen=True, array_like=True):
    name: str
    stored: str
    """dtype in the record, as numpy writes it."""
    dtype: str
    """dtype of the row's tensor."""
    length: int
    """Elements."""


class _RowHeader(msgspec.Struct, frozen=True, tag="row"):
    arrays: list[_Array]
    max_seqlen: int
    context_parallel_size: int
    report: dict[str, int | None]


class _RefusalHeader(msgspec.Struct, frozen=True, tag="refusal"):
    kind: str
    what: str
    where: str
    fix: str
    conversation: int | None
    turn: int | None


_DECODER = msgspec.msgpack.Decoder(_RowHeader | _RefusalHeader)


def encode(row: Row | RowRefused) -> bytes:
    """Return the record of a row or of its refusal."""
    if isinstance(row, RowRefused):
        refusal = _RefusalHeader(row.kind, row.what, row.where, row.fix, row.conversation, row.turn)
        return _with_header(refusal, [])
    arrays = {name: getattr(row, name).numpy() for name in _TENSORS}
    stored = {name: _smaller(array) for name, array in arrays.items()}
    header = _RowHeader(
        arrays=[_Array(name, stored[name].dtype.str, arrays[name].dtype.str, len(arrays[name])) for name in _TENSORS],
        max_seqlen=row.max_seqlen,
        context_parallel_size=row.context_parallel_size,
        report=row.report,
    )
    return _with_header(header, list(stored.values()))


def decode(record: memoryview) -> Row | RowRefused:
    """Return the row or the refusal of a record; its tensors are new memory. Raises DamagedRecord."""
    try:
        (length,) = _LENGTH.unpack_from(record)
        header = _DECODER.decode(record[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, msgspec.DecodeError) as error:
        raise DamagedRecord(str(error)) from error
    if isinstance(header, _RefusalHeader):
        return RowRefused(
            kind=header.kind,
            what=header.what,
            where=header.where,
            fix=header.fix,
            conversation=header.conversation,
            turn=header.turn,
        )
    place, tensors = _LENGTH.size + length, {}
    for array in header.arrays:
        place += -place % _ALIGNMENT
        dtype = np.dtype(array.stored)
        end = place + array.length * dtype.itemsize
        if end > len(record):
            raise DamagedRecord(f"{array.name} ends at byte {end}, and the record has {len(record)} bytes")
        stored = np.frombuffer(record[place:end], dtype)
        tensors[array.name] = torch.from_numpy(stored.astype(np.dtype(array.dtype)))
        place = end
    if set(tensors) != set(_TENSORS):
        raise DamagedRecord(f"the record has {', '.join(tensors)}")
    return Row(
        **tensors,
        max_seqlen=header.max_seqlen,
        context_parallel_size=header.context_parallel_size,
        report=header.report,
    )


def _smaller(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array in the smallest dtype of the record that holds each value exactly."""
    fits: Callable[[npt.NDArray[Any]], bool]
    smaller: np.dtype[Any]
    if array.dtype == np.int64:
        smaller, fits = np.dtype(np.int32), lambda it: bool(it.min() >= _INT32.min and it.max() <= _INT32.max)
    elif array.dtype == np.float32:
        smaller, fits = np.dtype(np.uint8), lambda it: bool(((it == 0) & ~np.signbit(it) | (it == 1)).all())
    else:
        return array
    return array.astype(smaller) if not len(array) or fits(array) else array


def _with_header(header: _RowHeader | _RefusalHeader, arrays: list[npt.NDArray[Any]]) -> bytes:
    head = msgspec.msgpack.encode(header)
    record = bytearray(_LENGTH.pack(len(head)) + head)
    for array in arrays:
        record += bytes(-len(record) % _ALIGNMENT)
        record += np.ascontiguousarray(array).tobytes()
    return bytes(record)
