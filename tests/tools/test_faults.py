"""Whatever is killed, damaged, full or changed: a clear error of ours, or the result of an undisturbed run; nothing is lost in silence."""

import contextlib
import errno
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from production.errors import BadInput, PackproofError, RowRefused
from production.files.fingerprint import fingerprint_file
from production.files.manifest import read_manifest
from production.files.source import open_source
from production.rows.builder import RowBuilder, RowSettings
from production.training import export
from production.training.checkpoint import megatron_lm
from production.training.data import row_cache
from production.training.data.row_cache import RowCache
from tools import fuzz
from tools.inspect_rows import scan as scanning
from tools.inspect_rows.__main__ import main as inspect
from tools.inspect_rows.fix import changes_path
from tools.inspect_rows.scan import scan
from tools.pack_rows import PackSettings, inputs, lengths, main, pack_files
from tools.pack_rows.cli import work_folder
from tools.pack_rows.packing import row_line

EXAMPLES = Path(__file__).parents[2] / "examples"
MINI = EXAMPLES / "tokenizers" / "nemotron-mini"
CHAT = EXAMPLES / "chat" / "sample.jsonl"
PACKED = EXAMPLES / "packed" / "sample.jsonl.packed"
SETTINGS = PackSettings(prompt_format="nemotron-nano-v2", pack_length=256, on_bad="skip", on_long="split")
KILLS = 8
load_cached = functools.cache(lengths.load_folder)
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # whose child only runs a command


@pytest.fixture(autouse=True)
def _load_once(monkeypatch):
    monkeypatch.setattr(lengths, "load_folder", load_cached)
    monkeypatch.setattr("tools.inspect_rows.__main__.load_folder", load_cached)


@pytest.fixture
def rows(tmp_path):
    """The first rows of the sample, without its manifest."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(PACKED.read_bytes().splitlines(keepends=True)[:24]))
    return path


def pack(out, *more):
    given = [CHAT, "--tokenizer", MINI, "--pack-length", "256", "--on-bad", "skip", "--on-long", "skip", "--processes", "1", "--list-refused", "0", "--out", out]  # fmt: skip
    return main([*map(str, given), *more])


def repair(path, out, *more):
    given = [path, "--tokenizer", MINI, "--pack-length", "2048", "--processes", "1", "--no-compare-presets", "--fix", out]  # fmt: skip
    return inspect([*map(str, given), *more])


# --- kill -9


def killed_at(event, run, folder):
    """Run in a child that is killed at its `event`-th look at, opening, renaming or removing of a file in `folder`; return how many there were, None where it was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            count = 0

            def watch(name, arguments):
                nonlocal count
                if name in _EVENTS and any(str(each).startswith(str(folder)) for each in arguments if each is not None):
                    if count == event:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count += 1

            sys.addaudithook(watch)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            run()
            os.write(writing, str(count).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) is not bool(said)
    return int(said) if said else None


_EVENTS = {"open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir", "os.utime", "shutil.rmtree"}


@forks
def test_a_packing_killed_at_any_point_leaves_whole_files_or_none_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_LINES", 8)
    (whole := tmp_path / "whole").mkdir()
    events = killed_at(-1, lambda: pack(whole / "out.packed"), whole)
    wanted = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert sorted(wanted) == ["out.packed", "out.packed.manifest.json"]
    for event in range(events):
        (folder := tmp_path / str(event)).mkdir()
        out = folder / "out.packed"
        assert killed_at(event, functools.partial(pack, out), folder) is None
        for name, content in wanted.items():
            assert not (folder / name).exists() or (folder / name).read_bytes() == content
        assert pack(out, "--resume", "--overwrite") == 0
        left = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".tmp"}
        assert left == wanted, event
        assert not work_folder(out).exists()


@forks
def test_a_repair_killed_at_any_point_leaves_whole_files_or_none(tmp_path, rows):
    out = tmp_path / "out" / "fixed.jsonl"
    with open_source(rows):
        pass  # the index is there in every run
    events = killed_at(-1, lambda: repair(rows, out), tmp_path)
    wanted = [out.read_bytes(), changes_path(out).read_bytes()]
    original = rows.read_bytes()
    for event in [*sorted(random.Random(3).sample(range(events), KILLS)), events - 2, events - 1]:
        for path in (out, changes_path(out)):
            path.unlink(missing_ok=True)
        assert killed_at(event, lambda: repair(rows, out), tmp_path) is None
        for path, content in zip((out, changes_path(out)), wanted, strict=True):
            assert not path.exists() or path.read_bytes() == content
        assert repair(rows, out, "--overwrite") in (0, 1)
        assert [out.read_bytes(), changes_path(out).read_bytes()] == wanted
        assert rows.read_bytes() == original


