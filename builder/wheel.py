# SPDX-License-Identifier: Apache-2.0
"""Writes the patched wheel in one pass: unchanged members raw, the others stored, RECORD and manifest anew."""

import csv
import hashlib
import io
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from packaging.utils import parse_wheel_filename

from builder import distinfo, wheelfile
from builder.atomic import replacing
from builder.changeset import ChangeSet
from builder.distinfo import GENERATED, MANIFEST, RECORDED, Build, Content, Rows
from builder.errors import InputProblem
from builder.wheelfile import Member

NEW_MODE = stat.S_IFREG | 0o644


@dataclass(frozen=True)
class Written:
    """A finished wheel: its path, sha256 (hex) and its manifest's sha256 (hex; empty for a stock control)."""

    path: Path
    sha256: str
    manifest: str


class UpstreamWheel:
    """An open upstream wheel: its members by name, its dist-info folder, and what its RECORD says.

    Raises InputProblem if it is not in the plain form, or if RECORD does not list its members.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.name = Path(file.name).name
        self.members = {member.name: member for member in wheelfile.read_members(file)}
        records = [name for name in self.members if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
        if len(records) != 1:
            raise self._problem("one dist-info folder with a RECORD", f"{len(records)}")
        self.dist_info = records[0].removesuffix("/RECORD")
        self.recorded = self._read_record(records[0])

    def read(self, name: str) -> bytes | None:
        """A member's bytes, or None if there is no such member."""
        member = self.members.get(name)
        return wheelfile.read_member(self.file, member) if member else None

    def text(self, name: str) -> str:
        """A file of the dist-info folder, or _version.py, as text; raises InputProblem if it is not there."""
        data = self.read(name)
        if data is None:
            raise self._problem(name, "no such member")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._problem(f"{name} in UTF-8", str(error)) from None

    def _read_record(self, record: str) -> dict[str, tuple[str, int]]:
        try:
            rows = [(name, digest, size) for name, digest, size in csv.reader(io.StringIO(self.text(record)))]
        except (csv.Error, ValueError) as error:  # also UnicodeDecodeError, and rows of another length
            raise self._problem("RECORD with rows of name, hash and size", str(error)) from None
        unsigned = {record, f"{self.dist_info}/RECORD.jws", f"{self.dist_info}/RECORD.p7s"}
        recorded = {name: (digest, size) for name, digest, size in rows if name not in unsigned}
        if recorded.keys() != self.members.keys() - unsigned or len({name for name, *_ in rows}) != len(rows):
            odd = min(recorded.keys() ^ (self.members.keys() - unsigned), default="a name twice")
            raise self._problem("RECORD to list each member once", f"{odd!r}")
        for name, (digest, size) in recorded.items():
            if not RECORDED.fullmatch(digest) or size != str(self.members[name].size):
                expected = f"RECORD with sha256 and the size {self.members[name].size} for {name!r}"
                raise self._problem(expected, f"{digest}, {size}")
        return {name: (digest, int(size)) for name, (digest, size) in recorded.items()}

    def _problem(self, expected: str, found: str) -> InputProblem:
        return InputProblem(self.name, expected=expected, found=found, do="do not use this file")


def write(
    upstream: UpstreamWheel, build: Build, content: Content | None, folder: Path, *, expected: str = ""
) -> Written:
    """Write the wheel into `folder`; with no content it is the stock control: upstream's files, another version.

    The same inputs give the same bytes on every machine. Raises InputProblem if upstream's wheel is not as expected,
    or if the result's sha256 is not `expected` (unless empty); then no wheel appears.
    """
    path = folder / build.file_name(upstream.name)
    with replacing(path) as target:
        digest, manifest = _write_members(upstream, build, content, wheelfile.Writer(target))
        if expected and digest != expected:
            raise InputProblem(
                path.name,
                expected=f"sha256 {expected}: VERSIONS.lock already has this label",
                found=digest,
                do="two wheels must not share a label; after a change on purpose run `build.py lock --label NEW`",
            )
    return Written(path, digest, manifest)


def _write_members(
    upstream: UpstreamWheel, build: Build, content: Content | None, writer: wheelfile.Writer
) -> tuple[str, str]:
    """Write all members; returns the sha256 (hex) of the wheel and of its manifest."""
    dist_info = build.dist_info
    changes: ChangeSet = content.changes if content else {}
    new = {path: change.after for path, change in changes.items()}
    tags = {str(tag) for tag in parse_wheel_filename(upstream.name)[3]}
    new |= distinfo.generated(upstream.text, upstream.dist_info, build, content, tags)
    dropped = {f"{upstream.dist_info}/{name}" for name in GENERATED} | new.keys()
    rows = Rows()

    kept = [member for member in upstream.members.values() if member.name not in dropped]
    for run in _runs([member for member in kept if not member.name.startswith(f"{upstream.dist_info}/")]):
        writer.copy(upstream.file, run)
        rows.files.update((member.name, upstream.recorded[member.name]) for member in run)
    for member in kept:
        if member.name.startswith(f"{upstream.dist_info}/"):
            renamed = dist_info + member.name.removeprefix(upstream.dist_info)
            writer.copy_renamed(upstream.file, member, renamed)
            rows.files[renamed] = upstream.recorded[member.name]

    when = dos_time(build.epoch)

    def add(name: str, data: bytes, like: str) -> None:
        old = upstream.members.get(like)
        writer.add(wheelfile.stored(name, data, old.mode if old else NEW_MODE, when), data)

    for name, data in new.items():
        rows.add(name, data)
        add(name, data, upstream.dist_info + name.removeprefix(dist_info) if name.startswith(f"{dist_info}/") else name)
    digest = ""
    if content:
        origin = {"wheel": upstream.name, "sha256": build.upstream_sha256}
        manifest = distinfo.manifest(build, content, rows, origin)
        digest = hashlib.sha256(manifest).hexdigest()
        rows.add(MANIFEST, manifest)
        add(MANIFEST, manifest, MANIFEST)
    add(f"{dist_info}/RECORD", rows.record(f"{dist_info}/RECORD"), f"{upstream.dist_info}/RECORD")
    return writer.finish(), digest


def _runs(members: Iterable[Member]) -> list[list[Member]]:
    """Members that lie side by side, together, so that one copy serves many."""
    runs: list[list[Member]] = []
    for member in members:
        if runs and runs[-1][-1].end == member.offset:
            runs[-1].append(member)
        else:
            runs.append([member])
    return runs


def dos_time(epoch: int) -> tuple[int, int]:
    """A Unix time in UTC as a zip member's (time, date); odd seconds round down, as they have no other way."""
    year, month, day, hour, minute, second = time.gmtime(epoch)[:6]
    return hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day
