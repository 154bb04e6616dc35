# SPDX-License-Identifier: Apache-2.0
"""Reads a wheel's zip structure strictly, and writes members: copied raw, or stored anew.

Only the plain form that wheels of this project have is accepted: no zip64, data descriptors, extra fields,
comments, encryption, links, gaps between members or second entries for a name, and local headers that equal the
central ones. What is not plain is refused, since two readers could see two different wheels in it.
"""

import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from builder.errors import InputProblem

STORED, DEFLATED = 0, 8
UTF8 = 0x800
UNIX = 3
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LIMIT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """One member: sizes in bytes, `mode` as st_mode, `when` as DOS (time, date), `offset` of its local header."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    mode: int
    when: tuple[int, int]
    offset: int = 0

    @property
    def flags(self) -> int:
        """UTF-8 where the name needs it."""
        return 0 if self.name.isascii() else UTF8

    @property
    def data_offset(self) -> int:
        """Where the (packed) bytes begin."""
        return self.offset + _LOCAL.size + len(self.name.encode())

    @property
    def end(self) -> int:
        """Where the next member begins."""
        return self.data_offset + self.packed

    def local_header(self) -> bytes:
        """The header in front of the member's bytes."""
        name = self.name.encode()
        fields = (20, self.flags, self.method, *self.when, self.crc, self.packed, self.size, len(name), 0)
        return _LOCAL.pack(b"PK\3\4", *fields) + name

    def central_header(self) -> bytes:
        """The member's entry in the central directory."""
        name = self.name.encode()
        fields = (UNIX << 8 | 20, 20, self.flags, self.method, *self.when, self.crc, self.packed, self.size)
        return _CENTRAL.pack(b"PK\1\2", *fields, len(name), 0, 0, 0, 0, self.mode << 16, self.offset) + name


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
    return Member(name, STORED, zlib.crc32(data), len(data), len(data), mode, when)


class Writer:
    """Writes members one after the other into `target`, and the central directory at the end."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self._position = 0
        self._members: list[Member] = []

    def copy(self, source: BinaryIO, members: list[Member]) -> None:
        """Copy a run of members that lie side by side in `source`, headers and packed bytes as they are."""
        shift = self._position - members[0].offset
        length = members[-1].end - members[0].offset
        _copy_range(source, self._target, members[0].offset, length)
        self._members += [replace(member, offset=member.offset + shift) for member in members]
        self._position += length

    def copy_renamed(self, source: BinaryIO, member: Member, name: str) -> None:
        """Copy one member's packed bytes below a new header with another name."""
        renamed = replace(member, name=name, offset=self._position)
        self._write(renamed.local_header())
        _copy_range(source, self._target, member.data_offset, member.packed)
        self._position += member.packed
        self._members.append(renamed)

    def add(self, member: Member, data: bytes) -> None:
        """Write a new stored member."""
        member = replace(member, offset=self._position)
        self._write(member.local_header())
        self._write(data)
        self._members.append(member)

    def finish(self) -> None:
        """Write the central directory; raises InputProblem where the plain zip form has no room."""
        directory = b"".join(member.central_header() for member in self._members)
        count = len(self._members)
        if count >= 0xFFFF or self._position + len(directory) >= _LIMIT:
            raise InputProblem(
                "the wheel", expected="less than 4 GiB and 65,535 members", found="more", do="zip64 is not written"
            )
        self._write(directory + _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), self._position, 0))
        self._target.flush()

    def _write(self, data: bytes) -> None:
        self._target.write(data)
        self._position += len(data)


def _copy_range(source: BinaryIO, target: BinaryIO, offset: int, length: int) -> None:
    """Append bytes of one file to another inside the kernel, or by reading where the kernel cannot."""
    target.flush()
    while length > 0:
        try:
            done = os.copy_file_range(source.fileno(), target.fileno(), length, offset)
        except (
            AttributeError,
            OSError,
        ):  # another file system, an old kernel, not Linux: a real error comes again below
            done = os.write(target.fileno(), os.pread(source.fileno(), min(length, 1 << 20), offset))
        if done == 0:
            raise _problem(source, f"{length} more bytes at {offset}", "the end of the file")
        offset += done
        length -= done
    target.seek(0, os.SEEK_END)


def _read_central(file: BinaryIO, data: bytes, total: int) -> Iterator[Member]:
    position = 0
    for _ in range(total):
        if position + _CENTRAL.size > len(data):
            raise _problem(file, f"{total} entries in the central directory", "fewer")
        entry = _CENTRAL.unpack_from(data, position)
        (
            signature,
            made_by,
            needed,
            flags,
            method,
            time,
            date,
            crc,
            packed,
            size,
            name_length,
            extra,
            comment,
            disk,
            _,
            attributes,
            offset,
        ) = entry
        position += _CENTRAL.size
        raw = data[position : position + name_length]
        position += name_length
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _problem(file, "names in UTF-8", repr(raw)) from None
        if (
            signature != b"PK\1\2"
            or (extra, comment, disk) != (0, 0, 0)
            or needed > 20
            or _LIMIT in (packed, size, offset)
        ):
            raise _problem(file, f"a plain entry for {name!r}", "zip64, an extra field, a comment or another disk")
        mode = attributes >> 16
        member = Member(name, method, crc, packed, size, mode, (time, date), offset)
        if flags != member.flags or method not in (STORED, DEFLATED) or (method == STORED and packed != size):
            raise _problem(
                file, f"{name!r} stored or deflated, with sizes in its header", f"flags {flags:#x}, method {method}"
            )
        if made_by >> 8 != UNIX or not stat.S_ISREG(mode):
            raise _problem(file, f"{name!r} to be a regular file made on Unix", f"system {made_by >> 8}, mode {mode:o}")
        if not is_safe(name):
            raise _problem(file, "relative names inside the wheel", repr(name))
        yield member
    if position != len(data):
        raise _problem(file, f"{total} entries in the central directory", "more bytes")


def folders_of(names: Iterable[str]) -> set[str]:
    """Every folder that the names lie in."""
    folders: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders


def is_safe(name: str) -> bool:
    """Whether a member's name stays inside the folder that it is unpacked to."""
    parts = name.split("/")
    return not ({"", ".", ".."} & set(parts)) and "\\" not in name and ":" not in parts[0] and name.isprintable()


def _problem(file: BinaryIO, expected: str, found: str) -> InputProblem:
    return InputProblem(os.path.basename(file.name), expected=expected, found=found, do="do not use this file")
