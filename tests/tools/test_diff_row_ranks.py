"""The way of a row to one rank: every step on both sides, faults named at the step where they are made."""

import dataclasses
import json

import pytest
import torch
from diff_row_fakes import described, many, write_case, write_rows
from safetensors.torch import load_file

from production.parallel import context_parallel as production_context
from tools.diff_row.rank.coordinates import find_place
from tools.diff_row.rank.diff import differences_of

FAULTS = "diff_row_rank_fakes"


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path, [many(3), many(2), many(1), many(3, (2, 5, 3))])


def of(file, row=0):
    return [file, "--row", row, "--tokenizer", "word", "--prompt-format", "identity", "--pack-length", 48]


def step_of(found, name, depth=0):
    return next(step for step in found["steps"] if (step["step"], step["depth"]) == (name, depth))


def test_ranks_count_tp_fastest_then_cp_dp_and_pp_slowest():
    seen = set()
    for rank in range(2 * 3 * 2 * 2):
        place = find_place(tp=2, cp=3, dp=2, pp=2, rank=rank)
        here = place.tensor_rank, place.context_rank, place.data_rank, place.pipeline_rank
        assert rank == here[0] + 2 * (here[1] + 3 * (here[2] + 2 * here[3]))
        seen.add(here)
    assert len(seen) == 24


def test_all_sides_are_equal_at_every_step_of_every_rank(run, rows):
    owned = []
    for rank in range(4):
        status, found = described(run, *of(rows), "--tp", 2, "--cp", 2, "--depth", 2, "--rank", rank)
        assert (status, found["equal"], found["first"]) == (0, True, None)
        names = [(step["step"], step["depth"]) for step in found["steps"]]
        assert names == [
            *(("row", 0), ("batch", 0), ("microbatch", 0), ("depth", 1), ("depth", 2)),
            *(("share", 0), ("share", 1), ("share", 2), ("slice", 0), ("slice", 1), ("slice", 2)),
        ]
        for step in found["steps"]:
            assert set(step["sides"]) == {"reference", "production", "megatron_lm"}
            assert all("kind" not in side for side in step["sides"].values())
            left, right = (set(step["sides"][name]) for name in ("reference", "production"))
            assert left == right
        owned.append([run for segment in found["segments"] for run in segment["runs"]])
    assert owned[0] == owned[1] != owned[2] == owned[3]
    positions = [p for runs in (owned[0], owned[2]) for start, end in runs for p in range(start, end)]
    assert sorted(positions) == list(range(48))


@pytest.mark.parametrize(
    ("fault", "first", "tensor", "cause"),
    [
        ("SWAPPED", "share", "positions", "this rank's two chunks in the other order"),
        ("OTHER_RANK", "share", "positions", "what cp rank 0 owns"),
        ("NEXT_DEPTH", "depth 1", "input_ids", "that of depth 2"),
        ("FLAT_SHIFT", "depth 1", "input_ids", "shifted across the ends of segments"),
        ("ANDED", "depth 1", "token_mask", "and-ed with the mask at the position itself"),
        ("LATE_SHIFT", "share, depth 1", "input_ids", "shifted after the cut, inside the share"),
        ("UNMASKED", "share", "token_mask", "differs"),
    ],
)
def test_a_fault_is_named_at_the_step_where_it_is_made(run, rows, fault, first, tensor, cause):
    side = f"{FAULTS}:{fault}"
    status, found = described(
        run, *of(rows), "--cp", 2, "--rank", 1, "--depth", 1, "--sides", f"reference,production,{side}"
    )
    assert (status, found["equal"], found["first"]) == (1, False, first)
    step = next(s for s in found["steps"] if not s["equal"])
    told = step["differences"][0]
    assert (told["left"], told["right"], told["tensor"], told["cause"]) == ("reference", side, tensor, cause)
    assert all(each["right"] == side for s in found["steps"] for each in s["differences"])


