"""Sides whose way from the row to a rank has a known fault: each is the reference's way, changed at one step."""

import itertools
from dataclasses import replace

import torch

from equivalence.subjects import load
from tools.diff_row.rank.backends import reference_way

NAMES = ("input_ids", "target_ids", "token_mask", "position_ids")
REFERENCE = load("reference")


class Way:
    def __init__(self, change):
        self.name = "fake"
        self.change = change

    def build_row(self, messages, tokenizer, settings):
        return REFERENCE.build_row(messages, tokenizer, settings)

    def collate(self, rows, settings):
        return REFERENCE.collate(rows, settings)

    def cut_row(self, row, cut):
        return self.change(dict(reference_way(row, cut)), row, cut)


def shares(way, index):
    """Every tensor of the share taken with another index, from the whole row at its depth."""
    found = dict(way)
    for name in way:
        if name.startswith("share"):
            whole = way[name.replace("share, ", "") if "," in name else "microbatch"]
            found[name] = {n: whole[n][index] if n in NAMES else tensor for n, tensor in way[name].items()}
    return found | {"share": {**found["share"], "positions": index}}


def swapped(way, row, cut):
    """Of each segment the later chunk first."""
    index, parts = way["share"]["positions"], []
    edges = torch.tensor([0, *(row.cu_seqlens[1:] // cut.size).tolist()])
    for start, end in itertools.pairwise(edges):
        first, second = index[start:end].chunk(2)
        parts += [second, first]
    return shares(way, torch.cat(parts))


def other_rank(way, row, cut):
    other = reference_way(row, replace(cut, rank=(cut.rank + 1) % cut.size))
    return way | {name: tensors for name, tensors in other.items() if name.startswith("share")}


def next_depth(way, row, cut):
    deeper = reference_way(row, replace(cut, depths=cut.depths + 1))
    moved = {}
    for depth in range(1, cut.depths + 1):
        for name in (f"depth {depth}", f"share, depth {depth}"):
            moved[name] = deeper[name.replace(f"depth {depth}", f"depth {depth + 1}")]
    return way | moved


def late_shift(way, row, cut):
    """Rolled after the cut, within the share: what a rank does that does not ask its neighbor."""
    share, found = way["share"], {}
    edges = (row.cu_seqlens // cut.size).tolist()
    for name in NAMES:
        made = torch.zeros_like(share[name])
        for start, end in itertools.pairwise(edges):
            made[start : end - 1] = share[name][start + 1 : end]
        found[name] = made
    return way | {"share, depth 1": found}


def flat_shift(way, _row, _cut):
    whole, index = way["microbatch"], way["share"]["positions"]
    rolled = {name: torch.roll(whole[name], -1) for name in NAMES}
    return way | {"depth 1": rolled, "share, depth 1": {name: each[index] for name, each in rolled.items()}}


def anded(way, _row, _cut):
    whole, index = way["microbatch"], way["share"]["positions"]
    mask = way["depth 1"]["token_mask"] * whole["token_mask"]
    return way | {
        "depth 1": {**way["depth 1"], "token_mask": mask},
        "share, depth 1": {**way["share, depth 1"], "token_mask": mask[index]},
    }


def unmasked(way, _row, _cut):
    """The mask of the whole microbatch is set at one place that this rank owns."""
    mask = way["share"]["token_mask"].clone()
    mask[3] = 1 - mask[3]
    return way | {"share": {**way["share"], "token_mask": mask}}


def raising(_way, _row, _cut):
    raise KeyError("no such chunk")


RAISING = Way(raising)
SWAPPED, OTHER_RANK, NEXT_DEPTH = Way(swapped), Way(other_rank), Way(next_depth)
LATE_SHIFT, FLAT_SHIFT, ANDED, UNMASKED = Way(late_shift), Way(flat_shift), Way(anded), Way(unmasked)
