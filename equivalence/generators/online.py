"""Draw microbatches and losses: rows of the direct path, conversations of the online one, shares of losses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from equivalence.generators.choices import Choices, drawn
from production.loss import Normalization

PACKERS = ("concatenative", "first_fit_decreasing", "modified_first_fit_decreasing")
PRECISIONS = ("unquantized", "fp8_blockwise", "fp8_mxfp8", "fp8_other")
NORMALIZATIONS: tuple[Normalization, ...] = ("per_token", "mean_of_means", "global_valid_tokens")
SIZES = (1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class DirectCase:
    """Rows of one length as a dataset would hold them, and who takes them."""

    boundaries: list[list[int]]
    """Each row's, from 0 to P."""
    tensors: dict[str, torch.Tensor]
    """[B, P]: ids, labels and positions int64, mask float32."""
    sample_mask: list[float]
    size: int
    """cp."""
    layout: str
    depths: int


@dataclass(frozen=True, kw_only=True, eq=False)
class OnlineCase:
    """Tokenized conversations of a global batch, and how they are packed and padded."""

    conversations: list[tuple[list[int], list[int]]]
    """Tokens and mask of each."""
    uncounted: list[int]
    """Sequences with sample_mask 0."""
    multiple: int
    """make_sequence_length_divisible_by."""
    capacity: int
    packer: str
    data_parallel_size: int
    size: int
    """cp."""
    tensor_parallel_size: int
    sequence_parallel: bool
    pipeline_parallel_size: int
    precision: str
    hybrid_expert_parallel: bool
    depths: int


@dataclass(frozen=True, kw_only=True)
class MeetingCase:
    """Messages of one row that both paths can be given, and the settings of the direct one."""

    messages: list[dict[str, str]]
    prompt_format: str
    preset: str
    size: int
    """cp."""
    spare: int
    """Room beyond what the conversations take, in paddings of 2·cp."""
    depths: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LossCase:
    """Token losses of a global batch, share by share."""

    normalization: Normalization
    size: int
    """cp; ranks run over dp x cp, cp fastest."""
    losses: list[list[torch.Tensor]]
    """[rank][microbatch][n]."""
    masks: list[list[torch.Tensor]]
    boundaries: list[int]
    """Of each row, which cp ranks share: the same for all."""
    depths: int


def draw_direct(choices: Choices) -> DirectCase:
    """Draw one to three rows at cp 1 to 4; one case in five has a segment that cannot be cut."""
    size, layout = choices.one_of(SIZES), choices.one_of(["zigzag", "zigzag", "contiguous"])
    unit = 1 if size == 1 else 2 * size
    pieces = choices.integer(1, 6)
    rows = choices.integer(1, 3)
    extra = choices.integer(1, unit) if choices.integer(0, 4) == 4 else 0
    boundaries = [
        [
            0,
            *(unit * place for place in sorted(set(choices.integers(1, max(pieces - 1, 1), fewest=0, longest=6)))),
            unit * pieces + extra,
        ]
        for _ in range(rows)
    ]
    boundaries = [[*dict.fromkeys(each)] for each in boundaries]
    shape = (rows, unit * pieces + extra)
    made = torch.Generator().manual_seed(choices.integer(0, 1000))
    return DirectCase(
        boundaries=boundaries,
        tensors={
            "input_ids": torch.randint(0, 1000, shape, generator=made),
            "target_ids": torch.randint(-100, 1000, shape, generator=made),
            "token_mask": torch.randint(0, 2, shape, generator=made).float(),
            "position_ids": torch.randint(0, 100, shape, generator=made),
        },
        sample_mask=[1.0] * (rows - 1) + [choices.one_of([1.0, 1.0, 0.0])],
        size=size,
        layout=layout,
        depths=choices.integer(0, 3),
    )