def test_a_place_is_mapped_back_to_position_conversation_and_token(run, rows):
    sides = f"reference,{FAULTS}:UNMASKED"
    _, found = described(run, *of(rows), "--cp", 2, "--rank", 1, "--sides", sides)
    told = step_of(found, "share")["differences"][0]
    index = [p for segment in found["segments"] for start, end in segment["runs"] for p in range(start, end)]
    assert (told["place"], told["position"]) == (3, index[3])
    _, out, _ = run(*of(rows), "--cp", 2, "--rank", 1, "--sides", sides)
    assert f"DIFFERENT first at step share in token_mask at place 3 = position {index[3]} of the row" in out
    assert "(conversation 0·" in out
    assert "rank 1 of 2   tp 0 of 1 · cp 1 of 2 · dp 0 of 1 · pp 0 of 1" in out


def test_a_fault_in_productions_own_cut_is_found(run, rows, monkeypatch):
    zigzag = production_context.LAYOUTS["zigzag"]
    wrong = dataclasses.replace(zigzag, owned=lambda rank, size: (2 * size - 1 - rank, rank))
    monkeypatch.setitem(production_context.LAYOUTS, "zigzag", wrong)
    status, found = described(run, *of(rows), "--cp", 2, "--rank", 0)
    assert (status, found["first"]) == (1, "share")
    step = step_of(found, "share")
    assert {(each["right"], each["cause"]) for each in step["differences"]} == {
        ("production", "this rank's two chunks in the other order")
    }


def test_a_fault_of_the_row_is_one_of_the_row_and_its_class_is_reported(run, rows):
    status, found = described(run, *of(rows), "--cp", 2, "--sides", "reference,diff_row_fakes:TOKEN")
    assert (status, found["first"]) == (1, "row")
    told = step_of(found, "row")["differences"][0]
    assert (told["tensor"], told["position"], told["cause"]) == ("input_ids", 7, "token")
    assert found["ways"]["diff_row_fakes:TOKEN"] == "reference"


@pytest.mark.parametrize("stop", ["row", "batch", "microbatch", "depth", "share", "slice"])
def test_the_trace_ends_at_the_given_step(run, rows, stop):
    depth = ["--depth", 1] if stop in ("depth", "share", "slice") else []
    status, found = described(run, *of(rows), "--cp", 2, "--stop-at", stop, *depth)
    assert (status, found["steps"][-1]["step"]) == (0, stop)


