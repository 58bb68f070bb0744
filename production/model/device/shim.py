"""Let the unmodified megatron-core run on CPU ranks: the CPU answers its calls to CUDA. A no-op where CUDA is.

Factories and a handful of names are replaced while it is entered, and put back on exit, so it is entered only in processes that do
nothing else. A `TorchFunctionMode` would do the same and costs some 60 % on every tiny operation; replaced names cost nothing there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import distributed

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
"""Functions of torch that take `device=`."""


@contextlib.contextmanager
def cpu_shim() -> Iterator[None]:
    """Within, megatron-core takes the CPU for its CUDA device; undone on exit, and nothing at all where CUDA is available.

    Enter it before any model, group or optimizer of megatron-core is made, in a process of its own (a rank): what it
    replaces belongs to the whole process.
    """
    if torch.cuda.is_available():
        yield
        return
    # First of all: torch's compiler, which it imports, keeps tables of torch's own functions.
    from megatron.core.tensor_parallel import random  # noqa: PLC0415 - heavy, and needed only by those who enter

    with contextlib.ExitStack() as undo:
        _replace_cuda(undo)
        _replace_tensors(undo)
        _replace_collectives(undo)
        _replace_random(undo, random)
        _replace_kernels(undo)
        yield


def is_shimmed() -> bool:
    """Return whether this process has the shim entered."""
    return getattr(torch.cuda.Stream, "is_shim", False)


class _Stream:
    """Stands in for a CUDA stream or event where everything happens in order anyway."""

    is_shim = True

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        pass

    def wait_stream(self, *_args: Any) -> None:
        pass

    def wait_event(self, *_args: Any) -> None:
        pass

    def record_event(self, *_args: Any) -> _Stream:
        return self

    def record(self, *_args: Any) -> None:
        pass

    def wait(self, *_args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _replace_cuda(undo: contextlib.ExitStack) -> None:
    cpu = torch.device("cpu")

    # Each name has a function of its own: torch's compiler keeps a table by function.
    for name, value in {
        "current_device": lambda: cpu,
        "device_count": lambda: 1,
        "synchronize": lambda *_args, **_options: None,
        "set_device": lambda *_args, **_options: None,
        "empty_cache": lambda *_args, **_options: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_args, **_options: _Stream(),
        "stream": lambda _stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_args, **_options: torch.get_rng_state(),
        "set_rng_state": lambda state, *_args, **_options: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),  # noqa: PLW0108 - as said above
    }.items():
        _replace(undo, torch.cuda, name, value)


def _replace_tensors(undo: contextlib.ExitStack) -> None:
    for name in _FACTORIES:
        _replace(undo, torch, name, _on_cpu(getattr(torch, name)))
    of_tensor = torch.Tensor.to
    type_of = torch.Tensor.type

    def cuda(self: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
        return self

    @functools.wraps(of_tensor)
    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, torch.device)):
            args = (_device(args[0]), *args[1:])
        if options.get("device") is not None:
            options["device"] = _device(options["device"])
        return of_tensor(self, *args, **options)

    @functools.wraps(type_of)
    def type_(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        # megatron-core's optimizers and Float16Module compare type names with torch.cuda.FloatTensor and the like.
        answer = type_of(self, *args, **options)
        return f"torch.cuda.{answer.rpartition('.')[2]}" if isinstance(answer, str) else answer

    _replace(undo, torch.Tensor, "cuda", cuda)
    _replace(undo, torch.Tensor, "to", to)
    _replace(undo, torch.Tensor, "type", type_)
    _replace(undo, torch.nn.Module, "cuda", lambda self, *_args, **_options: self)


def _replace_collectives(undo: contextlib.ExitStack) -> None:
    all_to_all = distributed.all_to_all_single

    @functools.wraps(all_to_all)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - the name that torch gives it
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        # The expert dispatcher hands split sizes as tensors, which gloo does not take.
        sizes = [
            each.tolist() if isinstance(each, torch.Tensor) else each
            for each in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all(output, input, sizes[0], sizes[1], *args, **options)

    _replace(undo, distributed, "all_to_all_single", all_to_all_single)


def _replace_random(undo: contextlib.ExitStack, random: Any) -> None:
    class CpuRandomStates(random.CudaRNGStatesTracker):  # type: ignore[misc] # megatron-core has no types
        """Holds named states of the CPU's generator, for dropout that differs or agrees among tensor-parallel ranks
        as on CUDA.
        """

        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"the random state {name!r} or its seed {seed} exists already")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            """megatron-core's own warns that the CPU's state moved, which here it must."""
            if name not in self.states_:
                raise ValueError(f"the random state {name!r} must exist: call model_parallel_cuda_manual_seed first")
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    _replace(undo, random, "_get_cuda_rng_state", lambda *_args, **_options: torch.get_rng_state())
    _replace(undo, random, "_set_cuda_rng_state", lambda state, *_args, **_options: torch.set_rng_state(state))
    tracker = CpuRandomStates()
    _replace(undo, random, "_CUDA_RNG_STATE_TRACKER", tracker)
    _replace(undo, random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)  # noqa: FBT003


def _replace_kernels(undo: contextlib.ExitStack) -> None:
    """Replace the CUDA kernels that megatron-core takes, without an option, of an installed Transformer Engine or
    Apex, also without CUDA.
    """
    from megatron.core import optimizer, utils  # noqa: PLC0415 - as above
    from megatron.core.optimizer import clip_grads, distrib_optimizer  # noqa: PLC0415
    from megatron.core.optimizer import optimizer as base  # noqa: PLC0415
    from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415

    tensors = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
    }
    norms = {"l2_norm_impl": utils.local_multi_tensor_l2_norm, "multi_tensor_scale_tensor_impl": None}
    plain = {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True}
    none_fused = {"HAVE_APEX_OR_TE": False, "USING_TE_OPTIMIZER": False, "USING_APEX_OPTIMIZER": False}
    for module, names in (
        (base, tensors),
        (clip_grads, tensors | norms),
        (optimizer, plain),
        (distrib_optimizer, none_fused | {"Adam": torch.optim.Adam}),
        (moe_utils, {"te_general_gemm": None}),
    ):
        for name, value in names.items():
            _replace(undo, module, name, value)


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set a name until the stack unwinds."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **options: Any) -> Any:
        if options.get("device") is not None:
            options["device"] = _device(options["device"])
        return factory(*args, **options)

    return call


def _device(device: Any) -> Any:
    return torch.device("cpu") if torch.device(device).type == "cuda" else device
