"""Rules of packproof's own counts and checks, held to what the installed Megatron-LM, megatron-core and transformers do."""

import functools
import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from equivalence.generators import tokenizers
from equivalence.subjects import RowSettings, load
from equivalence.subjects.megatron_lm import MegatronLM
from production.errors import PackproofError
from production.parallel.sizes import ParallelSizes
from production.tokens.format_fit import format_misfits

PAD = -1
"""An id that no tagged token has."""


class TaggingTokenizer:
    """Gives each token an id of its own in place of a word's, so that a row of SFTDataset shows which tokens it kept."""

    eod, pad, vocab_size, unique_identifiers = 0, PAD, 1 << 20, {}

    def __init__(self):
        self.given = []
        """The ids of each conversation that was tokenized."""

    def tokenize_conversation(self, conversation, **_):
        first = 1 + sum(map(len, self.given))
        ids = np.arange(first, first + len(conversation[0]["content"].split()))
        self.given.append(ids.tolist())
        return ids, ids


def counted_upstream(messages, pack_length, context_parallel_size):
    """Return the counts of R-REPORT-1 and R-REPORT-2 that the installed SFTDataset's own row shows; None where it refuses the row."""
    tokenizer = TaggingTokenizer()
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=pack_length, tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        context_parallel_size=context_parallel_size,
    )  # fmt: skip
    dataset = SFTDataset([messages], None, np.arange(1), 1, Split.train, config)
    try:
        sample = dataset[0]
    except (IndexError, RuntimeError):  # no token in the row, or more boundaries than its tensor holds
        return None
    there = set(sample["tokens"].tolist())
    lost = [[tag for tag in tags if tag not in there] for tags in tokenizer.given]
    whole = sum(not missing for missing in lost)
    cut = sum(0 < len(missing) < len(tags) for missing, tags in zip(lost, tokenizer.given, strict=True))
    ends = (sample["cu_seqlens"] == pack_length).nonzero()
    return {
        "conversations": len(messages),
        "kept": whole,
        "truncated": cut,
        "dropped": len(messages) - whole - cut,
        "empty_conversations": sum(not tags for tags in tokenizer.given),
        "truncated_tokens": sum(map(len, lost)),
        "hidden_segments": len(tokenizer.given) - int(ends[0]),
        "padding_tokens": sample["tokens"].tolist().count(PAD),
    }


LENGTHS = st.lists(st.integers(0, 14) | st.just(0), min_size=1, max_size=9)


@settings(max_examples=300)
@given(lengths=LENGTHS, context=st.sampled_from([1, 1, 2, 4]), multiple=st.integers(1, 4))
def test_r_report_1_and_2_counts_are_what_a_row_of_the_installed_megatron_lm_shows(lengths, context, multiple):
    pack_length = multiple * 2 * context if context > 1 else multiple * 5
    messages = [{"role": "system", "content": " ".join(["w1"] * length)} for length in lengths]
    expected = counted_upstream(messages, pack_length, context)
    asked = RowSettings(pack_length=pack_length, context_parallel_size=context, prompt_format="identity")
    upstream = MegatronLM().build_row(messages, tokenizers.load("word"), asked)
    assert (expected is None) == (upstream.refusal is not None)
    for name in ("reference", "production"):
        built = load(name).build_row(messages, tokenizers.load("word"), asked)
        assert (built.refusal is None) == (expected is not None)
        if expected is not None:
            mask, inner = upstream.token_mask, [b for b in upstream.cu_seqlens.tolist() if 0 < b < pack_length]
            wanted = expected | {
                "trained_tokens": int(mask.sum()),
                "boundary_labels": int(sum(mask[boundary - 1] for boundary in {*inner})),
            }
            assert {key: built.report[key] for key in wanted} == wanted, name


ANSWERS = ("Hello", "a", "1", "w3 w4", "{", "-", "é", "<")
PREFIX = 3
"""Tokens that Megatron-LM leaves out at the beginning of an answer of nemotron-nano-v2."""


@functools.cache
def untrained_are_the_header(name):
    """Return whether the installed SFTTokenizer leaves out just the header's text, with one token for each marker."""
    theirs = SFTTokenizer(str(tokenizers.folder(name)), "nemotron-nano-v2")
    inner = theirs._tokenizer
    for answer in ANSWERS:
        conversation = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": answer}]
        try:
            tokens, targets = theirs.tokenize_conversation(
                conversation, return_target=True, add_generation_prompt=False
            )
        except AssertionError:  # the turns alone are other tokens than the whole
            return False
        text = inner.apply_chat_template(
            conversation, tokenize=False, chat_template=theirs._prompt_config.custom_chat_template
        )
        encoded = inner(text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded["input_ids"] != tokens.tolist():
            return False
        header_ends = text.index("<SPECIAL_11>Assistant\n") + len("<SPECIAL_11>Assistant\n")
        header = [place for place, (_, end) in enumerate(encoded["offset_mapping"]) if end <= header_ends]
        if [place for place, target in enumerate(targets) if target == IGNORE_INDEX] != header:
            return False
        for marker in ("<SPECIAL_11>", "<SPECIAL_12>"):
            ids = [
                tokens[place]
                for place, (start, end) in enumerate(encoded["offset_mapping"])
                if text[start:end] == marker
            ]
            if len(ids) != text.count(marker) or ids[0] == inner.unk_token_id:
                return False
    return True


def test_r_fit_1_and_2_a_format_fits_where_the_installed_megatron_lm_masks_just_its_header():
    names = tokenizers.names()
    ours = {name: not format_misfits(tokenizers.load(name), "nemotron-nano-v2") for name in names}
    theirs = {name: untrained_are_the_header(name) for name in names}
    assert ours == theirs
    assert {*ours.values()} == {True, False}


SIZES = [each for each in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2, 3), (1, 2)) if math.prod(each) <= 12]


def test_r_setup_8_sizes_are_refused_where_the_installed_megatron_core_cannot_make_groups_of_the_world():
    """In a process group that stands for a world of any size, without its processes."""
    found = {}
    for world in (1, 4, 6, 8, 12):
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            for tensor, context, pipeline, expert, expert_tensor in SIZES:
                sizes = ParallelSizes(
                    tensor=tensor, context=context, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor
                )
                found[world, sizes] = (makes_groups(sizes), is_taken(sizes, world))
        finally:
            distributed.destroy_process_group()
    assert not [key for key, (theirs, ours) in found.items() if theirs != ours]
    assert {ours for _, ours in found.values()} == {True, False}


def makes_groups(sizes):
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            context_parallel_size=sizes.context,
            pipeline_model_parallel_size=sizes.pipeline,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            create_gloo_process_groups=False,
        )
    except (RuntimeError, AssertionError):
        return False
    finally:
        parallel_state.destroy_model_parallel()
    return True


def is_taken(sizes, world):
    try:
        sizes.data(world)
    except PackproofError:
        return False
    return True
