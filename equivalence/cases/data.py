"""A case of a check on data: whatever the check draws (tensors, numbers, bytes), as small JSON that a run saves and replays."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import importlib
import json
import math
from dataclasses import dataclass
from typing import Any, cast

import torch

from equivalence.errors import CaseError

SCHEMA = 1
"""Raised when a saved case can no longer be read as it was meant."""
_HOMES = ("equivalence.", "production.parallel.sizes")
"""Modules of the classes that a case may hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DataCase:
    """One case of one check on data."""

    check: str
    """The check's name in `equivalence.checks.registry.CHECKS`."""
    value: Any
    """What the check takes: numbers, texts, bytes, times, tensors, lists, tuples, dicts and dataclasses of the suite."""
    note: str = ""
    """Reason for saving the case."""
    origin: str = ""
    """The job that drew it."""

    @property
    def stem(self) -> str:
        """Return the beginning of the file's name."""
        return self.check

    def to_json(self) -> str:
        """Return the case as JSON, with one field of its value on each line."""
        head = {"schema": SCHEMA, "check": self.check, "note": self.note, "origin": self.origin}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines.append(f'  "value": {_pretty(encode(self.value))}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "the case") -> DataCase:
        """Read a case. CaseError names `where` and what is wrong."""
        try:
            read = json.loads(text)
            schema = read["schema"]
            case = cls(check=read["check"], value=decode(read["value"]), note=read["note"], origin=read["origin"])
        except CaseError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ImportError, RecursionError) as error:
            raise CaseError(
                f"{where} cannot be read as a case of a check on data: {error!r}; save the case again"
            ) from error
        if schema != SCHEMA:
            raise CaseError(f"{where} has schema {schema!r}, this packproof reads {SCHEMA}; save it again")
        return case

    def __str__(self) -> str:
        return f"{self.check} of {self.value}"


def encode(value: Any) -> Any:
    """Encode a value for JSON: a value other than a list, a text, a finite number or None becomes an object with one key that names the type."""
    if isinstance(value, torch.Tensor):
        return {
            "tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), encode(value.reshape(-1).tolist())]
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: encode(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {f"{type(value).__module__}:{type(value).__qualname__}": fields}
    if isinstance(value, dt.datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {"tuple": [encode(each) for each in value]}
    if isinstance(value, (list, range)):
        return [encode(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CaseError(
        f"a case cannot hold a {type(value).__name__}: use numbers, texts, bytes, times, tensors or a dataclass of the suite"
    )


def decode(read: Any) -> Any:
    """Return the value that `encode` wrote."""
    if isinstance(read, list):
        return [decode(each) for each in read]
    if not isinstance(read, dict):
        return read
    ((name, inner),) = read.items()
    if name == "tensor":
        dtype, shape, values = inner
        return torch.tensor(decode(values), dtype=getattr(torch, dtype)).reshape(shape)
    if name == "datetime":
        return dt.datetime.fromisoformat(inner)
    if name == "bytes":
        return base64.b64decode(inner)
    if name == "tuple":
        return tuple(decode(each) for each in inner)
    if name == "dict":
        return {decode(key): decode(each) for key, each in inner}
    if name == "float":
        return float(inner)
    return _class_of(name)(**{field: decode(each) for field, each in inner.items()})


def _class_of(name: str) -> Any:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute) if module.startswith(_HOMES) else None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise CaseError(f"a case holds dataclasses of the suite only, got {name}; save the case again")
    return cast("Any", found)


def _pretty(encoded: Any) -> str:
    """Return JSON with one field of the outermost object on each line."""
    if isinstance(encoded, dict) and len(encoded) == 1:
        ((name, inner),) = encoded.items()
        if isinstance(inner, dict):
            lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(each)}" for key, each in inner.items())
            return f"{{{json.dumps(name)}: {{\n{lines}\n  }}}}"
    return json.dumps(encoded)