@forks
def test_a_repair_killed_between_its_two_renames_leaves_the_list_and_no_file(tmp_path, rows):
    out = tmp_path / "out" / "fixed.jsonl"
    names = [path.name for path in whole_repair_renames(rows, out)]
    assert names == [changes_path(out).name, out.name], "the list of changes gets its name first"
    events = killed_at(-1, lambda: repair(rows, out), tmp_path)
    kept = changes_path(out).read_bytes()
    left = set()
    for event in range(events - 8, events):
        for path in (out, changes_path(out)):
            path.unlink(missing_ok=True)
        assert killed_at(event, lambda: repair(rows, out), tmp_path) is None
        left.add((out.exists(), changes_path(out).exists()))
        assert not changes_path(out).exists() or changes_path(out).read_bytes() == kept
    assert (False, True) in left, "one of the kills was between them"
    assert (True, False) not in left


def whole_repair_renames(rows, out):
    """Repair, and return the names that files got, in order."""
    found, rename = [], Path.replace

    def watch(path, target):
        found.append(Path(target))
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", watch)
        assert repair(rows, out) in (0, 1)
    written = [path for path in found if path in (out, changes_path(out))]
    for path in written:
        path.unlink()
    return written


# --- one byte


def test_a_flipped_byte_of_a_spool_costs_measuring_and_never_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_LINES", 8)
    whole = [row_line(row) for row in pack_files([CHAT], MINI, SETTINGS).rows]
    work = tmp_path / "work"
    pack_files([CHAT], MINI, SETTINGS, work=work).spool.close()
    kept = {name: (work / name).read_bytes() for name in ("records", "journal", "key.json")}
    told = 0
    for name, at in _drawn({name: len(content) for name, content in kept.items()}, 8):
        for each, content in kept.items():
            (work / each).write_bytes(content)
        _flip(work / name, at)
        said = ""
        try:
            packing = pack_files([CHAT], MINI, SETTINGS, work=work, resume=True)
        except PackproofError as error:
            said = str(error)
        assert ("what was packed there had" in said) == (name == "key.json"), (name, at, said)
        told += bool(said)
        if not said:
            assert [row_line(row) for row in packing.rows] == whole, (name, at)
            packing.spool.close()
    assert told == 8


def test_a_flipped_byte_of_an_index_gives_the_rows_of_a_whole_one(rows):
    with open_source(rows) as source:
        wanted = list(source)
        index = Path(source.describe()["files"][0]["index"])
    content = index.read_bytes()
    for _, at in _drawn({"index": len(content)}, 40):
        index.write_bytes(content)
        _flip(index, at)
        with open_source(rows) as source:
            assert list(source) == wanted, at


def test_a_flipped_byte_of_a_manifest_is_reported_or_changes_nothing(tmp_path):
    pack(tmp_path / "out.packed")
    before = read_manifest(tmp_path / "out.packed")
    path = before.path
    content = path.read_bytes()
    told = 0
    for _, at in _drawn({"manifest": len(content)}, 300):
        path.write_bytes(content)
        _flip(path, at)
        kind = None
        try:
            assert read_manifest(tmp_path / "out.packed") == before, at
        except BadInput as error:
            kind = error.kind
        assert kind in (None, "manifest")
        told += kind is not None
    assert told > 250


def test_a_pack_length_changed_in_a_manifest_is_refused_with_the_way_to_keep_it(tmp_path):
    pack(tmp_path / "out.packed")
    path = read_manifest(tmp_path / "out.packed").path
    said = json.loads(path.read_text())
    said["settings"]["pack_length"] = 512
    path.write_text(json.dumps(said))
    with pytest.raises(BadInput, match=r"was changed after it was written\. .* take its keys format and checksum out"):
        read_manifest(tmp_path / "out.packed")
    del said["checksum"]
    path.write_text(json.dumps(said))
    with pytest.raises(BadInput, match="was changed after it was written"):
        read_manifest(tmp_path / "out.packed")
    del said["format"]
    path.write_text(json.dumps(said))
    assert read_manifest(tmp_path / "out.packed").settings["pack_length"] == 512
    for number, is_read in ((1, True), (2, True), (4, False)):
        path.write_text(json.dumps(said | {"format": f"packproof-packed-rows/{number}"}))
        if is_read:
            assert read_manifest(tmp_path / "out.packed").settings["pack_length"] == 512
            continue
        with pytest.raises(BadInput, match=r"has the format 'packproof-packed-rows/4'.*pack the file again"):
            read_manifest(tmp_path / "out.packed")


