"""Counts what of a step the host would have to wait for, were its tensors on a device: reads of values, copies to the host, shapes that depend on values.

Here all tensors lie on the CPU, so that the place is kept account of instead: in the making of a microbatch (`process_microbatch`)
those that were moved, and what came of them, are on the device, and the rest on the host; outside of it all are on the device.

Left out, with the reason: `SegmentAttention` and megatron-core's `_apply_rotary_pos_emb_thd` read boundaries to cut a row by segments,
and stand on the CPU for fused kernels (Transformer Engine's attention, `apply_rope_fusion`) that take them as they lie on the device. Not
seen: a `.to(device)` whose device is an object, since the CPU is the model's device here (a microbatch's own are held on the `meta` device, in
`test_production_microbatches`).
"""

import contextlib
import functools
import threading
import traceback
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
}
"""Operations that on a device are waited for."""
MASKED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""They too with a mask for an index, but where one value is filled in."""
METHODS = ("tolist", "numpy", "cpu", "__array__")
"""Of tensors, that read the CPU's memory past the dispatcher."""


class Waits:
    """What was counted, step by step."""

    def __init__(self):
        self.steps = []
        self._aside = 0
        self._making = False
        self._moved = {}
        self._thread = threading.get_ident()

    def begin(self):
        """A step begins."""
        self.steps.append(Counter())
        self._moved.clear()

    def seen(self, name, tensors):
        """Something that would wait, of these tensors."""
        if threading.get_ident() != self._thread:  # another prepares the next rows, on the host
            return
        if self._aside or not self.steps or (self._making and not any(self._is_moved(each) for each in tensors)):
            return
        self.steps[-1][f"{name} in {_place()}"] += 1

    def aside(self, function):
        """Not counted."""

        @functools.wraps(function)
        def call(*args, **options):
            self._aside += 1
            try:
                return function(*args, **options)
            finally:
                self._aside -= 1

        return call

    def making(self, function):
        """Of whose tensors those are on the host that were not moved."""

        @functools.wraps(function)
        def call(*args, **options):
            self._making = True
            try:
                return function(*args, **options)
            finally:
                self._making = False

        return call

    def moving(self, function):
        """Gives tensors that are on the device."""

        @functools.wraps(function)
        def call(tensors, device):
            # Copies: on the CPU a move gives the same memory, and the ones on the host are read on.
            found = {name: tensor.clone() for name, tensor in function(tensors, device).items()}
            self.move(found.values())
            return found

        return call

    def move(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._moved[storage._cdata] = storage  # kept, so that nothing else gets its place

    def follow(self, inputs, outputs):
        if self._making and any(self._is_moved(each) for each in inputs):
            self.move(outputs)

    def _is_moved(self, tensor):
        return tensor.untyped_storage()._cdata in self._moved


class _Dispatched(TorchDispatchMode):
    def __init__(self, waits):
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = _tensors((args, kwargs))
        if _waits_for(function, args, kwargs or {}):
            self._waits.seen(function._schema.name, inputs)
        found = function(*args, **(kwargs or {}))
        self._waits.follow(inputs, _tensors(found))
        return found


def _waits_for(function, args, kwargs):
    name = function._schema.name
    if name in MASKED:
        masks = [each for each in _tensors(args[1]) if each.dtype in (torch.bool, torch.uint8)]
        fills = (
            name != "aten::index" and len(masks) == len(args[1]) == 1 and args[2].numel() == 1
        )  # torch's masked_fill
        return bool(masks) and not fills
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return name in READS


def _tensors(values):
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _place():
    """The innermost function of packproof or of megatron-core."""
    for frame in reversed(traceback.extract_stack()):
        for package in ("/production/", "/megatron/core/"):
            if package in frame.filename and "/tests/" not in frame.filename:
                return f"{package.strip('/')}/{frame.filename.rpartition(package)[2]}:{frame.name}"
    return "elsewhere"


@contextlib.contextmanager
def counting():
    """Counts within each `forward_backward` of a job's engine."""
    from megatron.core.models.common.embeddings import rope_utils

    from production.model.device.attention import SegmentAttention
    from production.parallel import microbatches
    from production.training import engine
    from production.training import step as steps

    waits = Waits()
    whole = engine.forward_backward

    def forward_backward(*args, **options):
        waits.begin()
        with _Dispatched(waits), _methods(waits):
            return whole(*args, **options)

    with (
        mock.patch.object(engine, "forward_backward", forward_backward),
        mock.patch.object(steps, "process_microbatch", waits.making(steps.process_microbatch)),
        mock.patch.object(microbatches, "_move", waits.moving(microbatches._move)),
        mock.patch.object(SegmentAttention, "forward", waits.aside(SegmentAttention.forward)),
        mock.patch.object(rope_utils, "_apply_rotary_pos_emb_thd", waits.aside(rope_utils._apply_rotary_pos_emb_thd)),
    ):
        yield waits


@contextlib.contextmanager
def _methods(waits):
    """What reads the memory of a tensor without an operation, and a copy to the host by name."""
    to = torch.Tensor.to  # the shim's

    def seeing(name, method):
        def call(self, *args, **options):
            waits.seen(name, [self])
            return method(self, *args, **options)

        return call

    def to_host(self, *args, **options):
        if any(isinstance(each, str) and each == "cpu" for each in (*args[:1], options.get("device"))):
            waits.seen('to("cpu")', [self])
        return to(self, *args, **options)

    with mock.patch.multiple(
        torch.Tensor, to=to_host, **{name: seeing(name, getattr(torch.Tensor, name)) for name in METHODS}
    ):
        yield