def draw_online(choices: Choices) -> OnlineCase:
    """Draw one to nine conversations of 1 to 12 tokens; some cannot be packed or padded as asked."""
    lengths = choices.integers(1, 12, fewest=1, longest=9)
    first = choices.integer(1, 900)
    size, tensor = choices.one_of(SIZES), choices.one_of([1, 2])
    sequence = tensor > 1 and choices.one_of((False, True))
    factor = (2 * size if size > 1 else 1) * (tensor if sequence else 1)
    # A multiple that is none of the domain factor is refused.
    multiple = choices.one_of([factor, factor, 2 * factor, factor + 1])
    counter = itertools.count(first)
    conversations = [
        ([next(counter) for _ in range(length)], choices.integers(0, 1, fewest=length, longest=length))
        for length in lengths
    ]
    longest = -(-max(lengths) // multiple) * multiple
    return OnlineCase(
        conversations=conversations,
        uncounted=choices.integers(0, len(lengths) - 1, fewest=0, longest=2),
        multiple=multiple,
        capacity=longest * choices.integer(1, 3) - (choices.integer(0, 6) == 6),
        packer=choices.one_of(PACKERS),
        data_parallel_size=choices.integer(1, 3),
        size=size,
        tensor_parallel_size=tensor,
        sequence_parallel=sequence,
        pipeline_parallel_size=choices.one_of([1, 1, 2]),
        precision=choices.one_of(["unquantized", *PRECISIONS]),
        hybrid_expert_parallel=choices.one_of([False, False, False, True]),
        depths=choices.one_of([0, 0, 1, 3]),
    )


_WORDS = ("w0", "w1", "w2", "w3", "<unk>", "<SPECIAL_233>")
_MEETING_PRESETS = (
    *((each, preset) for each in ("identity", "nemotron-h-aligned") for preset in ("strict", "megatron-lm-main")),
    *(("nemotron-h-aligned", preset) for preset in ("nemo-rl-direct", "megatron-lm-0.19")),
    ("identity", "megatron-lm-main"),  # once more: only here a label reaches across a boundary
)


def draw_meeting(choices: Choices) -> MeetingCase:
    """Draw rows that both paths take whole. Contents hold the pad token of either format; some conversations begin with an answer."""
    prompt_format, preset = choices.one_of(_MEETING_PRESETS)
    messages = []
    for _ in range(choices.integer(1, 4)):
        answers_first = prompt_format == "identity" and choices.one_of((False, True))
        prompt = "" if answers_first else _text(choices)
        messages.append({"role": "system", "content": "" if answers_first else _text(choices)})
        for _ in range(choices.integer(1, 2)):
            messages.append({"role": "user", "content": prompt})
            messages.append({"role": "assistant", "content": _text(choices)})
    return MeetingCase(
        messages=messages,
        prompt_format=prompt_format,
        preset=preset,
        size=choices.one_of(SIZES),
        spare=choices.integer(0, 3),
        depths=choices.one_of([0, 0, 2]),
    )


def draw_loss(choices: Choices) -> LossCase:
    """Draw one to three microbatches on up to two data-parallel and four cp ranks; whole shares and batches may be masked."""
    size, data = choices.one_of(SIZES), choices.integer(1, 2)
    unit = 1 if size == 1 else 2 * size
    pieces = choices.integers(1, 3, fewest=1, longest=3)
    boundaries = [0, *itertools.accumulate(unit * each for each in pieces)]
    microbatches, share = choices.integer(1, 3), boundaries[-1] // size
    made = torch.Generator().manual_seed(choices.integer(0, 1000))
    dtype = choices.one_of([torch.float64, torch.float32])
    kept = choices.one_of([0.0, 0.3, 0.7, 1.0])
    shares = range(microbatches)
    return LossCase(
        normalization=choices.one_of(NORMALIZATIONS),
        size=size,
        losses=[[torch.rand(share, generator=made, dtype=dtype) * 9 for _ in shares] for _ in range(data * size)],
        masks=[
            [(torch.rand(share, generator=made) < kept * choices.integer(0, 1)).float() for _ in shares]
            for _ in range(data * size)
        ],
        boundaries=boundaries,
        depths=choices.integer(0, 2),
    )


def _text(choices: Choices) -> str:
    """Draw one to four words. Each word ends with a space, so that it does not merge with the next."""
    return "".join(f"{_WORDS[each]} " for each in choices.integers(0, len(_WORDS) - 1, fewest=1, longest=4))


def draw_cross_entropy(choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw logits [n, V] float32 or float64 and targets [n], some of them -100."""
    count, width = choices.integer(1, 12), choices.integer(1, 20)
    made = torch.Generator().manual_seed(choices.integer(0, 1000))
    dtype = choices.one_of([torch.float32, torch.float64])
    targets = torch.randint(0, width, (count,), generator=made)
    targets[torch.rand(count, generator=made) < 0.2] = -100
    return torch.randn(count, width, generator=made, dtype=dtype) * choices.one_of([1, 30]), targets


def direct_cases() -> st.SearchStrategy[DirectCase]:
    """Return `draw_direct` as a Hypothesis strategy."""
    return drawn(draw_direct)


def online_cases() -> st.SearchStrategy[OnlineCase]:
    """Return `draw_online` as a Hypothesis strategy."""
    return drawn(draw_online)


def meeting_cases() -> st.SearchStrategy[MeetingCase]:
    """Return `draw_meeting` as a Hypothesis strategy."""
    return drawn(draw_meeting)


def loss_cases() -> st.SearchStrategy[LossCase]:
    """Return `draw_loss` as a Hypothesis strategy."""
    return drawn(draw_loss)


def cross_entropies() -> st.SearchStrategy[tuple[torch.Tensor, torch.Tensor]]:
    """Return `draw_cross_entropy` as a Hypothesis strategy."""
    return drawn(draw_cross_entropy)
