"""Faults of the file reader: an index that is off at a block's edge, a stale one that serves, members lost, numbers that slip after a bad line."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from equivalence.mutants.layout_mutant import LayoutMutant
from production.files import verdicts
from production.files.index import IndexHeader
from production.files.verdicts import BadLine

_READ_BYTES = 1 << 21
_STRIDE = 1 << 12


def _flushed_only(_: Any) -> Any:
    return lambda writer: writer._flush()  # noqa: SLF001 - the fault


def _from_the_second_byte(_: Any) -> Any:
    def find_each(writer: Any, block: bytearray, filled: int) -> int:
        before = len(writer._pending)  # noqa: SLF001 - here and below: the fault
        at = block.find(b"\n", 1, filled) + 1
        while at:
            writer._pending.append(writer.end + at)  # noqa: SLF001
            at = block.find(b"\n", at, filled) + 1
        return len(writer._pending) - before  # noqa: SLF001

    return find_each


def _whole_buffer(sound: Any) -> Any:
    return lambda writer, block, _: sound(writer, block, len(block))


def _last_byte_unseen(sound: Any) -> Any:
    return lambda writer, block, filled: sound(writer, block, filled - 1)


def _pending_last(sound: Any) -> Any:
    def add(writer: Any, block: bytearray, filled: int) -> None:
        kept = list(writer._pending)  # noqa: SLF001
        writer._pending.clear()  # noqa: SLF001
        sound(writer, block, filled)
        writer._pending[:0] = kept  # noqa: SLF001

    return add


def _last_of_a_stride(_: Any) -> Any:
    def read_all(file: Any) -> Iterator[Any]:
        for first in range(0, len(file) - 1 or 1, _STRIDE):
            count = min(_STRIDE, len(file) - first)
            offsets = [file.bounds(first)[0], *(file.bounds(line)[1] for line in range(first, first + count))]
            yield from file._read_between(first, offsets)  # noqa: SLF001

    return read_all


def _line_behind_a_read(sound: Any) -> Any:
    def read_between(file: Any, first: int, offsets: list[int]) -> Iterator[Any]:
        start = offsets[0]
        for line, begin, data in sound(file, first, offsets):
            if begin - start < _READ_BYTES or line - first == len(offsets) - 2:
                yield line, begin, data
            else:
                start = begin  # the line that begins the next read is passed over

    return read_between


def _before_the_bad_line(_: Any) -> Any:
    return lambda file, row: row + bisect_left(file._shifts, row)  # noqa: SLF001


def _counted_in_rows(sound: Any) -> Any:
    def locate(source: Any, row: int) -> Any:
        file, number = source._find(row)  # noqa: SLF001
        return sound(source, row)._replace(line=number + 1) if file.bad else sound(source, row)

    return locate


def _of_any_key(sound: Any) -> Any:
    def load(path: Path, header: IndexHeader, chat_key: str) -> list[BadLine] | None:
        others = sorted(path.parent.glob(f"{path.name.split('.packproof-index')[0]}*.bad"))
        found = (_stored(other) for other in others)
        usable = next((each for each in found if each is not None and each[1] == header.pack()), None)
        return usable[0] if usable else sound(path, header, chat_key)

    return load


def _of_any_state(_: Any) -> Any:
    def load(path: Path, _: IndexHeader, __: str) -> list[BadLine] | None:
        stored = _stored(path)
        return stored[0] if stored else None

    return load


def _stored(path: Path) -> tuple[list[BadLine], bytes] | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if xxhash.xxh3_128_digest(content[16:]) != content[:16]:
        return None
    found = msgspec.json.decode(content[16:], type=verdicts._Verdicts)  # noqa: SLF001
    return found.bad, found.index


def _of_the_same_size(_: Any) -> Any:
    return lambda identity, descriptor, **_: os.fstat(descriptor).st_size == identity.size


def _by_time_alone(_: Any) -> Any:
    def is_same(identity: Any, descriptor: int, **_: Any) -> bool:
        status = os.fstat(descriptor)
        return bool((status.st_size, status.st_mtime_ns) == identity.stamp)

    return is_same


def _never_verified(sound: Any) -> Any:
    return lambda identity, descriptor, **_: sound(identity, descriptor, verify=False)


def _first_block(_: Any) -> Any:
    return lambda descriptor, _: xxhash.xxh3_128_digest(os.pread(descriptor, 4096, 0))


def _one_member(sound: Any) -> Any:
    import zlib  # noqa: PLC0415 - of this fault alone

    def unpack(packed: Any) -> Iterator[bytes]:
        member = zlib.decompressobj(wbits=31)
        while (data := packed.read(1 << 11)) and not member.eof:
            yield member.decompress(data)
        if not member.eof:
            yield from sound(packed)

    return unpack


def _one_frame(_: Any) -> Any:
    import zstandard  # noqa: PLC0415 - of this fault alone

    def unpack(packed: Any) -> Iterator[bytes]:
        frame = zstandard.ZstdDecompressor().decompressobj()
        while data := packed.read(1 << 11):
            if not frame.eof:
                yield frame.decompress(data)
        if not frame.eof:
            raise EOFError

    return unpack


def _seam_of_members(sound: Any) -> Any:
    """Put a newline where a member ends inside a line."""
    import zlib  # noqa: PLC0415 - of this fault alone

    def unpack(packed: Any) -> Iterator[bytes]:
        data = packed.read()
        if data.endswith(bytes(8)):
            data = data.rstrip(b"\0") + bytes(8)
        first = True
        while data.strip(b"\0"):
            member = zlib.decompressobj(wbits=31)
            part = member.decompress(data)
            if not member.eof:
                raise EOFError
            yield part if first or part.startswith(b"{") else b"\n" + part
            first, data = False, member.unused_data

    del sound
    return unpack


def _end_is_not_missed(sound: Any) -> Any:
    def unpack(packed: Any) -> Iterator[bytes]:
        try:
            yield from sound(packed)
        except EOFError:
            return

    return unpack


def _copy_not_looked_at(sound: Any) -> Any:
    def is_current(file: Any, header: IndexHeader, descriptor: int, plain_path: Path, *, verify: bool) -> bool:
        if plain_path == file._path:  # noqa: SLF001
            return bool(sound(file, header, descriptor, plain_path, verify=verify))
        status = os.fstat(descriptor)
        return plain_path.exists() and (status.st_size, status.st_mtime_ns) == header.origin.stamp

    return is_current


def _without_checksum(_: Any) -> Any:
    def load(path: Path) -> IndexHeader | None:
        try:
            return IndexHeader.unpack(path.read_bytes()[: 8 + 8 + 96 + 24 + 16])
        except OSError:
            return None

    return load


def _fingerprint(state: Callable[[Any], Any], *, ordered: bool = True) -> Callable[[Any], Any]:
    def fault(_: Any) -> Any:
        def fingerprint(source: Any) -> str:
            states = [state(file.lines.header) for file in source._files]  # noqa: SLF001
            found = [source.chat_key, source.on_bad_row, states if ordered else sorted(states)]
            return xxhash.xxh3_128_hexdigest(msgspec.json.encode(found))

        return property(fingerprint)

    return fault


def _never_changed(_: Any) -> Any:
    def read(file: Any, start: int, end: int) -> bytes:
        return os.pread(file._open("rows"), end - start, start)  # noqa: SLF001

    return read


def _byte_of_the_line(sound: Any) -> Any:
    return lambda fault, *, file, line, start: sound(fault, file=file, line=line, start=start if line == 1 else 0)


def _first_file_for_the_seam(_: Any) -> Any:
    def find(source: Any, row: int) -> Any:
        number = row + len(source) if row < 0 else row
        which = bisect_left(source._ends, number)  # noqa: SLF001
        which = min(which, len(source._files) - 1)  # noqa: SLF001
        return source._files[which], number - (source._ends[which - 1] if which else 0)  # noqa: SLF001

    return find


def _white_space_of_python(sound: Any) -> Any:
    return lambda line, **options: sound(line.rstrip(), **options)


def _as_packed_rows(_: Any) -> Any:
    def find_bad(file: Any) -> list[BadLine]:
        path = verdicts.verdicts_path(file.lines.index_path, file._chat_key)  # noqa: SLF001 - here and below: the fault
        bad = verdicts.load_verdicts(path, file.lines.header, file._chat_key)  # noqa: SLF001
        if bad is None:
            bad = [BadLine(fault.line or 0, fault.byte or 0, fault.kind) for _, fault in file.faults() if fault]
            verdicts.save_verdicts(path, file.lines.header, file._chat_key, bad)  # noqa: SLF001
        return bad

    return find_bad


def _mutant(name: str, story: str, target: str, wrong: Callable[[Any], Any]) -> LayoutMutant:
    return LayoutMutant(name=name, story=story, target=target, wrong=wrong, first="packed_files")


FILE_MUTANTS = (
    _mutant("last_line_unindexed", "a last line without a newline is not a row", "production.files.index:_LineWriter.finish", _flushed_only),
    _mutant("newline_first_in_a_block", "a newline that is a block's first byte ends nothing", "production.files.index:_LineWriter._find_each", _from_the_second_byte),
    _mutant("newline_last_in_a_block", "a newline that is a block's last byte ends nothing", "production.files.index:_LineWriter._find_each", _last_byte_unseen),
    _mutant("dense_newline_last_in_a_block", "the same where lines are short", "production.files.index:_LineWriter._find_by_mask", _last_byte_unseen),
    _mutant("stale_buffer", "in the last block of a dense file newlines of the block before are found", "production.files.index:_LineWriter._find_by_mask", _whole_buffer),
    _mutant("sparse_behind_dense", "places found in a sparse block are written behind those of a dense one", "production.files.index:_LineWriter.add", _pending_last),
    _mutant("stride_loses_the_last", "a last line that begins a stride of the index is not read", "production.files.lines:LineFile.read_all", _last_of_a_stride),
    _mutant("read_ahead_loses_a_line", "the first line of each further read of 2 MiB is not read", "production.files.lines:LineFile._read_between", _line_behind_a_read),
    _mutant("skip_off_by_one", "the row at a bad line's place is the bad line", "production.files.source:_RowFile.line_of", _before_the_bad_line),
    _mutant("lines_numbered_as_rows", "a row's line is its number, whatever was left out before it", "production.files.source:PackedSource.locate", _counted_in_rows),
    _mutant("verdicts_of_another_key", "what was bad under one key is left out under another", "production.files.source:load_verdicts", _of_any_key),
    _mutant("verdicts_of_another_state", "what was bad before the file changed is left out afterwards", "production.files.source:load_verdicts", _of_any_state),
    _mutant("index_by_size", "an index serves a changed file of the same size", "production.files.lines:_is_same", _of_the_same_size),
    _mutant("index_by_size_and_time", "an index serves a file that changed within a tick of the clock", "production.files.lines:_is_same", _by_time_alone),
    _mutant("verify_does_nothing", "bytes are not hashed where that was asked for", "production.files.lines:_is_same", _never_verified),
    _mutant("sample_of_the_start", "a change behind the first 4 KiB is not seen", "production.files.file_state:sample_of", _first_block),
    _mutant("first_member_only", "a gzip file ends with its first member", "production.files.compressed:_gzip", _one_member),
    _mutant("first_frame_only", "a Zstandard file ends with its first frame", "production.files.compressed:_zstandard", _one_frame),
    _mutant("newline_between_members", "a line that goes on in the next member is two", "production.files.compressed:_gzip", _seam_of_members),
    _mutant("cut_gzip_serves", "what a cut gzip file still holds is taken for all of it", "production.files.compressed:_gzip", _end_is_not_missed),
    _mutant("copy_not_looked_at", "an unpacked copy serves whatever became of it", "production.files.lines:LineFile._is_current", _copy_not_looked_at),
    _mutant("index_without_checksum", "a damaged index serves", "production.files.lines:load_index", _without_checksum),
    _mutant("fingerprint_without_order", "files in another order have the same fingerprint", "production.files.source:PackedSource.fingerprint", _fingerprint(lambda header: header.plain.content.hex(), ordered=False)),
    _mutant("fingerprint_of_the_packed_file", "a copy that is packed otherwise has another fingerprint", "production.files.source:PackedSource.fingerprint", _fingerprint(lambda header: header.origin.content.hex())),
    _mutant("fingerprint_of_sizes", "files of the same size have the same fingerprint", "production.files.source:PackedSource.fingerprint", _fingerprint(lambda header: header.plain.size)),
    _mutant("change_unseen", "an open file that changes is read on", "production.files.lines:LineFile._read", _never_changed),
    _mutant("byte_within_the_line", "a fault's byte is counted from its line", "production.files.source:bad_line", _byte_of_the_line),
    _mutant("white_space_of_python", "a line may end in white space that JSON does not know", "production.files.source:parse_record", _white_space_of_python),
    _mutant("verdicts_of_packed_rows", "a chat file leaves out what is no packed row", "production.files.source:_RowFile._find_bad", _as_packed_rows),
    _mutant("seam_of_files", "the first row of a file is sought in the one before", "production.files.source:PackedSource._find", _first_file_for_the_seam),
)  # fmt: skip
"""Faults of the file reader that only the check of drawn files finds."""
