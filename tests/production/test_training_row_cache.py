"""Rows from the cache are the rows that would be built, refusals included, whoever wrote them and however the writer ended."""

import dataclasses
import itertools
import json
import os
import signal

import numpy as np
import pytest
import torch
import training_job_worlds as jobs

from equivalence.generators.tokenizers import load
from production.errors import PackproofError
from production.files.source import open_source
from production.parallel.sizes import RankCoordinates
from production.rows.batch import BatchSettings
from production.rows.builder import Row, RowBuilder, RowSettings
from production.semantics import parse as semantics
from production.training.config import load as load_job
from production.training.config import refusals
from production.training.data import row_cache
from production.training.data.batch_stream import BatchStream
from production.training.data.dataset import BadRow, PackedData, row_facts
from production.training.data.order import Sample
from production.training.data.row_cache import RowCache
from production.training.data.row_record import DamagedRecord, decode, encode

SETTINGS = RowSettings(pack_length=16, prompt_format="identity")
GUARDS = BatchSettings(context_parallel_size=1, data_parallel_size=1, global_batch_size=4)
GB = 10**9
ONLINE = {
    "data.train.dataset_name": "openai_format",
    "policy.sequence_packing.enabled": True,
    "loss.normalization": "global_valid_tokens",
}
PLACE = RankCoordinates(
    rank=0, world_size=1, tensor_rank=0, context_rank=0, context_size=1, data_rank=0, data_size=1, pipeline_rank=0,
    pipeline_size=1,
)  # fmt: skip


def line(number):
    digits = " ".join(f"w{digit}" for digit in f"{number:03}")
    return {
        "messages": [
            {"role": "system", "content": f"{digits} {'w5 ' * (number * 7 % 11)}"},
            {"role": "assistant", "content": "w2 w3 " * (number * 5 % 6 + 1)},
        ]
    }


