"""SFT on packed rows in plain PyTorch, on one device and without megatron: files, rows, checked batches, a small model, a loop.

    python -m production.adapters.plain_torch examples/packed/sample.jsonl.packed --tokenizer examples/tokenizers/nemotron-mini

Attention runs once for each segment, which is exact and needs no mask; a kernel that takes `cu_seqlens` does the same in one call.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer

from production.files.source import PackedSource, open_source
from production.rows.batch import Batch, BatchSettings, FlatBatch, collate_checked, count_trained, flatten, take_rank
from production.rows.builder import RowBuilder, RowSettings
from production.semantics import parse


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the small model."""

    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int = 64
    """Channels of a token; `heads` must divide it into even parts."""
    heads: int = 4
    """Attention heads."""
    layers: int = 2
    """Blocks of attention and a feed-forward network."""


class Model(nn.Module):
    """A decoder that knows of segments: no token sees another conversation, and positions restart with each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return logits [T, V] in the weights' dtype, from ids and positions [T] int64 of segments of these lengths."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, position_ids, lengths)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Attention within segments, then a feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads = shape.heads
        self.norms = nn.ModuleList((nn.RMSNorm(width), nn.RMSNorm(width)))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Apply the layer to [T, hidden_size]."""
        query, key, value = self.qkv(self.norms[0](hidden)).view(len(hidden), 3, self.heads, -1).unbind(dim=1)
        query, key = turned(query, position_ids), turned(key, position_ids)
        segments = zip(*(torch.split(each, list(lengths)) for each in (query, key, value)), strict=True)
        attended = [attend(*(each.transpose(0, 1) for each in segment)) for segment in segments]
        hidden = hidden + self.output(torch.cat(attended, dim=1).transpose(0, 1).reshape(hidden.shape))
        mixed: torch.Tensor = hidden + self.mlp(self.norms[1](hidden))
        return mixed


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Apply causal attention within one segment to [h, n, d]."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def turned(heads: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Rotate [T, h, d] of tokens at positions [T] int64."""
    half = heads.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=heads.device) / half)
    angles = (position_ids[:, None] * frequencies).to(heads.dtype)[:, None]
    left, right = heads[..., :half], heads[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def token_losses(model: Model, rows: FlatBatch) -> torch.Tensor:
    """Cross entropies [T] float32 of the rows' labels. Labels that do not count have finite values too, which the mask removes."""
    lengths = rows.cu_seqlens.diff().tolist()
    logits = model(rows.input_ids[0], rows.position_ids[0], lengths).float()
    # -100 is no token: its logit is looked up at 0 and its loss masked, as megatron-core does with its own.
    return functional.cross_entropy(logits, rows.target_ids[0].clamp(min=0), reduction="none")


def global_batches(source: PackedSource, builder: RowBuilder, *, rows: int, steps: int) -> Iterator[Batch]:
    """Yield `steps` batches of `rows` rows in the file's order, starting again at its end (SPEC R-ORDER-1, wrap). Raises RowRefused for a refused row."""
    settings = BatchSettings(context_parallel_size=1, data_parallel_size=1, global_batch_size=rows)
    for step in range(steps):
        numbers = range(step * rows, (step + 1) * rows)
        yield collate_checked([builder.build(source[number % len(source)]) for number in numbers], settings)


def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """Take one optimizer step over a global batch, one row at a time; return its loss, a scalar float32 (SPEC R-LOSS-2 and 7, `per_token`)."""
    trained = count_trained(batch).clamp(min=1)  # over the whole batch, before it is taken apart
    optimizer.zero_grad()
    sums = []
    for number in range(len(batch.sample_mask)):
        row = flatten(take_rank(batch, rank=number, size=len(batch.sample_mask)))
        total = (token_losses(model, row) * row.token_mask[0]).sum()
        torch.autograd.backward(total / trained.float())
        sums.append(total.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.stack(sums).sum() / trained.float()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train on a packed file and print each step's loss; gives the losses."""
    parser = argparse.ArgumentParser(prog="python -m production.adapters.plain_torch", description=__doc__)
    parser.add_argument("file", help="rows, packed for Megatron-LM")
    parser.add_argument("--tokenizer", required=True, help="folder or name of a Hugging Face tokenizer")
    parser.add_argument("--prompt-format", default="nemotron-nano-v2")
    parser.add_argument("--semantics", default="megatron-lm-0.19")
    parser.add_argument("--pack-length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=2, help="of a global batch")
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    settings = RowSettings(
        pack_length=given.pack_length, prompt_format=given.prompt_format, semantics=parse(given.semantics)
    )
    torch.manual_seed(42)
    model = Model(Shape(vocab_size=len(tokenizer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    with open_source(given.file) as source:
        builder = RowBuilder(tokenizer=tokenizer, settings=settings)
        for step, batch in enumerate(global_batches(source, builder, rows=given.rows, steps=given.steps), start=1):
            losses.append(float(train_step(model, optimizer, batch)))
            print(f"step {step}: loss {losses[-1]:.6f}, {int(count_trained(batch))} trained tokens")
    return losses


if __name__ == "__main__":
    main()
