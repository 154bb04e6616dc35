# SPDX-License-Identifier: Apache-2.0
"""Which GPU architectures a native library holds code for, read from its fat binaries without any CUDA tool.

The section .nv_fatbin of an ELF file holds containers, one behind the other, and each of them entries: machine code
(a cubin) or PTX for one architecture. Only headers are read, so compressed entries cost nothing.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

CUBIN, PTX = "cubin", "ptx"
SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
_KINDS = {1: PTX, 2: CUBIN}
_FLAGS_OF_SUFFIX = {1 << 20: "a", 1 << 21: "f"}
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")  # ... kind, header's size, payload's size, ..., architecture, ..., flags
_SECTION = struct.Struct("<IIQQQQIIQQ")
_PIECE = 4096


class FatbinError(ValueError):
    """A file that is no ELF library, or is damaged; the message says what was expected and what was found."""


class Arch(NamedTuple):
    """An architecture: CUBIN or PTX, ten times the capability's major number plus the minor, and "", "a" or "f"."""

    kind: str
    sm: int
    suffix: str = ""

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a card of this compute capability runs such code, as it is (cubin) or translated (PTX)."""
        mine, card = divmod(self.sm, 10), (major, minor)
        if self.suffix == "a":
            return mine == card
        same_family = mine[0] == major and mine[1] <= minor
        return same_family if self.kind == CUBIN or self.suffix == "f" else mine <= card

    def __str__(self) -> str:
        return f"{'sm' if self.kind == CUBIN else 'compute'}_{self.sm}{self.suffix}"


def architectures(path: Path) -> tuple[Arch, ...]:
    """The architectures of a library's GPU code, in order; none if it has no such code.

    Raises FatbinError, or OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            raise FatbinError(f"{path.name}: expected an ELF library, found an empty file") from None
        with data:
            try:
                return tuple(sorted(_scan(data)))
            except FatbinError as error:
                raise FatbinError(f"{path.name}: {error}") from None


def _scan(data: mmap.mmap) -> set[Arch]:
    found: set[Arch] = set()
    for start, size in _sections(data):
        if start + size > len(data):
            raise FatbinError(f"expected {SECTION.decode()} of {size} bytes, found the end of the file; it is cut off")
        at, end = start, start + size
        while (at := _behind_zeros(data, at, end)) < end:
            at = _container(data, at, end, found)
    return found


def _sections(data: mmap.mmap) -> list[tuple[int, int]]:
    """Start and size of each section of fat binaries."""
    if data[:4] != b"\x7fELF":
        raise FatbinError(f"expected an ELF library, found {bytes(data[:4])!r}")
    if len(data) < 64 or data[4:6] != b"\x02\x01":
        raise FatbinError("expected a 64-bit little-endian ELF library, found another kind, or its beginning alone")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    width, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if not table:
        raise FatbinError("expected section headers, found none; the library is stripped of them")
    if width != _SECTION.size or table + width > len(data):
        raise FatbinError("expected section headers, found none where the file has them; it is damaged or cut off")
    first = _SECTION.unpack_from(data, table)
    count, names = count or first[5], first[6] if names == 0xFFFF else names  # too many for their fields
    if table + width * count > len(data) or names >= count:
        raise FatbinError(f"expected {count} section headers, found fewer; the file is damaged or cut off")
    headers = [_SECTION.unpack_from(data, table + width * index) for index in range(count)]
    texts = headers[names][4]
    nothing = 8  # the type of a section that takes no room in the file
    wanted = SECTION + b"\0"
    return [
        (header[4], header[5])
        for header in headers
        if header[1] != nothing and data[texts + header[0] : texts + header[0] + len(wanted)] == wanted
    ]


def _container(data: mmap.mmap, start: int, end: int, found: set[Arch]) -> int:
    """Add a container's architectures; returns where it ends."""
    if start + _CONTAINER.size > end:
        raise FatbinError(f"expected a fat binary at {start}, found the end of the section")
    magic, _, head, size = _CONTAINER.unpack_from(data, start)
    if magic != MAGIC:
        raise FatbinError(f"expected a fat binary at {start}, found {magic:#010x} in place of {MAGIC:#010x}")
    at, last = start + head, int(start + head + size)
    if head < _CONTAINER.size or last > end:
        raise FatbinError(f"expected {head + size} bytes of fat binary at {start}, found {end - start}")
    while at < last:
        if at + _ENTRY.size > last:
            raise FatbinError(f"expected an entry of a fat binary at {at}, found the end of the fat binary")
        kind, _, entry, payload, _, _, _, _, sm, _, _, flags = _ENTRY.unpack_from(data, at)
        if entry < _ENTRY.size or at + entry + payload > last:
            raise FatbinError(f"expected {entry + payload} bytes of entry at {at}, found {last - at}")
        if kind in _KINDS:
            if not 10 <= sm < 1000:
                raise FatbinError(f"expected an architecture such as 75 or 120 at {at}, found {sm}")
            suffix = "".join(letter for flag, letter in _FLAGS_OF_SUFFIX.items() if flags & flag)
            found.add(Arch(_KINDS[kind], sm, suffix[:1]))
        at += entry + payload
    return last


def _behind_zeros(data: mmap.mmap, at: int, end: int) -> int:
    """The next place that is not zero: containers are aligned."""
    while at < end:
        piece = data[at : min(at + _PIECE, end)]
        rest = piece.lstrip(b"\0")
        if rest:
            return at + len(piece) - len(rest)
        at += len(piece)
    return end
