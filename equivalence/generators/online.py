"""Hypothesis strategies for microbatches and losses: rows of the direct path, conversations of the online one, shares of losses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

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


@st.composite
def direct_cases(draw: st.DrawFn) -> DirectCase:
    """One to three rows at cp 1 to 4; one case in five has a segment that cannot be cut."""
    size, layout = draw(st.sampled_from(SIZES)), draw(st.sampled_from(["zigzag", "zigzag", "contiguous"]))
    unit = 1 if size == 1 else 2 * size
    pieces = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 3))
    extra = draw(st.integers(1, unit)) if draw(st.integers(0, 4)) == 4 else 0
    boundaries = [
        [
            0,
            *(unit * place for place in sorted(draw(st.sets(st.integers(1, max(pieces - 1, 1)))))),
            unit * pieces + extra,
        ]
        for _ in range(rows)
    ]
    boundaries = [[*dict.fromkeys(each)] for each in boundaries]
    shape = (rows, unit * pieces + extra)
    made = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return DirectCase(
        boundaries=boundaries,
        tensors={
            "input_ids": torch.randint(0, 1000, shape, generator=made),
            "target_ids": torch.randint(-100, 1000, shape, generator=made),
            "token_mask": torch.randint(0, 2, shape, generator=made).float(),
            "position_ids": torch.randint(0, 100, shape, generator=made),
        },
        sample_mask=[1.0] * (rows - 1) + [draw(st.sampled_from([1.0, 1.0, 0.0]))],
        size=size,
        layout=layout,
        depths=draw(st.integers(0, 3)),
    )


@st.composite
def online_cases(draw: st.DrawFn) -> OnlineCase:
    """One to nine conversations of 1 to 12 tokens; some cannot be packed or padded as asked."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
    first = draw(st.integers(1, 900))
    size, tensor = draw(st.sampled_from(SIZES)), draw(st.sampled_from([1, 2]))
    sequence = tensor > 1 and draw(st.booleans())
    factor = (2 * size if size > 1 else 1) * (tensor if sequence else 1)
    # A multiple that is none of the domain factor is refused.
    multiple = draw(st.sampled_from([factor, factor, 2 * factor, factor + 1]))
    counter = itertools.count(first)
    conversations = [
        ([next(counter) for _ in range(length)], draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))
        for length in lengths
    ]
    longest = -(-max(lengths) // multiple) * multiple
    return OnlineCase(
        conversations=conversations,
        uncounted=draw(st.lists(st.integers(0, len(lengths) - 1), max_size=2)),
        multiple=multiple,
        capacity=longest * draw(st.integers(1, 3)) - (draw(st.integers(0, 6)) == 6),
        packer=draw(st.sampled_from(PACKERS)),
        data_parallel_size=draw(st.integers(1, 3)),
        size=size,
        tensor_parallel_size=tensor,
        sequence_parallel=sequence,
        pipeline_parallel_size=draw(st.sampled_from([1, 1, 2])),
        precision=draw(st.sampled_from(["unquantized", *PRECISIONS])),
        hybrid_expert_parallel=draw(st.sampled_from([False, False, False, True])),
        depths=draw(st.sampled_from([0, 0, 1, 3])),
    )


_WORDS = st.lists(st.sampled_from(["w0", "w1", "w2", "w3", "<unk>", "<SPECIAL_233>"]), min_size=1, max_size=4)


@st.composite
def meeting_cases(draw: st.DrawFn) -> MeetingCase:
    """Rows that both paths take whole. Contents hold the pad token of either format; some conversations begin with an answer."""
    prompt_format, preset = draw(
        st.sampled_from(
            [
                *(
                    (each, preset)
                    for each in ("identity", "nemotron-h-aligned")
                    for preset in ("strict", "megatron-lm-main")
                ),
                *(("nemotron-h-aligned", preset) for preset in ("nemo-rl-direct", "megatron-lm-0.19")),
                ("identity", "megatron-lm-main"),  # once more: only here a label reaches across a boundary
            ]
        )
    )
    messages = []
    for _ in range(draw(st.integers(1, 4))):
        answers_first = prompt_format == "identity" and draw(st.booleans())
        prompt = [] if answers_first else draw(_WORDS)
        messages.append({"role": "system", "content": "" if answers_first else _text(draw(_WORDS))})
        for _ in range(draw(st.integers(1, 2))):
            messages.append({"role": "user", "content": _text(prompt)})
            messages.append({"role": "assistant", "content": _text(draw(_WORDS))})
    return MeetingCase(
        messages=messages,
        prompt_format=prompt_format,
        preset=preset,
        size=draw(st.sampled_from(SIZES)),
        spare=draw(st.integers(0, 3)),
        depths=draw(st.sampled_from([0, 0, 2])),
    )


@st.composite
def loss_cases(draw: st.DrawFn) -> LossCase:
    """One to three microbatches on up to two data-parallel and four cp ranks; whole shares and batches may be masked."""
    size, data = draw(st.sampled_from(SIZES)), draw(st.integers(1, 2))
    unit = 1 if size == 1 else 2 * size
    pieces = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    boundaries = [0, *itertools.accumulate(unit * each for each in pieces)]
    microbatches, share = draw(st.integers(1, 3)), boundaries[-1] // size
    made = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    kept = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    shares = range(microbatches)
    return LossCase(
        normalization=draw(st.sampled_from(NORMALIZATIONS)),
        size=size,
        losses=[[torch.rand(share, generator=made, dtype=dtype) * 9 for _ in shares] for _ in range(data * size)],
        masks=[
            [(torch.rand(share, generator=made) < kept * draw(st.integers(0, 1))).float() for _ in shares]
            for _ in range(data * size)
        ],
        boundaries=boundaries,
        depths=draw(st.integers(0, 2)),
    )


def _text(words: list[str]) -> str:
    """Each word ends with a space, so that none merges with its neighbour's."""
    return "".join(f"{word} " for word in words)


@st.composite
def cross_entropies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] float32 or float64 and targets [n], some of them -100."""
    count, width = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    made = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    targets = torch.randint(0, width, (count,), generator=made)
    targets[torch.rand(count, generator=made) < 0.2] = -100
    return torch.randn(count, width, generator=made, dtype=dtype) * draw(st.sampled_from([1, 30])), targets
