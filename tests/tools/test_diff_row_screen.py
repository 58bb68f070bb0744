"""The screen and the exit status of diff_row."""

import runpy
import sys
from pathlib import Path

import pytest
from diff_row_fakes import conversation, many, write_case, write_rows
from rich.cells import cell_len


def sides(*names):
    return ["--sides", ",".join(["reference", *(f"diff_row_fakes:{name}" for name in names)])]


def test_equal_sides_exit_0_and_say_how_much_was_compared(run, tmp_path):
    status, out, err = run("--case", write_case(tmp_path, many(2)), *sides("SAME"))
    assert (status, err) == (0, "")
    assert "EQUAL reference = diff_row_fakes:SAME" in out
    assert "32 positions, 3 boundaries, 19 trained tokens" in out


@pytest.mark.parametrize(
    ("side", "place", "values", "counts"),
    [
        ("TOKEN", "token in input_ids at position 7", "19 'w7' ≠ diff_row_fakes:TOKEN 99 'w87'", "token 1"),
        ("POSITION", "position in position_ids at position 3", "3 ≠ diff_row_fakes:POSITION 5", "position 1"),
        (
            "LEAKY",
            "boundary label in target_ids at position 9",
            "22 'w10' ≠ diff_row_fakes:LEAKY -100",
            "boundary label 1",
        ),
        ("SHIFTED", "shift in target_ids at position 0", "13 'w1' ≠ diff_row_fakes:SHIFTED 14 'w2'", "shift"),
        ("LONGEST", "max seqlen in max_seqlen", "22 ≠ diff_row_fakes:LONGEST 23", "max_seqlen       1  22 ≠ 23"),
    ],
)
def test_the_first_difference_is_named_with_place_class_and_both_values(run, tmp_path, side, place, values, counts):
    status, out, _ = run("--case", write_case(tmp_path, many(2)), *sides(side))
    assert status == 1
    assert f"DIFFERENT {place}" in out
    assert values in out
    assert counts in out.split("  differ  ")[-1]


def test_the_place_is_marked_and_every_differing_cell_in_its_neighbourhood(run, tmp_path):
    _, out, _ = run("--case", write_case(tmp_path, many(2)), *sides("LEAKY"))
    marked = [line.split() for line in out.splitlines() if line.lstrip().startswith("▶ 9")]
    assert marked == [["▶", "9", "'w9'", "0·2", "assistant", "21", "22*", "-100*", "1*", "0*", "9"]]
    assert "── boundary 10 ──" in out
    assert "next  docs/SPEC.md R-BOUNDARY-1, R-SHIFT-1" in out


def test_a_shift_by_two_is_recognised(run, tmp_path):
    _, out, _ = run("--case", write_case(tmp_path, many(3)), *sides("SHIFTED"))
    assert "FLAW  diff_row_fakes:SHIFTED: labels are shifted by two" in out


@pytest.mark.parametrize("rank", [(), ("--cp", 4, "--rank", 2, "--depth", 1)])
def test_the_tables_of_positions_fit_80_columns(run, rank):
    examples = Path(__file__).parents[2] / "examples"
    file, tokenizer = examples / "packed" / "sample.jsonl.packed", examples / "tokenizers" / "nemotron-mini"
    wrong = "reference,equivalence.mutants.subjects:shift_twice"
    _, out, _ = run(file, "--row", 17, "--tokenizer", tokenizer, "--sides", wrong, *rank, columns=80)
    tables = out.splitlines()
    heads = [n for n, line in enumerate(tables) if line.split()[:2] in (["position", "token"], ["step", "place"])]
    assert len(heads) == (2 if rank else 1)
    for head in heads:
        lines = tables[head : tables.index("", head)]
        assert len(lines) > 8
        assert all(line.startswith("  ") for line in lines), "none is broken"


def test_sides_that_agree_share_a_column_and_every_pair_is_counted(run, tmp_path):
    status, out, _ = run("--case", write_case(tmp_path, many(2)), *sides("SAME", "MASK"))
    assert status == 1
    assert "mask ab  mask c" in out
    pairs = [line.split("  ")[1:3] for line in out.split("  differ  ")[-1].splitlines()[1:3]]
    assert [pair[0] for pair in pairs] == ["a = b", "a ≠ c, b ≠ c"]


def test_a_boundary_that_one_side_lacks_is_a_line_that_says_so(run, tmp_path):
    case = write_case(tmp_path, many(2, (1, 1, 1)), context_parallel_size=2)
    status, out, _ = run("--case", case, *sides("UNPADDED"))
    assert status == 1
    assert "── boundary 3 only in diff_row_fakes:UNPADDED" in out
    assert "── boundary 4 only in reference" in out


def test_what_a_row_lost_is_shown(run, tmp_path):
    _, out, _ = run("--case", write_case(tmp_path, many(5), pack_length=24), *sides("SAME"))
    states = [
        line.split()[-1]
        for line in out.splitlines()
        if line.split() and line.split()[-1] in ("kept", "truncated", "dropped")
    ]
    assert states == ["kept", "kept", "truncated", "dropped", "dropped"]
    assert "kept 2 · truncated 1 · dropped 2 · truncated_tokens 6" in out


def test_a_refusal_says_who_where_and_what_the_others_built(run, tmp_path):
    status, out, _ = run("--case", write_case(tmp_path, many(2)), *sides("REFUSING"))
    assert status == 1
    assert "REFUSED by diff_row_fakes:REFUSING: role_order  at conversation 1, turn 2" in out
    assert "built   by reference: 32 positions, 2 segments, 19 trained" in out
    assert "\x1b" not in out


