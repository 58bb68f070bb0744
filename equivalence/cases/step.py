"""A training step in one layout as a case: the model, the layout, the rows; small JSON that a run saves and replays."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equivalence.errors import CaseError
from production.parallel.sizes import ParallelSizes
from production.rows.batch import Batch
from reference.context_parallel import owned_positions

SCHEMA = 1
"""Raised when a saved case can no longer be read as it was meant."""
CHECKS = ("models", "leaks", "paths")
"""Purpose of a case: the step itself, leaks across a boundary, the direct path against the online path."""
TRAINED = ("anywhere", "first", "last", "share r/n")
"""Places of a row's trained targets: anywhere; at the first, or last, position of each segment; in the share of rank r of n that R-CP-1 cuts."""


def squared_relu(values: torch.Tensor) -> torch.Tensor:
    """Return the square of the positive part, as megatron-core's function of this name, which takes seconds to import."""
    return torch.nn.functional.relu(values).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "squared_relu": squared_relu,
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A small model, in the terms that both sides' settings are made from."""

    architecture: str = "gpt"
    """`gpt` or `hybrid`."""
    layers: int = 2
    """Of `gpt`."""
    pattern: str = ""
    """Of `hybrid`, without multi-token prediction: `*` attention, `-` MLP, `E` experts."""
    hidden_size: int = 16
    heads: int = 4
    query_groups: int = 2
    ffn_hidden_size: int = 32
    vocab_size: int = 32
    gated: bool = True
    activation: str = "silu"
    tied: bool = False
    rotary_percent: float = 1.0
    experts: int = 0
    """0: dense."""
    topk: int = 2
    dense_layers: int = 0
    """With experts: how many of the first layers have none."""
    depths: int = 0
    """D, layers of multi-token prediction."""
    repeated: bool = False
    """Whether one layer predicts at every depth."""

    def hybrid_layer_pattern(self, pipeline_size: int) -> str | None:
        """Return pattern with its stages and depths; None for `gpt`."""
        if self.architecture == "gpt":
            return None
        per_stage = len(self.pattern) // pipeline_size
        stages = ["".join(some) for some in itertools.batched(self.pattern, per_stage)]
        return "/".join(["|".join(stages), *[self.pattern[:2]] * self.depths])

    def settings(self, sizes: ParallelSizes, pack_length: int) -> Any:
        """Return settings of production: `ModelSettings`, in float64."""
        from production.model.model import ModelSettings  # noqa: PLC0415 - megatron-core

        transformer: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.heads,
            "num_query_groups": self.query_groups,
            "ffn_hidden_size": self.ffn_hidden_size,
            "gated_linear_unit": self.gated,
            "activation_func": ACTIVATIONS[self.activation],
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": torch.float64,
            "mtp_use_repeated_layer": self.repeated,
        }
        if self.architecture == "gpt":
            transformer |= {"num_layers": self.layers, "mtp_num_layers": self.depths or None}
        if self.experts:
            transformer |= {
                "num_moe_experts": self.experts,
                "moe_router_topk": self.topk,
                "moe_ffn_hidden_size": self.ffn_hidden_size,
                "moe_token_dispatcher_type": "alltoall",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
            }
            if self.architecture == "gpt":
                transformer["moe_layer_freq"] = [int(layer >= self.dense_layers) for layer in range(self.layers)]
        return ModelSettings(
            vocab_size=self.vocab_size,
            max_sequence_length=pack_length,
            architecture=self.architecture,  # type: ignore[arg-type] # one of its two
            hybrid_layer_pattern=self.hybrid_layer_pattern(sizes.pipeline),
            tie_embeddings=self.tied,
            rotary_percent=self.rotary_percent,
            transformer=transformer,
        )


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One global batch of one model in one layout."""

    shape: ModelShape = field(default_factory=ModelShape)
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    data_size: int = 1
    """dp."""
    rows: tuple[tuple[int, ...], ...]
    """Lengths of the segments of each row of the global batch; all rows have one sum, P."""
    masked: tuple[float, ...]
    """For each row the share of its targets that are trained; 0 leaves none."""
    trained: tuple[str, ...] = ()
    """For each row which of TRAINED; empty: anywhere in all of them."""
    normalization: str = "per_token"
    mtp_weights: str = "rank"
    mtp: str = "tables"
    seed: int = 0
    """Of tokens, masks and weights."""
    weight_scale: float = 0.2
    """Standard deviation of the weights, but for norms."""
    check: str = "models"
    """One of CHECKS."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """For `paths`: true length of each segment; the rest of the segment is padding."""
    multiple: int = 1
    """Of `paths`: what each sequence is padded to a multiple of."""
    note: str = ""
    """Reason for saving the case."""
    origin: str = ""
    """Generator and seed of the case."""

    @property
    def pack_length(self) -> int:
        """P."""
        return sum(self.rows[0])

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.sizes.of_a_replica * self.data_size

    @property
    def layout(self) -> str:
        """Sizes above 1, in words."""
        return layout_name(self.sizes, self.data_size)

    @property
    def boundaries(self) -> list[list[int]]:
        """`cu_seqlens` of each row."""
        return [[0, *itertools.accumulate(row)] for row in self.rows]

    def on_one_rank(self) -> ModelCase:
        """Return the same global batch and model on a world of one rank."""
        return dataclasses.replace(self, sizes=ParallelSizes(), data_size=1)

    def weights(self) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
        """Draw the whole model's weights by name and shape from the seed."""
        from production.model.weights import drawn  # noqa: PLC0415 - megatron-core

        return drawn(self.seed, scale=self.weight_scale)

    def batch(self) -> Batch:
        """Draw the global batch from the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        count, length = len(self.rows), self.pack_length
        ids = torch.randint(0, self.shape.vocab_size, (count, length), generator=generator)
        targets = torch.randint(0, self.shape.vocab_size, (count, length), generator=generator)
        shares = torch.tensor(self.masked)[:, None]
        mask = (torch.rand(count, length, generator=generator) < shares).float()
        for row, where in enumerate(self.trained):
            mask[row] *= self._may_train(row, where)
        return batch_of(self.rows, ids, targets, mask)

    def rows_of_rank(self, rank: int) -> list[Batch]:
        """Return the microbatches of a data-parallel rank, by production's own stride."""
        from production.rows.batch import take_rank  # noqa: PLC0415 - the one that is there when a fault is put in
        from production.training.step import split_rows  # noqa: PLC0415 - megatron-core

        return split_rows(take_rank(self.batch(), rank=rank, size=self.data_size))

    def _may_train(self, row: int, where: str) -> torch.Tensor:
        boundaries = self.boundaries[row]
        allowed = torch.zeros(self.pack_length)
        if where == "anywhere":
            allowed[:] = 1
        elif where == "first":
            allowed[boundaries[:-1]] = 1
        elif where == "last":
            allowed[[end - 1 for end in boundaries[1:]]] = 1
        else:
            rank, _, size = where.removeprefix("share ").partition("/")
            allowed[owned_positions(boundaries, int(rank), int(size))] = 1
        return allowed

    @property
    def stem(self) -> str:
        """Return the beginning of the file's name: check and layout."""
        return f"{self.check} {self.layout}"

    def to_json(self) -> str:
        """Return the case as JSON, with one field on each line and without fields at their default."""
        found: dict[str, Any] = {"schema": SCHEMA}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                default = type(value)()
                value = {key: now for key, now in dataclasses.asdict(value).items() if now != getattr(default, key)}
            if value not in (each.default, {}):
                found[each.name] = value
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        return f"{{\n{lines}\n}}\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "the case") -> ModelCase:
        """Read a case. CaseError names `where` and what is wrong."""
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CaseError(f"{where} is not valid JSON: {error}; save the case again") from error
        if not isinstance(read, dict) or read.pop("schema", None) != SCHEMA:
            raise CaseError(f"{where} must be a case of a training step of schema {SCHEMA}; save the case again")
        try:
            if "shape" in read:
                read["shape"] = ModelShape(**read["shape"])
            if "sizes" in read:
                read["sizes"] = ParallelSizes(**read["sizes"])
            for name in ("rows", "lengths"):
                if name in read:
                    read[name] = tuple(map(tuple, read[name]))
            for name in ("masked", "trained"):
                if name in read:
                    read[name] = tuple(read[name])
            case = cls(**read)
        except (KeyError, TypeError, ValueError) as error:
            raise CaseError(
                f"{where} cannot be read as a case of a training step: {error!r}; a case needs the keys `rows` and `masked`"
            ) from error
        if case.check not in CHECKS:
            raise CaseError(f"{where} is for the check {case.check!r}; choose one of {', '.join(CHECKS)}")
        return case


