"""The generators keep their promises: each class is hit in each format, rows shrink, tokenizers have the ids they say."""

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from equivalence import subjects
from equivalence.cases.row import RowCase
from equivalence.generators import row_facts, tokenizers
from equivalence.generators.faults.registry import classes
from equivalence.generators.rows import batches, hits, rows
from equivalence.runner.job import Job
from equivalence.runner.job_runners import run
from equivalence.subjects import PROMPT_FORMATS, RowSettings

QUIET = settings(
    max_examples=300,
    database=None,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def ids(name, text):
    return tokenizers.load(name)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
def test_every_class_is_hit_by_the_rows_aimed_at_it(prompt_format):
    missed = []
    for each in classes().values():
        if each.applies(prompt_format):
            job = Job(
                kind="rows", subjects=("reference",), prompt_format=prompt_format, aim=each.name, seed=1, examples=5
            )
            tally = run(job)
            assert not tally.errors
            assert tally.aimed[each.name, prompt_format]
            if not tally.hits[each.name, prompt_format]:
                missed.append(each.name)
    assert not missed


def test_a_class_that_cannot_occur_says_why_and_refuses_to_be_drawn():
    for each in classes().values():
        assert set(each.not_in) < set(PROMPT_FORMATS)
        assert all(len(reason) > 10 for reason in each.not_in.values())
    with pytest.raises(ValueError, match="cannot occur"):
        find(rows("nemotron-nano-v2", classes()["empty_last"]), lambda _: True, settings=QUIET)


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
def test_a_row_with_a_boundary_shrinks_to_two_short_conversations(prompt_format):
    reference = subjects.load("reference")

    def has_boundary(case):
        row = reference.build_row(case.messages, tokenizers.load(case.tokenizer), case.settings)
        return row.refusal is None and len(row.cu_seqlens) > 2

    case = find(rows(prompt_format, classes()["length_p"]), has_boundary, settings=QUIET)
    assert len(case.messages) <= 6
    assert {message["content"].strip() for message in case.messages} <= {"w0", ""}
    assert case.tokenizer == "word"
    assert case.settings.semantics == "megatron-lm-0.19"
    assert case.settings.context_parallel_size == 1


def test_detectors_recognise_a_class_by_the_row_and_not_by_its_label():
    message = {"role": "system", "content": "w0"}
    case = RowCase(
        messages=(message,),
        settings=RowSettings(pack_length=9),
        tokenizer="word",
        labels=("length_p", "lone_surrogate"),
    )
    row = subjects.load("reference").build_row(case.messages, tokenizers.load("word"), case.settings)
    found = hits(case, row)
    assert "length_p" not in found
    assert "lone_surrogate" not in found
    assert "tokenizer word" in found


def test_rows_of_a_batch_share_their_settings():
    drawn = find(batches("identity"), lambda cases: len(cases) > 1, settings=QUIET)
    assert len({case.settings for case in drawn}) == 1
    assert len({case.tokenizer for case in drawn}) == 1


@pytest.mark.parametrize("name", tokenizers.RECIPES)
def test_a_tokenizer_is_written_to_its_folder(name):
    loaded = tokenizers.load(name)
    assert loaded.name_or_path == str(tokenizers.folder(name))
    assert (tokenizers.folder(name) / "tokenizer_config.json").is_file()
    assert tokenizers.load(name) is loaded


def test_an_unknown_tokenizer_is_an_error_that_names_those_there_are():
    with pytest.raises(ValueError, match="choose one of word, bytes"):
        tokenizers.folder("nothing")


def test_word_ids_are_those_of_the_semantics():
    assert ids("word", "w0 w1 w2 zzz w3") == [12, 13, 14, 0, 15]
    assert ids("word", "w0\nw1") == [12, 10, 13]


def test_bytes_merge_across_newlines():
    whole, parts = ids("bytes", "w0\nab"), ids("bytes", "w0\n") + ids("bytes", "ab")
    assert whole != parts


def test_bos_is_added_by_the_post_processor_alone():
    assert tokenizers.load("bos")("w0")["input_ids"] == [1, 12, 2]
    assert ids("bos", "w0") == [12]
    assert tokenizers.load("bos").pad_token_id is None


def test_eos_is_the_pad_token_in_the_tokenizers_that_declare_it():
    loaded = tokenizers.load("eos-pad")
    assert loaded.pad_token_id == loaded.eos_token_id == 2


def test_plain_has_no_special_token_and_no_template():
    loaded = tokenizers.load("plain")
    assert loaded.unk_token_id is loaded.pad_token_id is loaded.eos_token_id is loaded.chat_template is None
    assert loaded.convert_tokens_to_ids("<unk>") is None


@pytest.mark.parametrize(("first", "second"), [("w0\n", "ab"), ("w0\n", "<SPECIAL_11>User")])
def test_huge_turns_that_merge_differ_by_one_in_each_id(first, second):
    whole, parts = ids("huge", first + second), ids("huge", first) + ids("huge", second)
    assert whole != parts
    assert len(whole) == len(parts)
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(whole, parts, strict=True))
    assert min(whole) >= tokenizers.HUGE_ID


def test_stripping_swallows_a_newline_before_a_special_token():
    assert ids("stripping", "w0\n<SPECIAL_11>") == ids("stripping", "w0") + ids("stripping", "<SPECIAL_11>")


def test_own_rendering_measures_what_the_reference_encodes():
    """Facts aim and count without the reference; where a row is built they must agree on its length."""
    reference = subjects.load("reference")
    seen = []

    def agrees(case):
        row = reference.build_row(case.messages, tokenizers.load(case.tokenizer), case.settings)
        found = row_facts.Facts(case)
        if row.refusal is None and found.total >= 0 and found.cut is None:
            seen.append(case)
            own = sum(map(len, found.tokens))
            tail = case.settings.pack_length - found.total
            assert row.report["padding_tokens"] == case.settings.pack_length - own >= tail
        return False

    for prompt_format in PROMPT_FORMATS:
        with pytest.raises(Exception, match=r"(?i)no examples|satisf"):
            find(rows(prompt_format, None), agrees, settings=settings(QUIET, max_examples=40))
    assert len(seen) > 20
