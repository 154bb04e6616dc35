# SPDX-License-Identifier: Apache-2.0
"""Reads a wheel's zip structure strictly, and writes members: copied raw, or stored anew.

Only the plain form that wheels of this project have is accepted: no zip64, data descriptors, extra fields,
comments, encryption, links, gaps between members or second entries for a name, and local headers that equal the
central ones. What is not plain is refused, since two readers could see two different wheels in it.
"""

import hashlib
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from builder.errors import InputProblem
from builder.hashing import PIECE

STORED, DEFLATED = 0, 8
UTF8 = 0x800
UNIX = 3
_LOCAL_SIZE = 30
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LIMIT = 0xFFFFFFFF
_UNSAFE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\\|^[^/]*:")  # empty, . and .. as a part; what Windows takes for a root


class Member(NamedTuple):
    """One member: its name, sizes in bytes, `mode` as st_mode, and its entry in the central directory as it is."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    mode: int
    offset: int
    entry: bytes

    @property
    def data_offset(self) -> int:
        """Where the (packed) bytes begin."""
        return self.offset + _LOCAL_SIZE - _CENTRAL.size + len(self.entry)

    @property
    def end(self) -> int:
        """Where the next member begins."""
        return self.data_offset + self.packed

    def local_header(self) -> bytes:
        """The header in front of the member's bytes: the same fields as the entry's, in a part of it."""
        return b"PK\3\4" + self.entry[6:32] + self.entry[_CENTRAL.size :]

    def entry_at(self, offset: int) -> bytes:
        """The member's entry in an archive where it begins at `offset`."""
        return self.entry[:42] + offset.to_bytes(4, "little") + self.entry[_CENTRAL.size :]


def new_member(name: str, method: int, crc: int, packed: int, size: int, mode: int, when: tuple[int, int]) -> Member:
    """A member with the entry that belongs to these values; `when` is the DOS (time, date)."""
    raw = name.encode()
    flags = 0 if name.isascii() else UTF8
    fields = (UNIX << 8 | 20, 20, flags, method, *when, crc, packed, size, len(raw), 0, 0, 0, 0, mode << 16, 0)
    return Member(name, method, crc, packed, size, mode, 0, _CENTRAL.pack(b"PK\1\2", *fields) + raw)


def read_members(file: BinaryIO) -> tuple[Member, ...]:
    """The members of an open wheel, in file order; raises InputProblem for anything but the plain form."""
    size = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), _END.size, max(0, size - _END.size))
    if len(tail) < _END.size or not tail.startswith(b"PK\5\6"):
        raise _problem(file, "a zip archive without a comment", "no end record (cut off?)")
    _, disk, first_disk, here, total, directory_size, directory, comment = _END.unpack(tail)
    if (
        (disk, first_disk, comment) != (0, 0, 0)
        or here != total
        or 0xFFFF in (here, total)
        or _LIMIT in (directory_size, directory)
    ):
        raise _problem(file, "one plain zip archive", "zip64, several disks or a comment")
    if directory + directory_size + _END.size != size:
        raise _problem(file, f"the central directory to end at {size - _END.size}", f"{directory + directory_size}")
    members = tuple(_read_central(file, os.pread(file.fileno(), directory_size, directory), total))
    position = 0
    names: set[str] = set()
    for member in members:
        if member.name in names:
            raise _problem(file, "each name once", f"{member.name!r} twice")
        names.add(member.name)
        header = member.local_header()
        if member.offset != position or os.pread(file.fileno(), len(header), member.offset) != header:
            raise _problem(
                file, f"the local header of {member.name!r} at {position}, equal to the central one", "another"
            )
        position = member.end
    if position != directory:
        raise _problem(file, "no bytes between the last member and the directory", f"{directory - position}")
    if len({name.casefold() for name in names}) != len(names):
        raise _problem(file, "names that differ in more than case", "two that do not")
    if clash := names & folders_of(names):
        raise _problem(file, "a name to be a file or a folder", f"{min(clash)!r} as both")
    return members


def read_member(file: BinaryIO, member: Member) -> bytes:
    """A member's bytes; raises InputProblem if size or checksum are not as the header says."""
    packed = os.pread(file.fileno(), member.packed, member.data_offset)
    data = packed
    if member.method == DEFLATED:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = inflate.decompress(packed, member.size + 1)
        except zlib.error as error:
            raise _problem(file, f"{member.name!r} to inflate", str(error)) from None
        if inflate.unused_data or not inflate.eof:
            raise _problem(file, f"{member.name!r} to inflate to {member.size} bytes", "another length")
    if len(data) != member.size or zlib.crc32(data) != member.crc:
        raise _problem(file, f"{member.name!r} with {member.size} bytes and checksum {member.crc:08x}", "others")
    return data


def stored(name: str, data: bytes, mode: int, when: tuple[int, int]) -> Member:
    """A new member that is written uncompressed: zlib builds deflate differently, so only this is reproducible."""
    return new_member(name, STORED, zlib.crc32(data), len(data), len(data), mode, when)


