"""Serve your own packing code to packproof: the adapter's side of the protocol that docs/protocol.md describes.

This file needs Python 3.8 and the standard library. Copy the file beside your adapter, or install `packproof-subject`. An
adapter is a script that ends with one call:

    from packproof_subject import serve

    def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
        return [{"input_ids": ..., "labels": ..., "position_ids": ...}]

    serve(pack=pack, conventions={"shift": "model", "pad_label": "ignore"})

packproof starts the script (`--subjects reference,exec:"python my_adapter.py"`), and `serve` returns when packproof is done.
Arrays may be lists, numpy arrays or torch tensors. Whatever the script prints goes to stderr, so that printing is harmless.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import platform
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Mapping, Sequence

__all__ = ["CONVENTIONS", "PROTOCOL", "Refused", "check_conventions", "serve"]
__version__ = "0.1.0"

PROTOCOL = 1
"""Version of the protocol: both sides must have the same one."""

CONVENTIONS = {
    "shift": ("model", "data"),
    "last_token": ("kept", "dropped"),
    "tail": ("joins", "own", "each", "none"),
    "pad_label": ("pad", "ignore"),
    "pad_positions": ("continue", "restart", "zero"),
    "overlong": ("cut", "drop", "split", "refuse"),
    "row_length": ("P", "P+1", "multiple", "ragged"),
    "order": ("kept", "sorted"),
}
"""Conventions that a `pack` subject may declare, each with its values."""

MAGIC = b"\x93PKP"
"""Begins every frame."""
PREFIX = struct.Struct("<4sIQ")
"""MAGIC, bytes of the JSON header, bytes of the arrays."""
ALIGNMENT = 8
"""Every array begins at a multiple of this many bytes of the frame's body."""
DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
"""Names of the dtypes that an array may have."""

Header = Dict[str, Any]


class Refused(Exception):  # noqa: N818 - a refusal is a result, not an error
    """Raise this from `build_row` or `pack` to refuse an input. `kind` is one of those of packproof's SPEC (Refusals), or your own word."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message


def serve(
    build_row: Callable[..., Any] | None = None,
    pack: Callable[..., Any] | None = None,
    *,
    conventions: Mapping[str, str] | None = None,
    refusals: Mapping[str, str] | None = None,
    name: str | None = None,
    version: str | None = None,
    prompt_formats: Sequence[str] | None = None,
    context_parallel_sizes: Sequence[int] | None = None,
    semantics: Sequence[str] | None = None,
    row_seconds: float = 60.0,
) -> None:
    """Answer packproof's requests from stdin on stdout until packproof closes stdin.

    `build_row(messages, tokenizer_folder, settings)` returns a dict with input_ids, target_ids, token_mask, position_ids and
    cu_seqlens of one row; `settings` is a dict with pack_length, prompt_format, context_parallel_size, semantics, pad_token and
    assistant_prefix_len. `pack(conversations, pack_length, pad_id, eos_id, context_parallel_size)` returns a list of packs, each a
    dict with input_ids and labels, and where it has them mask, position_ids, cu_seqlens, cu_seqlens_padded, sources, shards and lost; a
    conversation is {"tokens": [...], "trained": [...]}. Give either function or both.

    `conventions` declares what the packs do otherwise than Megatron-LM by design (CONVENTIONS). `refusals` maps a part of the text
    "Type: message" of an exception to a kind of refusal of packproof's SPEC, so that the exception counts as a refusal of that kind; any other
    exception is told as a difference. `prompt_formats`, `context_parallel_sizes` and `semantics` say what the subject takes, where it
    does not take everything. packproof waits `row_seconds` for each answer.

    Raises ValueError for arguments that cannot be used.
    """
    if build_row is None and pack is None:
        raise ValueError("serve() needs build_row=FUNCTION, pack=FUNCTION or both")
    if not row_seconds > 0:
        raise ValueError(f"row_seconds must be more than 0, got {row_seconds!r}")
    if sys.byteorder != "little":
        raise ValueError("arrays cross the pipe as little-endian bytes; this machine is big-endian")
    requests, answers = _take_streams()
    seams = {name: function for name, function in (("build_row", build_row), ("pack", pack)) if function is not None}
    takes = {
        "prompt_formats": prompt_formats,
        "context_parallel_sizes": context_parallel_sizes,
        "semantics": semantics,
    }
    hello: Header = {
        "type": "hello",
        "protocol": PROTOCOL,
        "seams": sorted(seams),
        "name": name or Path(sys.argv[0] or "subject").stem,
        "version": version or "",
        "versions": _versions(),
        "conventions": check_conventions(conventions or {}),
        "takes": {key: [value] if isinstance(value, str) else list(value) for key, value in takes.items() if value},
        "row_seconds": float(row_seconds),
    }
    write_frame(answers, hello)
    while True:
        frame = read_frame(requests)
        if frame is None:
            return
        header, body = frame
        if header.get("type") == "build_row":
            _answer_rows(answers, seams["build_row"], header, refusals or {})
        elif header.get("type") == "pack":
            _answer_pack(answers, seams["pack"], header, body, refusals or {})
        else:
            raise ValueError(f"packproof asked for {header.get('type')!r}, which protocol {PROTOCOL} does not have")


def check_conventions(conventions: Mapping[str, str]) -> dict[str, str]:
    """Return declared conventions as a dict. Raises ValueError for a name or a value that CONVENTIONS does not have."""
    for key, value in conventions.items():
        if key not in CONVENTIONS:
            raise ValueError(f"there is no convention {key!r}; known are {', '.join(CONVENTIONS)}")
        if value not in CONVENTIONS[key]:
            raise ValueError(f"convention {key} must be one of {', '.join(CONVENTIONS[key])}, got {value!r}")
    return dict(conventions)


def write_frame(stream: Any, header: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
    """Write one frame. `buffers` are the bytes of the header's arrays, each already padded to ALIGNMENT."""
    stream.write(frame_bytes(header, buffers))
    stream.flush()