def test_a_row_that_all_refuse_alike_is_equal(run, tmp_path):
    case = write_case(tmp_path, [{"role": "user", "content": ""}])
    status, out, _ = run("--case", case, *sides("SAME"))
    assert status == 0
    assert out.count("empty_row") >= 2
    assert "all refuse the row alike" in out


def test_a_nan_in_a_mask_is_a_difference(run, tmp_path):
    status, out, _ = run("--case", write_case(tmp_path, many(2)), *sides("NAN"))
    assert status == 1
    assert "nan*" in out


def test_rows_of_different_lengths_are_compared_by_shape(run, tmp_path):
    status, out, _ = run("--case", write_case(tmp_path, many(2)), *sides("SHORT"))
    assert status == 1
    assert "dtype or shape" in out


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_hundreds_of_conversations_fit_one_screen(run, tmp_path, columns):
    case = write_case(tmp_path, many(300), pack_length=4096)
    _, out, _ = run("--case", case, *sides("SAME", "LEAKY"), columns=columns)
    lines = out.splitlines()
    assert len(lines) <= 44
    assert max(map(cell_len, lines)) <= columns
    assert any(line.split()[:2] == ["▶", "0"] for line in lines)
    assert "… 29" in out
    assert any(line.split()[:1] == ["299"] for line in lines)


def test_hostile_texts_keep_their_columns_and_send_no_control(run, tmp_path):
    texts = ["שלום", "\u202eevil", "e\u0301\u0301", "\x1b[31m", "日本語", "a\u200db", "👩‍👩‍👧", "مرحبا", "⏎\n\t"]
    messages = [{"role": "user", "content": "".join(texts)}, {"role": "assistant", "content": "w1"}]
    case = write_case(tmp_path, messages, tokenizer="nemotron-mini", pack_length=64)
    _, out, _ = run("--case", case, "--sides", "reference,diff_row_fakes:POSITION")
    assert "\x1b" not in out
    assert not set(out) & {"\u202e", "\u200d", "\t", "\x07"}
    rows = [line for line in out.splitlines() if "  0·" in line]
    assert len(rows) == 8
    assert len({cell_len(line[: line.index("0·")]) for line in rows}) == 1


def test_a_row_of_a_packed_file(run, tmp_path):
    file = write_rows(tmp_path, [conversation(0), conversation(50)])
    arguments = ["--tokenizer", "word", "--prompt-format", "identity", "--pack-length", "16", *sides("SAME")]
    status, out, _ = run(file, "--row", 1, *arguments)
    assert status == 0
    assert f"{file}row1(fileline2)" in "".join(out.split()), "a long path wraps anywhere"
    status, _, err = run(file, "--row", 2, *arguments)
    assert status == 2
    assert "has rows 0 to 1, there is no row 2" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to look at"),
        (["{file}", "--tokenizer", "word"], "--row N"),
        (["{file}", "--row", "0"], "--tokenizer DIR"),
        (["{folder}/none.jsonl", "--row", "0", "--tokenizer", "word"], "there is no file"),
        (["{file}", "--row", "-1", "--tokenizer", "word"], "there is no row -1"),
        (["{file}", "--row", "0", "--tokenizer", "{folder}/none"], "cannot be loaded"),
        (
            ["{file}", "--row", "0", "--tokenizer", "word", "--sides", "reference,nobody"],
            "no subject is called 'nobody'",
        ),
        (["{file}", "--row", "0", "--tokenizer", "word", "--sides", "reference,no_module:x"], "no_module"),
        (["{file}", "--row", "0", "--tokenizer", "word", "--sides", "reference,diff_row_fakes:Nobody"], "Nobody"),
        (["{file}", "--row", "0", "--tokenizer", "word", "--sides", "reference"], "give two or more"),
        (["{file}", "--row", "0", "--tokenizer", "word", "--sides", "reference,reference"], "each side once"),
        (
            ["{file}", "--row", "0", "--tokenizer", "word", "--pack-length", "0"],
            "pack_length must be at least 1, got 0",
        ),
        (["{file}", "--row", "0", "--tokenizer", "word", "--prompt-format", "chatml"], "prompt_format 'chatml'"),
        (
            [
                "{file}",
                "--row",
                "0",
                "--tokenizer",
                "word",
                "--semantics",
                "lax",
                "--sides",
                "reference,diff_row_fakes:SAME",
            ],
            "lax",
        ),
        (["{file}", "--row", "0", "--tokenizer", "word", "--sides", "reference,diff_row_fakes:RAISING"], "two lines"),
        (["--case", "{folder}/none.json"], "none.json"),
        (["--case", "{file}"], "save the case again"),
        (["--dump", "{folder}/none.safetensors"], "there is no dump"),
        (["--dump", "{file}"], "cannot be read as safetensors"),
        (["{bad}", "--row", "0", "--tokenizer", "word"], "line 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run, tmp_path, arguments, says):
    file = write_rows(tmp_path, [conversation(0)])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [1\n')
    filled = [argument.format(file=file, folder=tmp_path, bad=bad) for argument in arguments]
    status, out, err = run(*filled)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err


def test_as_a_program_it_exits_with_its_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["diff_row", "--case", str(tmp_path / "none.json")])
    monkeypatch.delitem(sys.modules, "tools.diff_row.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tools.diff_row.__main__", run_name="__main__", alter_sys=True)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("packproof-diff-row: ")