def test_a_flipped_byte_of_a_packed_file_is_reported_by_its_hash(tmp_path, capsys):
    """The status is that of the rows as they are now; the hash is named whether they can be read or not."""
    out = tmp_path / "out.packed"
    pack(out)
    content, digest = out.read_bytes(), fingerprint_file(out).digest
    capsys.readouterr()
    statuses = []
    for _, at in _drawn({"rows": len(content)}, 24):
        out.write_bytes(content)
        _flip(out, at)
        statuses.append(inspect([str(out), "--tokenizer", str(MINI), "--processes", "1", "--no-compare-presets"]))
        lines = capsys.readouterr().out.splitlines()
        wanted = f"note: {out} is not the file that its manifest describes: its digest is {fingerprint_file(out).digest}, and the manifest says {digest}."
        assert [line for line in lines if "digest" in line] == [wanted], at
        assert statuses[-1] == int(not all_built(out)), at
    assert set(statuses) == {0, 1}


def all_built(path):
    """Return whether each row of the file can be read, and is built with nothing lost, at the pack length of `pack`."""
    settings = RowSettings(pack_length=256, prompt_format="nemotron-nano-v2")
    builder = RowBuilder(tokenizer=load_cached(MINI), settings=settings)
    try:
        with open_source(path) as source:
            return not any(builder.build(messages).report["truncated"] for messages in source)
    except (BadInput, RowRefused):
        return False


def _drawn(sizes, count):
    draw = random.Random(7)
    for name, size in sizes.items():
        for _ in range(count):
            yield name, draw.randrange(size)


def _flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << (at % 8)
    path.write_bytes(content)


# --- a full disk


@forks
@pytest.mark.parametrize("option", ["--findings", "--html", "--fix"])
def test_a_full_disk_ends_an_inspection_with_its_words_and_leaves_no_half(tmp_path, rows, option):
    with open_source(rows):
        pass  # the index, which is no output, is there
    before = sorted(tmp_path.iterdir())
    (said := tmp_path / "said").touch()
    pid = os.fork()
    if not pid:
        try:
            sys.stderr = said.open("w", buffering=1)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
            os._exit(inspect([str(rows), "--tokenizer", str(MINI), "--pack-length", "64", "--processes", "1", "--no-compare-presets", option, str(tmp_path / "output")]))  # fmt: skip
        finally:
            os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert (
        said.read_text().replace("\n", " ").strip()
        == "packproof inspect: the outputs: File too large. To fix it: free some disk"
    )
    said.unlink()
    assert sorted(tmp_path.iterdir()) == before


def test_a_row_cache_on_a_full_disk_stores_what_it_can(tmp_path, monkeypatch, capsys):
    cache = RowCache(tmp_path, facts={}, rows=4, limit_bytes=10**9)
    refusal = RowRefused(kind="row_end", what="what", where="where", fix="fix")
    cache.put(0, refusal)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_cache.os, "pwrite", full)
    cache.put(1, refusal)
    assert "No space left on device; the job goes on without" in capsys.readouterr().err
    assert vars(cache.get(0)) == vars(refusal)
    assert cache.get(1) is None


# --- a file that changes


def appended(path):
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[0])


def touched(path):
    os.utime(path, ns=(1, 1))