def layout_name(sizes: ParallelSizes, data_size: int) -> str:
    """Return a name such as `tp2 cp2 dp2`, or `one rank`."""
    named = {
        "tp": sizes.tensor,
        "cp": sizes.context,
        "pp": sizes.pipeline,
        "dp": data_size,
        "ep": sizes.expert,
        "etp": sizes.expert_tensor,
    }
    return " ".join(f"{name}{size}" for name, size in named.items() if size > 1) or "one rank"


def batch_of(
    rows: Sequence[Sequence[int]], ids: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor
) -> Batch:
    """Make a batch of rows from segment lengths that all sum to P, with tensors [B, P]; `more` are further fields of the batch."""
    boundaries = [[0, *itertools.accumulate(row)] for row in rows]
    widest = max(map(len, boundaries))
    fields = {
        "input_ids": ids,
        "target_ids": targets,
        "token_mask": mask,
        "position_ids": torch.stack([torch.cat([torch.arange(each) for each in row]) for row in rows]),
        "packed_cu_seqlens": torch.tensor([row + [-1] * (widest - len(row)) for row in boundaries], dtype=torch.int32),
        "packed_cu_seqlens_lengths": torch.tensor([len(row) for row in boundaries]),
        "packed_max_seqlen": torch.tensor([max(row) for row in rows]),
        "input_lengths": torch.full((len(rows),), sum(rows[0])),
        "sample_mask": torch.ones(len(rows)),
    }
    return Batch(**{**fields, **more})
