"""A pack with its declared conventions undone is the row that Megatron-LM's conventions give."""

import packers
import pytest

from packproof.conventions import declare, normalise

CONVERSATIONS = [{"tokens": [11, 12, 13], "trained": [1, 1, 1]}, {"tokens": [21, 22], "trained": [0, 1]}]


def row(size=1, pack_length=8):
    (pack,) = packers.right(CONVERSATIONS, pack_length, 0, 2, size)
    pack.pop("shards", None)
    return pack


def undone(pack, size=1, pack_length=8, **conventions):
    return normalise(
        pack,
        conventions,
        conversations=CONVERSATIONS,
        pack_length=pack_length,
        pad_id=0,
        context_parallel_size=size,
    )


def test_megatron_lms_conventions_change_nothing():
    assert undone(row()) == row()
    assert undone(row(2, 16), size=2, pack_length=16) == row(2, 16)


def test_the_shift_is_undone():
    pack = row()
    pack["labels"], pack["mask"] = [-100, *pack["labels"][:-1]], [0, *pack["mask"][:-1]]
    assert (
        undone(pack, shift="model") == {**row(), "labels": [*row()["labels"][:-1], -100]}
        or undone(pack, shift="model") == row()
    )


def test_labels_positions_and_segments_of_padding_are_undone():
    pack = row()
    pack["labels"] = [label if mask else -100 for label, mask in zip(pack["labels"], pack["mask"], strict=True)]
    pack["position_ids"] = [0, 1, 2, 0, 1, 0, 0, 0]
    pack["cu_seqlens"] = [0, 3, 5, 8]
    found = undone(pack, pad_label="ignore", pad_positions="zero", tail="own")
    # The last label of the first conversation stays ignored: no convention is about it.
    assert found == {**row(), "labels": [12, 13, -100, 22, 0, 0, 0, 0]}


def test_a_ragged_row_is_padded_and_one_of_p_plus_1_is_cut():
    pack = {name: values[:5] for name, values in row().items()}
    pack["cu_seqlens"] = [0, 3, 5]
    found = undone(pack, row_length="ragged")
    assert found == row()
    longer = {name: [*values, 0] for name, values in row().items() if name != "cu_seqlens"}
    assert undone({**longer, "cu_seqlens": [0, 3, 9]}, row_length="P+1")["input_ids"] == row()["input_ids"]


def test_a_dropped_last_token_is_put_back():
    pack = {
        "input_ids": [11, 12, 21, 0, 0, 0, 0, 0],
        "labels": [12, 13, 22, -100, -100, -100, -100, -100],
        "position_ids": [0, 1, 0, 1, 2, 3, 4, 5],
        "cu_seqlens": [0, 2, 8],
    }
    found = undone(pack, last_token="dropped", pad_label="ignore")
    assert found == {**row(), "labels": [12, 13, -100, 22, 0, 0, 0, 0]}


def test_a_dropped_last_token_takes_the_place_of_padding_in_its_segment():
    pack = {
        "input_ids": [11, 12, 0, 0, 21, 0, 0, 0],
        "labels": [12, 13, -100, -100, 22, -100, -100, -100],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
        "cu_seqlens": [0, 4, 8],
    }
    found = undone(pack, size=2, last_token="dropped", pad_label="ignore")
    assert found["input_ids"] == [11, 12, 13, 0, 21, 22, 0, 0]
    assert found["cu_seqlens"] == [0, 4, 8]


def test_what_is_wrong_stays_wrong():
    pack = row()
    pack["labels"][0], pack["mask"][3] = 99, 0
    found = undone(pack)
    assert (found["labels"][0], found["mask"][3]) == (99, 0)


def test_an_unknown_convention_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'shift'"):
        declare({"shfit": "data"})
    with pytest.raises(ValueError, match="did you mean 'dropped'"):
        declare({"last_token": "droped"})