def replaced(path):
    """Another file with the same bytes, size and time: only its inode tells."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def removed(path):
    path.unlink()


CHANGES = {
    appended: "it had [0-9,]+ bytes and has [0-9,]+ now",
    touched: "it was written to, and has another time of change",
    replaced: r"another file has its name now \(inode [0-9]+, now [0-9]+;",
    removed: "the file is gone",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["in the middle", "at the end"])
def test_a_file_that_changes_during_a_scan_fails_it(rows, monkeypatch, change, when):
    monkeypatch.setattr(scanning, "MOST_ROWS", 6)

    def progress(done, total):
        if done == (6 if when == "in the middle" else total):
            change(rows)

    with pytest.raises(BadInput, match=f"{CHANGES[change]}|is not the one that was opened any more") as caught:
        scan([rows], MINI, RowSettings(pack_length=2048), 1, progress, compare_presets=False)
    assert caught.value.kind == "file_changed"
    if when == "at the end":
        assert "the file changed while it was read" in str(caught.value)


def test_a_file_that_changes_between_its_scan_and_its_repair_is_not_repaired(rows, monkeypatch, capsys):
    from tools.inspect_rows import __main__ as command

    monkeypatch.setattr(command, "manifest_notes", lambda files, _: [replaced(file) for file in files] and ())
    assert repair(rows, rows.with_name("fixed")) == 2
    assert "the file changed while it was read: another file has its name now" in capsys.readouterr().err
    assert sorted(path.name for path in rows.parent.iterdir() if not path.name.startswith(".")) == ["rows.jsonl"]


@pytest.mark.parametrize("change", [appended, touched, replaced], ids=lambda change: change.__name__)
def test_an_input_that_changes_while_it_is_packed_is_refused(tmp_path, rows, monkeypatch, change):
    read = inputs.stream_lines

    def lines(name):
        yield from read(name)
        change(rows)

    monkeypatch.setattr(inputs, "stream_lines", lines)
    with pytest.raises(BadInput, match=CHANGES[change]):
        pack_files([rows], MINI, SETTINGS, work=tmp_path / "work")


# --- without end


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path, suffix):
    """A quarter of a gigabyte is the bound on a line; the file has four times as much."""
    program = (
        "import gzip, resource, sys\n"
        "from pathlib import Path\n"
        "import zstandard\n"
        "from production.errors import PackproofError\n"
        "from production.files import head\n"
        "from tools.pack_rows import inputs\n"
        "head.MAX_LINE_BYTES = inputs.MAX_LINE_BYTES = 1 << 22\n"
        "path = Path(sys.argv[1])\n"
        "opened = {'': open, '.gz': gzip.open, '.zst': zstandard.open}[path.suffix](path, 'wb')\n"
        "with opened as file:\n"
        '    file.write(b\'{"messages": ["\')\n'
        "    for _ in range(256): file.write(b'a' * (1 << 20))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    list(inputs.read_chunks([inputs.InputFile(path=path)]))\n"
        "except PackproofError as error:\n"
        "    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / f"chat{suffix}"], cwd=EXAMPLES.parent, capture_output=True, text=True, check=True)  # fmt: skip
    said, grown = done.stdout.splitlines()
    assert "a line has more than 4,194,304 bytes" in said
    assert int(grown) < 64 << 10  # KiB, of 256 MiB


# --- fuzz


def test_thousands_of_damaged_inputs_are_read_or_refused():
    found = dict(fuzz.fuzz(20, range(3000)))
    assert [outcome for outcome in found.values() if isinstance(outcome, fuzz.Failure)] == []
    assert len(set(found.values())) > 15
    assert dict(fuzz.fuzz(20, range(7, 8))) == {7: found[7]}


def test_a_fuzzing_goes_on_where_it_ended(tmp_path, capsys):
    state = str(tmp_path / "state.json")
    for first in ("0", "30"):
        assert fuzz.main(["--count", "30", "--seed", "4", "--state", state]) == 0
        assert f"30 inputs of seed 4 from number {first} " in capsys.readouterr().out


def test_an_input_that_a_reader_does_not_take_well_is_named_and_fails(tmp_path, capsys, monkeypatch):
    def crash(*_, **__):
        raise IndexError("beyond")

    monkeypatch.setattr(fuzz, "parse_row", crash)
    assert fuzz.main(["--count", "5", "--seed", "4", "--state", str(tmp_path / "state.json")]) == 1
    assert "of seed 4, a line: IndexError: beyond" in capsys.readouterr().out


def test_an_export_for_megatron_lm_that_cannot_be_written_leaves_no_half_folder(tmp_path, monkeypatch):
    """Half a folder was in the way of the next export, and could pass for a whole one."""

    def fill_the_disk(*_, folder, **__):
        (folder / "iter_0000005").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    manifest = SimpleNamespace(step=5, consumed_samples=5)
    monkeypatch.setattr(export, "_verified", lambda _: manifest)
    monkeypatch.setattr(export, "_settings", lambda _: None)
    monkeypatch.setattr(export, "stored_weights", lambda _: {"a": 1})
    monkeypatch.setattr(export, "_alone", contextlib.nullcontext)
    monkeypatch.setattr(megatron_lm, "model_arguments", lambda *_, **__: None)
    monkeypatch.setattr(megatron_lm, "stored_objects", lambda _: {})
    monkeypatch.setattr(megatron_lm, "write_folder", fill_the_disk)
    with pytest.raises(PackproofError, match="No space left"):
        export.export_megatron_lm(tmp_path / "step", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