def source(folder, count=12, bad=()):
    path = folder / "rows.jsonl"
    rows = [{"messages": [{"role": "user", "content": "w1"}]} if n in bad else line(n) for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(path)


def data(rows, folder=None, settings=SETTINGS, **options):
    tokenizer = load("word")
    caches = []
    if folder is not None:
        facts = row_facts(rows, tokenizer, settings)
        caches = [RowCache(folder, facts=facts, rows=len(rows), limit_bytes=options.pop("limit", GB))]
    made = PackedData(sources=[rows], tokenizer=tokenizer, settings=settings, guards=GUARDS, caches=caches)
    return (made, caches[0]) if caches else made


def samples(*rows):
    return [Sample(source=0, row=row, epoch=0) for row in rows]


def bits(item):
    if isinstance(item, PackproofError):
        return type(item), vars(item)
    values = ((field.name, getattr(item, field.name)) for field in dataclasses.fields(item))
    return [(n, (v.dtype, v.numpy().tobytes()) if isinstance(v, torch.Tensor) else v) for n, v in values]


def without_building(made):
    made._builder = None
    return made


@pytest.fixture
def strict_rows(tmp_path):
    """Rows of which numbers 2 and 5 are refused."""
    settings = RowSettings(pack_length=16, prompt_format="nemotron-nano-v2", semantics=semantics("strict"))
    return source(tmp_path, bad=(2, 5)), settings


def test_stored_rows_and_refusals_are_equal_to_built_ones_to_the_bit(tmp_path, strict_rows):
    rows, settings = strict_rows
    built = data(rows, settings=settings).prepare(samples(*range(12)))
    assert [index for index, row in enumerate(built) if isinstance(row, BadRow)] != []
    first, _ = data(rows, tmp_path / "cache", settings)
    assert list(map(bits, first.prepare(samples(*range(12))))) == list(map(bits, built))
    again, cache = data(rows, tmp_path / "cache", settings)
    assert cache.stored() == 12
    stored = without_building(again).prepare(samples(*reversed(range(12))))
    assert list(map(bits, reversed(stored))) == list(map(bits, built))


def test_rows_that_are_not_stored_are_built_among_those_that_are(tmp_path):
    rows = source(tmp_path)
    data(rows, tmp_path / "cache")[0].prepare(samples(1, 3, 4))
    mixed, cache = data(rows, tmp_path / "cache")
    assert cache.stored() == 3
    assert list(map(bits, mixed.prepare(samples(4, 0, 1, 9)))) == list(
        map(bits, data(rows).prepare(samples(4, 0, 1, 9)))
    )
    assert cache.stored() == 5


@pytest.mark.parametrize(
    "changed",
    [
        {"pack_length": 17},
        {"prompt_format": "nemotron-nano-v2"},
        {"context_parallel_size": 2},
        {"semantics": semantics("strict")},
        {"pad_token": "w7"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_settings_are_another_cache(tmp_path, changed):
    rows = source(tmp_path)
    data(rows, tmp_path / "cache")[0].prepare(samples(0))
    assert data(rows, tmp_path / "cache", dataclasses.replace(SETTINGS, **changed))[1].stored() == 0
    assert data(rows, tmp_path / "cache")[1].stored() == 1


def test_another_file_tokenizer_ignored_key_or_version_of_the_code_is_another_cache(tmp_path, monkeypatch):
    rows, tokenizer = source(tmp_path), load("word")
    facts = row_facts(rows, tokenizer, SETTINGS)
    (tmp_path / "other").mkdir()
    others = [
        row_facts(source(tmp_path / "other", count=13), tokenizer, SETTINGS),
        row_facts(rows, load("bytes"), SETTINGS),
        row_facts(rows, tokenizer, SETTINGS, ignored=["weight"]),
    ]
    paths = {RowCache(tmp_path, facts=one, rows=12, limit_bytes=GB).path for one in (facts, *others)}
    monkeypatch.setattr(row_cache, "code_digest", lambda: "another")
    paths.add(RowCache(tmp_path, facts=facts, rows=12, limit_bytes=GB).path)
    assert len(paths) == 5


def test_every_byte_of_a_stored_row_is_checked_when_it_is_read(tmp_path):
    rows = source(tmp_path)
    made, cache = data(rows, tmp_path / "cache")
    made.prepare(samples(3))
    good = bits(cache.get(3))
    for name in ("00000000.rows", "index"):
        path = cache.path / name
        whole = path.read_bytes()
        begin = 0 if name.endswith("rows") else 3 * 32
        end = len(whole) if name.endswith("rows") else 4 * 32
        for at in [*range(begin, end, 7), end - 1]:
            if name == "index" and 4 <= at - begin < 8:
                continue  # reserved
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert cache.get(3) is None, (name, at)
        path.write_bytes(whole)
        assert bits(cache.get(3)) == good
    segment = cache.path / "00000000.rows"
    os.truncate(segment, segment.stat().st_size - 1)
    assert cache.get(3) is None
    assert bits(made.prepare(samples(3))[0]) == bits(data(rows).prepare(samples(3))[0])


def test_a_record_of_one_row_is_not_taken_for_another(tmp_path):
    made, cache = data(source(tmp_path), tmp_path / "cache")
    made.prepare(samples(0, 1))
    index = cache.path / "index"
    whole = index.read_bytes()
    index.write_bytes(whole[32:64] + whole[32:])
    assert cache.get(0) is None


def test_processes_that_are_killed_while_they_write_leave_whole_rows_or_none(tmp_path):
    rows = source(tmp_path, count=200)
    built = list(map(bits, data(rows).prepare(samples(*range(200)))))
    first, cache = data(rows, tmp_path / "cache")
    pids = []
    for start in (0, 0, 50):
        if not (pid := os.fork()):
            for row in range(start, 200):
                first.prepare(samples(row))
            os._exit(0)
        pids.append(pid)
    while cache.stored() < 20:
        pass
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    again, cache = data(rows, tmp_path / "cache")
    assert all(row is None or bits(row) == built[n] for n, row in enumerate(map(cache.get, range(200))))
    assert list(map(bits, again.prepare(samples(*range(200))))) == built
    assert len(list(cache.path.glob("*.rows"))) >= 2


def test_a_cache_in_use_stays_and_one_that_nobody_uses_makes_room(tmp_path):
    rows, folder = source(tmp_path), tmp_path / "cache"
    made, old = data(rows, folder)
    made.prepare(samples(*range(12)))
    small = dataclasses.replace(SETTINGS, pack_length=17)
    made, used = data(rows, folder, small, limit=1)
    assert old.path.exists()
    made.prepare(samples(0))
    assert used.stored() == 0
    old.close()
    used.close()
    _, third = data(rows, folder, dataclasses.replace(SETTINGS, pack_length=18), limit=1)
    assert not old.path.exists()
    assert third.path.exists()


def test_a_full_disk_ends_storing_and_not_the_job(tmp_path, capsys, monkeypatch):
    made, cache = data(source(tmp_path), tmp_path / "cache")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_cache, "_write", full)
    made.prepare(samples(0))
    made.prepare(samples(1))
    assert cache.stored() == 0
    told = capsys.readouterr().err
    assert told.count("no more rows are stored") == 1
    assert "No space left on device" in told


def test_a_folder_that_is_a_file_is_refused_by_its_key(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(PackproofError, match=r"data.cache_dir .*cannot be used"):
        data(source(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("highest", [2**31 - 1, 2**31, 2**40])
def test_ids_beyond_int32_and_other_masks_are_stored_as_they_are(highest):
    row = Row(
        input_ids=torch.tensor([0, highest, -(2**31)]),
        target_ids=torch.tensor([highest, -100, 5]),
        token_mask=torch.tensor([0.0, 1.0, 0.5 if highest > 2**31 else 1.0]),
        position_ids=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        max_seqlen=3,
        context_parallel_size=1,
        report={"padding_tokens": None},
    )
    assert bits(decode(memoryview(encode(row)))) == bits(row)


@pytest.mark.parametrize("bits_of_id", [7, 8, 15, 16, 31, 32])
@pytest.mark.parametrize("lowest", [0, -1, -100, -(1 << 15), -(1 << 16)])
def test_ids_at_the_border_of_every_width_are_stored_as_they_are(bits_of_id, lowest):
    border = 1 << bits_of_id
    ids = torch.tensor([lowest, border - 1, border, border + 1, 5])
    row = Row(
        input_ids=ids.clamp(min=0),
        target_ids=ids,
        token_mask=torch.ones(5),
        position_ids=torch.arange(5) + border - 2,
        cu_seqlens=torch.tensor([0, border - 1 if bits_of_id < 32 else 4, 2**31 - 1], dtype=torch.int32),
        max_seqlen=border,
        context_parallel_size=1,
        report={"padding_tokens": border},
    )
    assert bits(decode(memoryview(encode(row)))) == bits(row)


def test_sources_of_a_blend_keep_their_rows_apart(tmp_path):
    """Each source has a cache of its own, asked for its own rows alone, in whatever order rows are stored."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    sources = [source(folder, count=count) for folder, count in zip(folders, (4, 9, 6), strict=True)]
    for number, path in enumerate(folder / "rows.jsonl" for folder in folders):  # no two files have a row in common
        path.write_text(path.read_text().replace("w2 w3", f"w{20 + number} w3"))
    sources = [open_source(folder / "rows.jsonl") for folder in folders]
    tokenizer = load("word")

    def blend(cached):
        caches = [
            RowCache(tmp_path / "cache", facts=row_facts(each, tokenizer, SETTINGS), rows=len(each), limit_bytes=GB)
            for each in (sources if cached else ())
        ]
        return PackedData(sources=sources, tokenizer=tokenizer, settings=SETTINGS, guards=GUARDS, caches=caches)

    asked = [Sample(source=number % 3, row=number % 4, epoch=0) for number in (0, 1, 2, 4, 5, 3, 8, 7, 6, 11, 10, 9)]
    plain = list(map(bits, blend(cached=False).prepare(asked)))
    storing = blend(cached=True)
    assert [bits(storing.prepare([each])[0]) for each in asked] == plain
    assert list(map(bits, without_building(blend(cached=True)).prepare(asked))) == plain


def test_negative_zero_in_a_mask_keeps_its_sign():
    row = Row(
        input_ids=torch.zeros(1, dtype=torch.int64),
        target_ids=torch.zeros(1, dtype=torch.int64),
        token_mask=torch.tensor([-0.0]),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        context_parallel_size=1,
        report={},
    )
    found = decode(memoryview(encode(row)))
    assert isinstance(found, Row)
    assert np.signbit(found.token_mask.numpy()).all()


@pytest.mark.parametrize("cut", [0, 3, 10, -1])
def test_bytes_that_are_not_a_record_are_recognised(cut):
    record = encode(RowBuilder(tokenizer=load("word"), settings=SETTINGS).build(line(1)["messages"]))
    with pytest.raises(DamagedRecord):
        decode(memoryview(record[:cut]))


def test_a_job_feeds_the_same_steps_from_its_cache_and_prints_its_size(tmp_path):
    config = jobs.write_job(tmp_path, jobs.write_rows(tmp_path / "rows.jsonl"))

    def steps(*overrides):
        with BatchStream(load_job(str(config), overrides), PLACE) as feed:
            told = [note for note in feed.notes if note.startswith("row cache")]
            return told, [
                [bits(microbatch) for microbatch in step.microbatches] for step in itertools.islice(feed.steps(), 5)
            ]

    cached = f"data.cache_dir={tmp_path / 'cache'}"
    nothing, built = steps()
    (first,), storing = steps(cached)
    (second,), stored = steps(cached, "data.num_workers=2")
    assert (nothing, storing, stored) == ([], built, built)
    assert " 0 of " in first
    assert " 0 of " not in second


@pytest.mark.parametrize(
    ("write", "changes", "key"),
    [
        (jobs.write_rows, {"data.cache_limit_gb": 0}, "data.cache_limit_gb"),
        (jobs.write_chat, ONLINE | {"data.cache_dir": "cache"}, "data.cache_dir"),
    ],
    ids=["a limit of nothing", "conversations"],
)
def test_a_cache_that_can_keep_nothing_is_refused(tmp_path, write, changes, key):
    config = jobs.write_job(tmp_path, write(tmp_path / "rows.jsonl"), **changes)
    assert [each.key for each in refusals(load_job(str(config), []), 1, device="cpu")] == [key]