def frame_bytes(header: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> bytes:
    """Return one frame: prefix, JSON header, arrays."""
    text = json.dumps(header).encode("ascii")
    return b"".join([PREFIX.pack(MAGIC, len(text), sum(map(len, buffers))), text, *buffers])


def read_frame(stream: Any) -> tuple[Header, bytes] | None:
    """Return the header and body of the next frame, or None at the end of the stream. Raises ValueError for anything else."""
    prefix = stream.read(PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise ValueError(
            "stdin holds no frame of packproof's protocol: this script is started by packproof, not by hand"
        )
    _, of_header, of_body = PREFIX.unpack(prefix)
    header, body = stream.read(of_header), stream.read(of_body)
    if len(header) < of_header or len(body) < of_body:
        return None
    return json.loads(header), body


def encode(fields: Mapping[str, Any], prefix: str = "") -> tuple[Header, list[bytes]]:
    """Return {"values": …, "arrays": […]} and the arrays' bytes of a dict of arrays, numbers, texts and None.

    Raises TypeError for a field that is neither, and names it.
    """
    values: dict[str, Any] = {}
    arrays: list[Header] = []
    buffers: list[bytes] = []
    for key, value in fields.items():
        if value is None or isinstance(value, (bool, int, float, str, Mapping)) or _is_nested(str(key), value):
            values[prefix + str(key)] = _plain(value)
            continue
        dtype, shape, data, is_list = _as_bytes(str(key), value)
        arrays.append({"name": prefix + str(key), "dtype": dtype, "shape": shape, "list": is_list})
        buffers.append(data + b"\0" * (-len(data) % ALIGNMENT))
    return {"values": values, "arrays": arrays}, buffers


def _take_streams() -> tuple[Any, Any]:
    """Take stdin and stdout for the protocol. Whatever else writes to stdout, in C too, writes to stderr from here on."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()  # what was printed before and not written yet
    sys.stdout = sys.stderr
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def _versions() -> dict[str, str]:
    """Return versions of Python and of the libraries that are loaded and that a row may depend on."""
    names = ("torch", "numpy", "transformers", "tokenizers")
    loaded = {each: getattr(sys.modules.get(each), "__version__", None) for each in names}
    return dict({"python": platform.python_version()}, **{key: str(value) for key, value in loaded.items() if value})


def _answer_rows(stream: Any, function: Callable[..., Any], header: Header, refusals: Mapping[str, str]) -> None:
    """Answer a batch of rows, one frame a row, so that packproof knows at which row the subject ended or hung."""
    for row in header["rows"]:
        answer: Header = {"id": row["id"]}
        buffers: list[bytes] = []
        try:
            made = function(row["messages"], row["tokenizer"], dict(row["settings"]))
            encoded, buffers = encode(_mapping(made, "build_row", "input_ids, target_ids, token_mask, position_ids"))
            answer.update(encoded, type="row")
        except Exception as error:  # noqa: BLE001 - told to packproof, whatever it is
            buffers = []
            answer.update(_told(error, refusals))
        write_frame(stream, answer, buffers)


def _answer_pack(
    stream: Any, function: Callable[..., Any], header: Header, body: bytes, refusals: Mapping[str, str]
) -> None:
    """Answer one request for packs."""
    answer: Header = {"id": header["id"]}
    buffers: list[bytes] = []
    try:
        sizes = ("pack_length", "pad_id", "eos_id", "context_parallel_size")
        made = function(_conversations(header, body), *[header[key] for key in sizes])
        packs = []
        for each in _packs(made):
            encoded, more = encode(_mapping(each, "pack", "input_ids, labels"))
            packs.append(encoded)
            buffers += more
        answer.update(type="packs", packs=packs)
    except Exception as error:  # noqa: BLE001 - told to packproof, whatever it is
        buffers = []
        answer.update(_told(error, refusals))
    write_frame(stream, answer, buffers)


def _conversations(header: Header, body: bytes) -> list[dict[str, list[Any]]]:
    """Return conversations from a frame: the tokens of all as int64, then a byte for each token that says whether it trains."""
    lengths = header["lengths"]
    total = sum(lengths)
    tokens = array.array("q")
    tokens.frombytes(body[: 8 * total])
    trained = list(map(bool, body[8 * total : 9 * total]))
    ids = tokens.tolist()
    found: list[dict[str, list[Any]]] = []
    start = 0
    for length in lengths:
        found.append({"tokens": ids[start : start + length], "trained": trained[start : start + length]})
        start += length
    return found


def _packs(made: Any) -> Iterable[Any]:
    if isinstance(made, Mapping) or not isinstance(made, Iterable):
        raise TypeError(f"pack returned {type(made).__name__}: return a list of packs")
    return made


def _mapping(made: Any, seam: str, keys: str) -> Mapping[str, Any]:
    if isinstance(made, Mapping):
        return made
    if hasattr(made, "_asdict"):
        return dict(made._asdict())
    raise TypeError(f"{seam} must return a dict with {keys}, got {type(made).__name__}")


def _told(error: Exception, refusals: Mapping[str, str]) -> Header:
    """Return an exception as a refusal, if it is one, else with the line at which it was raised."""
    if isinstance(error, Refused):
        return {"type": "refusal", "kind": str(error.kind), "message": str(error.message)}
    text = f"{type(error).__name__}: {error}"
    for part, kind in refusals.items():
        if part in text:
            return {"type": "refusal", "kind": kind, "message": text}
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return {"type": "error", "error": text, "where": where}


def _is_nested(key: str, value: Any) -> bool:
    """Return whether a field holds more than numbers: the sources of a pack, or the dicts of its shards and depths."""
    return key == "sources" or (isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Mapping))


def _plain(value: Any) -> Any:
    """Return a value as JSON can say it: tensors and arrays as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _as_bytes(key: str, value: Any) -> tuple[str, list[int], bytes, bool]:
    """Return dtype, shape, little-endian bytes of an array, and whether it was a list, which has no dtype of its own."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_bytes(torch, value)
    if numpy is not None and isinstance(value, numpy.ndarray):
        dtype = value.dtype.name
        if dtype not in DTYPES:
            raise TypeError(f"{key} is a numpy array of dtype {dtype}: give integers, floats or booleans")
        little = numpy.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
        return dtype, list(value.shape), little.tobytes(), False
    if isinstance(value, (list, tuple, range, array.array)):
        shape, flat = _flattened(key, value)
        try:
            return "int64", shape, array.array("q", flat).tobytes(), True
        except TypeError:
            pass
        try:
            return "float64", shape, array.array("d", flat).tobytes(), True
        except TypeError as error:
            raise TypeError(f"{key} must hold numbers only: {error}") from error
    raise TypeError(f"{key} is of type {type(value).__name__}: give a list of numbers, a numpy array or a torch tensor")


def _tensor_bytes(torch: Any, tensor: Any) -> tuple[str, list[int], bytes, bool]:
    dtype = str(tensor.dtype).replace("torch.", "", 1)
    if dtype not in DTYPES:
        raise TypeError(f"a tensor of dtype {dtype} cannot cross: give integers, floats or booleans")
    shape = list(tensor.shape)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(torch.int16)  # numpy has no such dtype
    try:
        return dtype, shape, flat.numpy().tobytes(), False
    except RuntimeError:  # this torch has no numpy
        return dtype, shape, bytes(flat.view(torch.uint8).tolist()), False


def _flattened(key: str, value: Any) -> tuple[list[int], Any]:
    """Return the shape and the numbers of a list, or of lists of equal length within lists."""
    if len(value) and all(isinstance(each, (list, tuple)) for each in value):
        parts = [_flattened(key, each) for each in value]
        if any(shape != parts[0][0] for shape, _ in parts):
            raise TypeError(f"{key} is a list of lists of several lengths: give one list")
        return [len(value), *parts[0][0]], [each for _, flat in parts for each in flat]
    return [len(value)], value