def test_a_segment_that_does_not_divide_is_refused_with_what_where_and_fix(run, rows):
    arguments = [*of(rows), "--cp", 4, "--context-parallel-size", 1]
    status, found = described(run, *arguments)
    refused = step_of(found, "share")["sides"]
    assert (status, refused["reference"]["kind"], refused["production"]["kind"]) == (
        0,
        "indivisible_segment",
        "indivisible_segment",
    )
    _, out, _ = run(*arguments, columns=200)
    assert "REFUSED at share by reference, production: indivisible_segment" in out
    assert "segment 0 has 10 tokens, which 8 does not divide" in out
    assert "To fix it: build the row for cp 4" in out
    assert "the row is built for cp 1 and cut for cp 4" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cp", 2, "--rank", 2], "--rank: there is no rank 2 among tp 1 · cp 2 · dp 1 · pp 1 = 2 ranks"),
        (["--cp", 0], "--cp: must be at least 1, got 0"),
        (["--stop-at", "depth"], "without multi-token prediction"),
        (["--depth", -1], "--depth: -1 depths"),
        (["--depth", 1, "--stop-at", "batch"], "would show nothing"),
        (["--stop-at", "home"], "choose one of row, batch"),
        (["--cp", 2, "--layout", "spiral"], "no layout is called 'spiral'"),
        (["--tp", 5], "a share of 48 tokens, which tp 5 does not divide"),
        (["--cp", 2, "--at", 48], "there is no 48"),
        (["--cp", 2, "--global-batch-size", 4], "only for weights"),
        (["--dp", 2, "--rank", 1, "--stop-at", "weights"], "take --rank 0"),
        (["--dp", 2, "--stop-at", "weights", "--global-batch-size", 3], "give a multiple of dp"),
        (
            ["--cp", 2, "--sides", f"reference,{FAULTS}:RAISING"],
            "could not go on from its row (KeyError: 'no such chunk')",
        ),
        (["--fed", "nowhere", "--cp", 2], "the dump says its own layout"),
    ],
)
def test_what_cannot_be_is_refused_with_what_where_and_fix(run, rows, arguments, says):
    status, out, err = run(*of(rows), *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert "To fix it: " in err
    assert len(err.splitlines()) == 1


def test_a_case_has_no_global_batch(run, tmp_path):
    status, _, err = run("--case", write_case(tmp_path, many(2)), "--stop-at", "weights")
    assert status == 2
    assert "give FILE --row N" in err


def test_weights_of_a_global_batch_are_equal_and_add_up(run, rows, tmp_path):
    total, shares = {}, 0
    for row in range(2):
        for context in range(2):
            out = tmp_path / "steps.safetensors"
            arguments = [*of(rows, row), "--cp", 2, "--dp", 2, "--rank", 2 * row + context, "--stop-at", "weights"]
            status, _, err = run(*arguments, "--sides", "reference,production", "--write-dump", out)
            assert (status, [line for line in err.splitlines() if not line.startswith("note: ")]) == (0, [])
            tensors = load_file(out)
            shares += bool(tensors["share/reference/token_mask"].any())
            for side in ("reference", "production"):
                for name in ("per_token", "mean_of_means", "global_valid_tokens"):
                    key = side, name
                    total[key] = total.get(key, 0) + float(tensors[f"weights/{side}/{name}"].sum())
    # A mean of means gives each share the same weight, and a share without a target loses it.
    expected = {key: shares / 4 if key[1] == "mean_of_means" else 1.0 for key in total}
    assert total == pytest.approx(expected, rel=1e-6)


def test_the_screen_says_what_every_stage_does_with_the_same_microbatch(run, rows):
    stages = {}
    for rank in range(3):
        _, out, _ = run(*of(rows), "--pp", 3, "--rank", rank, columns=200)
        stages[rank] = out
        assert "every stage is given the same microbatch, share and boundaries" in out
    assert "stage 0 of 3: embeds tokens" in stages[0]
    assert "stage 1 of 3: neither embeds nor computes losses; reads only boundaries" in stages[1]
    assert "stage 2 of 3: computes losses" in stages[2]


def test_slices_of_the_tp_ranks_are_the_share(run, rows, tmp_path):
    parts = []
    for rank in (2, 3):
        out = tmp_path / f"{rank}.safetensors"
        run(*of(rows), "--tp", 2, "--cp", 2, "--rank", rank, "--write-dump", out)
        tensors = load_file(out)
        assert torch.equal(tensors["slice/reference/positions"], tensors["slice/production/positions"])
        parts.append(tensors["slice/origin"])
    assert torch.equal(torch.cat(parts), tensors["share/origin"])


def test_the_layout_contiguous_has_two_sides_and_no_third(run, rows):
    status, found = described(run, *of(rows), "--cp", 2, "--rank", 1, "--layout", "contiguous", "--depth", 1)
    assert (status, found["equal"]) == (0, True)
    share = step_of(found, "share", 1)["sides"]
    assert share["megatron_lm"]["kind"] is None
    assert share["production"]["input_ids"]["shape"] == [24]


def test_one_position_is_followed_to_the_rank_that_owns_it(run, rows):
    places = []
    for rank in range(2):
        _, found = described(run, *of(rows), "--cp", 2, "--rank", rank, "--at", 5, "--depth", 1)
        at_share = next(each for each in found["followed"] if each["step"] == "share")
        places.append(at_share["place"])
        deeper = next(each for each in found["followed"] if each["step"] == "depth 1")
        assert deeper["values"]["reference"]["position_ids"] == 6
    assert sorted(place is None for place in places) == [False, True]


def test_the_page_carries_every_step_and_escapes_what_the_row_contains(run, tmp_path):
    turn = [{"role": "system", "content": "</script><b>w1 "}, *many(1)[1:]]
    file = write_rows(tmp_path, [turn])
    page = tmp_path / "page.html"
    sides = f"reference,{FAULTS}:SWAPPED"
    status, _, _ = run(*of(file), "--tp", 2, "--cp", 2, "--rank", 2, "--depth", 1, "--sides", sides, "--html", page)
    text = page.read_text()
    assert status == 1
    assert "</script><b>" not in text
    facts = json.loads(text.split('id="facts">')[1].split("</script>")[0])
    assert [view["label"] for view in facts["views"]] == ["row", "microbatch", "depth 1", "share", "share, depth 1"]
    assert facts["views"][facts["shown"]]["label"] == "share"
    assert text.count('id="step"') == 1
    assert "this rank&#39;s two chunks in the other order" in text
    for view in facts["views"]:
        for name in view["arrays"]:
            assert f'id="data-{view["prefix"]}{name}"' in text


# What a job dumps.


def test_what_is_wrong_with_a_sides_row_is_reported_in_words_at_a_rank_too(run, rows):
    _, out, _ = run(*of(rows), "--cp", 2, "--rank", 1, "--sides", "reference,diff_row_fakes:SHIFTED")
    assert "FLAW  diff_row_fakes:SHIFTED: labels are shifted by two" in out


@pytest.mark.parametrize("option", ["--depth", "--rank", "--cp", "--row"])
def test_what_is_no_count_is_refused_in_words(run, rows, capsys, option):
    with pytest.raises(SystemExit) as stopped:
        run(rows, "--tokenizer", "word", option, "1,2")
    assert stopped.value.code == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"{option}: '1,2' is not one whole number, such as 2" in told
    assert "None" not in told


def test_slice_and_weights_stand_on_one_screen(run, rows):
    asked = ["--tp", 2, "--cp", 2, "--rank", 1, "--stop-at", "weights"]
    status, found = described(run, *of(rows), *asked)
    assert status == 0
    assert [each["step"] for each in found["steps"]] == ["row", "batch", "microbatch", "share", "slice", "weights"]
    _, out, _ = run(*of(rows), *asked)
    assert "places 12..24 of the share" in out
    assert "of the file (from 0)" in out
    alone = [each["step"] for each in described(run, *of(rows), *asked, "--no-sequence-parallel")[1]["steps"]]
    assert alone == ["row", "batch", "microbatch", "share", "weights"]


def test_tensors_that_differ_alike_are_listed_in_the_order_of_the_step_and_not_of_a_set():
    names = [f"tensor_{number}" for number in (7, 2, 9, 4, 0, 5, 8, 1)]
    left, right = ({name: torch.zeros(size) for name in names} for size in (3, 2))
    assert [each.tensor for each in differences_of("batch", 0, {"a": left, "b": right})] == names


def test_an_option_of_a_dump_is_refused_without_one_and_so_are_names_that_nobody_knows(run, rows, tmp_path):
    status, _, err = run(*of(rows), "--microbatch", 0)
    assert (status, "--microbatch: only a job's dump has microbatches" in err) == (2, True)
    status, _, err = run(*of(rows), "--cp", 2, "--write-dump", tmp_path / "x", "--dump-names", "theirs")
    assert (status, "--dump-names theirs: choose one of" in err) == (2, True)


def test_a_token_from_right_to_left_has_no_escape_on_the_screen_and_page_of_a_rank(run, tmp_path):
    case, html = write_case(tmp_path, many(2), tokenizer="nemotron-mini", pack_length=64), tmp_path / "rank.html"
    _, out, _ = run("--case", case, "--cp", 2, "--sides", "reference,diff_row_fakes:ARABIC", "--html", html)
    assert "DIFFERENT first at step row in input_ids" in out
    assert "1280 'ا\u200e'" in out
    assert "\\u200e" not in out
    assert "\\u200e" not in html.read_text().split("<script")[0]
