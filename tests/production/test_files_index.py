"""R-FILE, the index: right for any lines, built again whenever the file or the index is another, kept where it can be."""

import gzip
import itertools
import os
import pickle
import random
import tracemalloc
from pathlib import Path

import pytest

from production.errors import BadInput
from production.files import cache as places
from production.files import file_state, index, lines
from production.files.lines import LineFile

ROW = b'{"messages": [{"role": "user", "content": "%d"}]}\n'


@pytest.fixture
def write(tmp_path):
    def write(data, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def rows(count, start=0):
    return b"".join(ROW % number for number in range(start, start + count))


def offsets_of(file):
    return [file.bounds(i)[0] for i in range(len(file))] + [file.bounds(len(file) - 1)[1]]


def expected_offsets(data):
    lengths = [len(text) + 1 for text in data.split(b"\n")]
    ends = list(itertools.accumulate(lengths))[:-1]
    return [0, *ends] if data.endswith(b"\n") else [0, *ends, len(data)]


@pytest.mark.parametrize("block", [64, 256, 1 << 18])
@pytest.mark.parametrize("chance", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("ended", [True, False])
def test_r_file_1_offsets_are_those_of_a_loop_over_bytes(write, monkeypatch, block, chance, ended):
    monkeypatch.setattr(file_state, "BLOCK_BYTES", block)
    monkeypatch.setattr(index, "BLOCK_BYTES", block)
    source = random.Random(block)
    data = bytes(10 if source.random() < chance else source.choice(b"\x0a\x0b\x0d\x85\xe2a"[1:]) for _ in range(5000))
    # Dense and sparse stretches: both ways to search, and the change between them.
    data += b"x" * 4000 + b"\n" * 3000 + b"y" * 3001 + (b"\n" if ended else b"z")
    file = LineFile(write(data))
    assert offsets_of(file) == expected_offsets(data)
    assert b"".join(text for _, _, text in file.read_all()) == data
    bounds = list(itertools.pairwise(expected_offsets(data)))
    assert all(file.read(i) == data[slice(*bounds[i])] for i in range(0, len(file), 97))


def test_both_searches_are_used(write, monkeypatch):
    used = set()

    class Watched(index._LineWriter):
        def _find_each(self, *args):
            used.add("each")
            return super()._find_each(*args)

        def _find_by_mask(self, *args):
            used.add("mask")
            return super()._find_by_mask(*args)

    monkeypatch.setattr(index, "_LineWriter", Watched)
    LineFile(write(b"x" * (1 << 19) + b"\n" * (1 << 20)))
    assert used == {"each", "mask"}


def test_r_file_4_reopening_reuses_and_each_change_rebuilds(write):
    path = write(rows(20_000))
    assert LineFile(path).built
    assert not LineFile(path).built
    assert not LineFile(path, verify=True).built
    status = path.stat()

    path.write_bytes(rows(20_000)[:-60] + b"\n" * 60)  # same size, another time
    os.utime(path, ns=(status.st_mtime_ns + 1, status.st_mtime_ns + 1))
    file = LineFile(path)
    assert file.built
    assert file.read(len(file) - 1) == b"\n"

    with path.open("ab") as out:  # another size, same time
        out.write(b"{}\n")
    os.utime(path, ns=(status.st_mtime_ns + 1, status.st_mtime_ns + 1))
    assert LineFile(path).read(len(LineFile(path)) - 1) == b"{}\n"
    assert not LineFile(path).built


def overwrite(path, at, data):
    status = path.stat()
    with path.open("r+b") as out:
        out.seek(at)
        out.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_r_file_4_a_change_that_keeps_size_and_time_is_seen_in_a_sample_or_by_verify(write):
    data = rows(30_000)
    path = write(data)
    size = len(data)
    assert size > 4 * file_state._SAMPLES * file_state._SAMPLE_BYTES
    before = LineFile(path)
    for at in (10, size - 20, (size - file_state._SAMPLE_BYTES) // 15 + 5):
        overwrite(path, at, b"\n")
        found = LineFile(path)
        assert found.built
        assert offsets_of(found) == expected_offsets(path.read_bytes())
    between = file_state._SAMPLE_BYTES + 100
    overwrite(path, between, b"\n")
    assert not LineFile(path).built  # what sampling cannot see
    seen = LineFile(path, verify=True)
    assert seen.built
    assert offsets_of(seen) == expected_offsets(path.read_bytes())
    assert not LineFile(path, verify=True).built
    with pytest.raises(
        BadInput
    ) as caught:  # an index that another process has replaced does not serve the older opening
        before.read(0)
    assert caught.value.kind == "file_changed"


def test_an_access_sees_lines_that_have_moved_unnoticed(write):
    path = write(rows(30_000))
    file = LineFile(path)
    start, end = file.bounds(400)
    overwrite(path, start + 5, b"\n")
    overwrite(path, file.bounds(500)[1] - 1, b" ")
    assert end < file_state._SAMPLE_BYTES * 3
    for line in (400, 500):
        with pytest.raises(BadInput, match="not the one that was opened"):
            file.read(line)
    assert file.read(401)


def test_r_file_4_a_damaged_index_is_built_again(write, tmp_path):
    path = write(rows(500))
    good = offsets_of(LineFile(path))
    (kept,) = tmp_path.glob(".*index")
    whole = kept.read_bytes()
    source = random.Random(1)
    damaged = [b"", whole[:7], whole[:-1], whole[:-8], whole + bytes(8), bytes(len(whole)), whole[::-1], b"PKPROOF\n"]
    places_of_bits = [*range(0, index.HEADER_BYTES, 3), *source.sample(range(index.HEADER_BYTES, len(whole)), 20)]
    damaged += [whole[:at] + bytes([whole[at] ^ 1 << source.randrange(8)]) + whole[at + 1 :] for at in places_of_bits]
    for content in damaged:
        kept.write_bytes(content)
        file = LineFile(path)
        assert file.built
        assert offsets_of(file) == good
        assert kept.read_bytes() == whole
        file.close()
    kept.unlink()
    kept.mkdir()
    assert offsets_of(LineFile(path)) == good  # in the user's cache then


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


def refuse_folder(monkeypatch, *folders):
    mkdir = Path.mkdir

    def refusing(path, *args, **more):
        if path in folders:
            raise PermissionError(13, "Permission denied")
        return mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", refusing)


def test_r_file_3_the_index_is_beside_the_file_or_in_the_given_folder_or_in_the_users_cache(
    write, tmp_path, own_cache, monkeypatch
):
    path = write(rows(3))
    (tmp_path / "other").mkdir()
    twin = write(rows(4), "other/rows.jsonl")
    cache = tmp_path / "deep" / "cache"
    first, second = (LineFile(one, cache_folder=cache) for one in (path, twin))
    assert first.index_path.parent == second.index_path.parent == cache
    assert first.index_path != second.index_path
    assert sorted(found.name for found in tmp_path.iterdir()) == ["deep", "other", "rows.jsonl"]
    assert LineFile(path).index_path == tmp_path / ".rows.jsonl.packproof-index"
    LineFile(path).index_path.unlink()
    refuse_folder(monkeypatch, tmp_path)
    found = LineFile(path)
    assert found.index_path.parent == own_cache / "packproof"
    assert not LineFile(path).built
    refuse_folder(monkeypatch, tmp_path, cache, own_cache / "packproof")
    found.index_path.unlink()
    first.index_path.unlink()
    for settings in ({}, {"cache_folder": cache}):
        with pytest.raises(BadInput, match="Permission denied") as caught:
            LineFile(path, **settings)
        assert caught.value.kind == "no_cache_folder"
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".tmp")]


def test_r_file_3_an_index_is_whole_or_not_there(tmp_path):
    target = tmp_path / "kept"
    target.write_bytes(b"old")

    def break_off():
        with places.atomic_file(target) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert [found.name for found in tmp_path.iterdir()] == ["kept"]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("packed", [False, True])
def test_two_that_build_at_once_write_the_same(write, monkeypatch, packed):
    path = write(gzip.compress(rows(500)), "rows.jsonl.gz") if packed else write(rows(500))
    inner = []
    build = lines.build_index

    def twice(*args, **more):
        if not inner:
            inner.append(None)
            inner[0] = LineFile(path)  # another comes, builds and finishes in between
        return build(*args, **more)

    monkeypatch.setattr(lines, "build_index", twice)
    outer = LineFile(path)
    assert outer.header == inner[0].header
    assert outer.read(7) == inner[0].read(7) == ROW % 7
    assert offsets_of(outer) == offsets_of(inner[0])


def test_a_file_that_grows_while_it_is_indexed_is_refused(write, monkeypatch):
    path = write(rows(500))
    sample = index.sample_of

    def growing(*args):
        with path.open("ab") as out:
            out.write(b"{}\n")
        return sample(*args)

    monkeypatch.setattr(index, "sample_of", growing)
    with pytest.raises(BadInput) as caught:
        LineFile(path)
    assert caught.value.kind == "file_changed"


def test_a_worker_whose_index_was_removed_builds_the_same_one(write):
    file = pickle.loads(pickle.dumps(LineFile(write(rows(50)))))
    file.index_path.unlink()
    assert file.read(7) == ROW % 7
    assert file.index_path.exists()


def test_memory_stays_small(write):
    path = write(b"".join(b"x" * 2000 + b"\n" for _ in range(10_000)))
    tracemalloc.start()
    file = LineFile(path)
    assert sum(len(text) for _, _, text in file.read_all()) == path.stat().st_size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 3
