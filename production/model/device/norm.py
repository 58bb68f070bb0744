"""Normalize by root mean square under sequence parallelism, which megatron-core's own torch norm refuses; torch does
the work.

megatron-core adds the gradients of such a weight over the tensor-parallel ranks, each of which saw its own part of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from production.errors import PackproofError


class RMSNorm(torch.nn.RMSNorm):
    """Stands where a layer spec has `WrappedTorchNorm` or `TENorm`: y = x / sqrt(mean(x²) + eps) · weight, over the last dimension.

    Any shape [..., hidden_size] and floating dtype; half precision is normed in float32, as torch does it. With
    `layernorm_zero_centered_gamma` the weight begins at 0 and 1 is added to it. `persist_layer_norm` and
    `memory_efficient_layer_norm` choose among kernels that are not here and change no number: they are not looked at.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,  # noqa: ARG002, FBT001, FBT002 - as megatron-core calls it
        zero_centered_gamma: bool = False,  # noqa: FBT001, FBT002 - as above
        normalization: str = "RMSNorm",
    ) -> None:
        """`config` is a TransformerConfig: its normalization, zero-centered gamma and sequence parallelism count.

        Raises PackproofError for another normalization than RMSNorm.
        """
        for name, found in (("the call", normalization), ("the config", config.normalization)):
            if found != "RMSNorm":
                raise PackproofError(
                    what=f"{name} must ask for RMSNorm without Transformer Engine, got {found}",
                    where="normalization",
                    fix='set normalization="RMSNorm", or install Transformer Engine and run on CUDA',
                )
        super().__init__(hidden_size, eps=eps)
        self.is_zero_centered = zero_centered_gamma or config.layernorm_zero_centered_gamma
        self.reset_parameters()
        # megatron-core looks for this mark in finalize_model_grads.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Set the weight to its neutral value."""
        # torch's own constructor calls this before the field is there.
        torch.nn.init.constant_(self.weight, 0.0 if getattr(self, "is_zero_centered", False) else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size] to the same shape and dtype."""
        weight = self.weight + 1 if self.is_zero_centered else self.weight
        return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