class Writer:
    """Writes members one after the other into `target`, the central directory at the end, and hashes what it writes.

    Copying in pieces that are hashed at once takes less time than copying inside the kernel and reading it all again.
    """

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self._position = 0
        self._directory: list[bytes] = []
        self._digest = hashlib.sha256()
        self._buffer = memoryview(bytearray(PIECE))

    def copy(self, source: BinaryIO, members: list[Member]) -> None:
        """Copy a run of members that lie side by side in `source`, headers and packed bytes as they are."""
        shift = self._position - members[0].offset
        self._directory += [member.entry_at(member.offset + shift) for member in members]
        self._copy(source, members[0].offset, members[-1].end)

    def copy_renamed(self, source: BinaryIO, member: Member, name: str) -> None:
        """Copy one member's packed bytes below a new header with another name."""
        when = _CENTRAL.unpack_from(member.entry)[5:7]
        renamed = new_member(name, member.method, member.crc, member.packed, member.size, member.mode, when)
        self._directory.append(renamed.entry_at(self._position))
        self._write(renamed.local_header())
        self._copy(source, member.data_offset, member.end)

    def add(self, member: Member, data: bytes) -> None:
        """Write a new stored member."""
        self._directory.append(member.entry_at(self._position))
        self._write(member.local_header())
        self._write(data)

    def finish(self) -> str:
        """Write the central directory; returns the archive's sha256 (hex).

        Raises InputProblem where the plain zip form has no room.
        """
        directory = b"".join(self._directory)
        count = len(self._directory)
        if count >= 0xFFFF or self._position + len(directory) >= _LIMIT:
            raise InputProblem(
                "the wheel", expected="less than 4 GiB and 65,535 members", found="more", do="zip64 is not written"
            )
        self._write(directory + _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), self._position, 0))
        return self._digest.hexdigest()

    def _copy(self, source: BinaryIO, start: int, end: int) -> None:
        while start < end:
            size = os.preadv(source.fileno(), [self._buffer[: end - start]], start)
            if size == 0:
                raise _problem(source, f"{end - start} more bytes at {start}", "the end of the file")
            self._write(self._buffer[:size])
            start += size

    def _write(self, data: bytes | memoryview) -> None:
        self._target.write(data)
        self._digest.update(data)
        self._position += len(data)


def _read_central(file: BinaryIO, data: bytes, total: int) -> Iterator[Member]:
    position = 0
    for _ in range(total):
        if position + _CENTRAL.size > len(data):
            raise _problem(file, f"{total} entries in the central directory", "fewer")
        fields = _CENTRAL.unpack_from(data, position)
        signature, made_by, needed, flags, method, _, _, crc, packed, size, length, *rest, attributes, offset = fields
        entry = data[position : position + _CENTRAL.size + length]
        position += len(entry)
        try:
            name = entry[_CENTRAL.size :].decode("utf-8")
        except UnicodeDecodeError:
            raise _problem(file, "names in UTF-8", repr(entry[_CENTRAL.size :])) from None
        # rest: lengths of extra field and comment, disk, internal attributes
        if signature != b"PK\1\2" or any(rest) or needed != 20 or _LIMIT in (packed, size, offset):
            raise _problem(file, f"a plain entry for {name!r}", "zip64, an extra field, a comment or another disk")
        if flags != (0 if name.isascii() else UTF8) or method not in (STORED, DEFLATED) or length != len(entry) - 46:
            raise _problem(
                file, f"{name!r} stored or deflated, sizes in its header", f"flags {flags:#x}, method {method}"
            )
        mode = attributes >> 16
        if made_by != UNIX << 8 | 20 or not stat.S_ISREG(mode) or attributes & 0xFFFF:
            raise _problem(file, f"{name!r} to be a regular file made on Unix", f"system {made_by >> 8}, mode {mode:o}")
        if not is_safe(name) or (method == STORED and packed != size):
            raise _problem(file, "relative names inside the wheel, and stored sizes that agree", repr(name))
        yield Member(name, method, crc, packed, size, mode, offset, entry)
    if position != len(data):
        raise _problem(file, f"{total} entries in the central directory", "more bytes")


def folders_of(names: Iterable[str]) -> set[str]:
    """Every folder that the names lie in."""
    folders = {name.rpartition("/")[0] for name in names}
    for folder in tuple(folders):
        while folder := folder.rpartition("/")[0]:
            folders.add(folder)
    return folders - {""}


def is_safe(name: str) -> bool:
    """Whether a member's name stays inside the folder that it is unpacked to."""
    suspicious = (
        name[:1] in ("", "/", ".") or name.endswith("/") or "//" in name or "/." in name or "\\" in name or ":" in name
    )
    return name.isprintable() and not (suspicious and _UNSAFE.search(name))


def _problem(file: BinaryIO, expected: str, found: str) -> InputProblem:
    return InputProblem(os.path.basename(file.name), expected=expected, found=found, do="do not use this file")
