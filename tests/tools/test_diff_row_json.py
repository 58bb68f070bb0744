"""`--json` of diff_row: the schema that its module documents."""

import json

from diff_row_fakes import many, write_case

from tools.diff_row.__main__ import main


def described(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    return status, json.loads(capsys.readouterr().out)


def test_every_documented_key_is_there(capsys, tmp_path):
    case = write_case(tmp_path, many(5), pack_length=24)
    status, found = described(capsys, "--case", case, "--sides", "reference,diff_row_fakes:LEAKY", "--json")
    assert status == 1
    assert set(found) == {
        "schema", "equal", "source", "settings", "tokenizer", "sides", "conversations", "first", "pairs", "differing",
    }  # fmt: skip
    assert found["schema"] == "packproof.diff_row/1"
    assert found["equal"] is False
    assert found["source"] == {
        "file": case, "row": None, "line": None, "case": True, "dump": None, "dump_row": None, "bin": [], "settings_from": {},
    }  # fmt: skip
    assert found["settings"]["pack_length"] == 24
    assert [side["name"] for side in found["sides"]] == ["reference", "diff_row_fakes:LEAKY"]
    assert set(found["sides"][0]) == {
        "name", "version", "refusal", "pack_length", "boundaries", "max_seqlen", "trained_tokens", "report", "flaws",
    }  # fmt: skip
    assert found["conversations"][2] == {
        "number": 2, "roles": ["system", "user", "assistant"], "tokens": 10, "start": 20, "end": 24,
        "padding": 0, "trained": 3, "state": "truncated",
    }  # fmt: skip
    assert found["conversations"][3]["start"] is None
    assert found["pairs"][0]["counts"]["target_ids"] == {"boundary_label": 2}
    assert found["pairs"][0]["fields"]["report.boundary_labels"] == [2, 0]
    assert found["differing"]["target_ids"] == {"count": 2, "first": [9, 19]}


def test_the_first_difference_with_its_neighbourhood(capsys, tmp_path):
    case = write_case(tmp_path, many(2))
    _, found = described(capsys, "--case", case, "--sides", "reference,diff_row_fakes:LEAKY", "--json")
    first = found["first"]
    near = first.pop("neighbourhood")
    assert first == {
        "left": "reference", "right": "diff_row_fakes:LEAKY", "tensor": "target_ids", "class": "boundary_label",
        "position": 9, "left_value": 22, "right_value": -100, "where": "0·2 assistant",
        "conversation": 0, "turn": 2, "role": "assistant", "rules": "R-BOUNDARY-1, R-SHIFT-1",
    }  # fmt: skip
    assert [place["position"] for place in near] == list(range(5, 14))
    assert near[4]["differs"] == ["target_ids", "token_mask"]
    assert near[4]["values"]["target_ids"] == {"reference": 22, "diff_row_fakes:LEAKY": -100}
    assert near[5]["boundary"] == ["reference", "diff_row_fakes:LEAKY"]
    assert near[5]["tokens"]["reference"] == "'w10'"


def test_refusals_and_what_is_not_finite_are_plain_json(capsys, tmp_path):
    case = write_case(tmp_path, many(2))
    status, found = described(
        capsys, "--case", case, "--sides", "reference,diff_row_fakes:REFUSING,diff_row_fakes:NAN", "--json"
    )
    assert status == 1
    assert found["sides"][1]["refusal"]["kind"] == "role_order"
    assert found["sides"][1]["pack_length"] is None
    assert found["first"]["class"] == "refusal"
    assert [pair["equal"] for pair in found["pairs"]] == [False, False, False]
    status, found = described(capsys, "--case", case, "--sides", "reference,diff_row_fakes:NAN", "--json")
    assert found["first"]["right_value"] == "nan"


def test_equal_sides(capsys, tmp_path):
    case = write_case(tmp_path, many(2))
    status, found = described(capsys, "--case", case, "--sides", "reference,diff_row_fakes:SAME", "--json")
    assert (status, found["equal"], found["first"], found["differing"]) == (0, True, None, {})
