"""Read one file as numbered lines: find or build its index, and read any line by two positioned reads (R-FILE-1,
R-FILE-5).

Nothing is mapped: mapped pages would count as resident, and a file cut short under a mapping kills the process.
"""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from production.files.cache import cache_places
from production.files.compressed import compression_of, is_compressed, unpack
from production.files.contents import FIRST_BYTES, check_contents, check_packed
from production.files.faults import LineError, bad_file
from production.files.file_state import Identity, content_of, open_for_reading, sample_of, stamp_of
from production.files.index import HEADER_BYTES, IndexHeader, build_index, load_index, read_offsets

MAX_LINE_BYTES = 1 << 28
"""A longer line is refused: the bound on memory. A row of ten million tokens takes about 50 MB."""
INDEX_SUFFIX = ".packproof-index"
_COPY_SUFFIX = ".packproof-rows"
_READ_BYTES = 1 << 21
_OFFSETS_AT_A_TIME = 1 << 12


class LineFile:
    """Gives a file's lines by number from 0; may be pickled, forked, and used by several threads."""

    name: str
    """The path as the user wrote it."""
    header: IndexHeader
    """Header of the file's index."""
    index_path: Path
    """Place of the index."""
    plain_path: Path
    """The file that is read: the unpacked copy where the named one is compressed."""
    built: bool
    """The index was built at this opening, not found."""

    def __init__(self, path: str | os.PathLike[str], *, cache_folder: Path | None = None, verify: bool = False) -> None:
        self.name = os.fspath(path)
        # Workers may stand in another folder.
        self._path = Path(os.path.abspath(self.name))  # noqa: PTH100 - links must stay links
        self._cache_folder = cache_folder
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._find_or_build(verify=verify)
        if is_compressed(self._path):
            with self.plain_path.open("rb") as plain:
                check_contents(plain.read(FIRST_BYTES), file=self.name)

    def __len__(self) -> int:
        return self.header.lines

    def bounds(self, line: int) -> tuple[int, int]:
        """Return the first byte of line `line`, and the byte behind it and its newline."""
        start, end = read_offsets(self._open("index"), line, 2)
        return start, end

    def read(self, line: int) -> bytes:
        """Return line `line` with its newline if it has one; LineError `line_too_long`; BadInput where the file
        changed.
        """
        start, end = self.bounds(line)
        _check_length(start, end)
        data = self._read(start, end)
        if data.find(b"\n") != len(data) - 1 and not (line == len(self) - 1 and b"\n" not in data):
            raise self._changed()
        return data

    def read_all(self) -> Iterator[tuple[int, int, bytes | LineError]]:
        """Yield number, first byte and bytes of every line in order, read by megabytes."""
        for first in range(0, len(self), _OFFSETS_AT_A_TIME):
            count = min(_OFFSETS_AT_A_TIME, len(self) - first)
            offsets = read_offsets(self._open("index"), first, count + 1)
            yield from self._read_between(first, offsets)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key not in {"_descriptors", "_lock"}}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._descriptors = {}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if "_descriptors" in self.__dict__:  # not so where opening failed early
            self.close()

    def _read_between(self, first: int, offsets: list[int]) -> Iterator[tuple[int, int, bytes | LineError]]:
        at = 0
        while at < len(offsets) - 1:
            start, stop = offsets[at], at + 1
            while stop < len(offsets) - 1 and offsets[stop + 1] - start <= _READ_BYTES:
                stop += 1
            try:
                _check_length(start, offsets[stop])
            except LineError as fault:
                yield first + at, start, fault
            else:
                data = self._read(start, offsets[stop])
                for line in range(at, stop):
                    yield first + line, offsets[line], data[offsets[line] - start : offsets[line + 1] - start]
            at = stop

    def _read(self, start: int, end: int) -> bytes:
        descriptor = self._open("rows")
        data = os.pread(descriptor, end - start, start)
        while len(data) < end - start:  # network file systems may hand out less than was asked for
            more = os.pread(descriptor, end - start - len(data), start + len(data))
            if not more:
                raise self._changed()
            data += more
        # After the read: a change before it has been seen then, and one after it has not been read.
        try:
            named = stamp_of(self._path.stat())
        except OSError:
            raise self._changed() from None
        if named != self.header.origin.stamp or stamp_of(os.fstat(descriptor)) != self.header.plain.stamp:
            raise self._changed()
        return data

    def _open(self, which: Literal["index", "rows"]) -> int:
        descriptor = self._descriptors.get(which)
        if descriptor is None:
            with self._lock:
                descriptor = self._descriptors.get(which)
                if descriptor is None:
                    descriptor = self._try_open(which)
                    if descriptor is None:  # removed or replaced since: build it again, and see whether it is the same
                        header = self.header
                        self._find_or_build(verify=False)
                        self.header = header
                        descriptor = self._try_open(which)
                    if descriptor is None:
                        raise self._changed()
                    self._descriptors[which] = descriptor
        return descriptor

    def _try_open(self, which: Literal["index", "rows"]) -> int | None:
        """Return a descriptor of the very file that was opened first, as far as can be told at once; else None."""
        path = self.index_path if which == "index" else self.plain_path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if which == "index":
            same = os.pread(descriptor, HEADER_BYTES, 0) == self.header.pack()
        else:
            same = stamp_of(os.fstat(descriptor)) == self.header.plain.stamp
        if same:
            return descriptor
        os.close(descriptor)
        return None

    def _changed(self) -> Exception:
        return bad_file("file_changed", "the file is not the one that was opened any more", file=self.name)

    def _find_or_build(self, *, verify: bool) -> None:
        descriptor = open_for_reading(self._path, self.name)
        try:
            # Before an index of it is built, which reads all of a file that is not JSON lines.
            check_packed(os.pread(descriptor, FIRST_BYTES, 0), compression_of(self._path), file=self.name)
            places = cache_places(self._path, INDEX_SUFFIX, self._cache_folder)
            copies = cache_places(self._path, _COPY_SUFFIX, self._cache_folder)
            for index_path, copy in zip(places, copies, strict=True):
                plain_path = copy if is_compressed(self._path) else self._path
                header = load_index(index_path)
                if header is not None and self._is_current(header, descriptor, plain_path, verify=verify):
                    self.header, self.index_path, self.plain_path, self.built = header, index_path, plain_path, False
                    return
            self._build(descriptor, places, copies)
        finally:
            os.close(descriptor)

    def _is_current(self, header: IndexHeader, descriptor: int, plain_path: Path, *, verify: bool) -> bool:
        if not _is_same(header.origin, descriptor, verify=verify):
            return False
        if plain_path == self._path:
            return header.plain == header.origin
        try:
            plain = os.open(plain_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return _is_same(header.plain, plain, verify=verify)
        finally:
            os.close(plain)

    def _build(self, descriptor: int, places: list[Path], copies: list[Path]) -> None:
        refusals = []
        for index_path, copy in zip(places, copies, strict=True):
            try:
                if is_compressed(self._path):
                    origin = unpack(copy, descriptor, suffix=self._path.suffix, name=self.name)
                    plain = open_for_reading(copy, self.name)
                    try:
                        self.header = build_index(index_path, plain, name=self.name, origin=origin)
                    finally:
                        os.close(plain)
                    self.plain_path = copy
                else:
                    self.header = build_index(index_path, descriptor, name=self.name)
                    self.plain_path = self._path
            except OSError as error:
                if error.errno in {errno.EIO, errno.EMFILE, errno.ENFILE}:  # not a matter of leave
                    raise
                refusals.append(f"{index_path.parent}: {error.strerror}")
            else:
                self.index_path, self.built = index_path, True
                return
        raise bad_file("no_cache_folder", f"its index can be written nowhere ({'; '.join(refusals)})", file=self.name)


def link_cached(name: str | os.PathLike[str], cache_folder: Path | None, folder: Path) -> None:
    """Link index and unpacked copy of a file, where they are kept, into `folder`: opened with that cache folder, the file
    writes nothing elsewhere.
    """
    path = Path(os.path.abspath(name))  # noqa: PTH100 - as LineFile
    for suffix in (INDEX_SUFFIX, _COPY_SUFFIX):
        (link,) = cache_places(path, suffix, folder)
        kept = next((each for each in cache_places(path, suffix, cache_folder) if each.is_file()), None)
        if kept is not None and not link.exists():
            link.symlink_to(kept.absolute())


def _is_same(identity: Identity, descriptor: int, *, verify: bool) -> bool:
    status = os.fstat(descriptor)
    if stamp_of(status) != identity.stamp or sample_of(descriptor, status.st_size) != identity.sample:
        return False
    return not verify or content_of(descriptor) == identity.content


def _check_length(start: int, end: int) -> None:
    if end - start > MAX_LINE_BYTES:
        what = f"the line has {end - start} bytes; {MAX_LINE_BYTES} are read at most"
        raise LineError("line_too_long", MAX_LINE_BYTES, what)
