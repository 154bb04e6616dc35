# SPDX-License-Identifier: Apache-2.0
"""Writes the patched wheel in one pass: unchanged members raw, the others stored, RECORD and manifest anew."""

import csv
import hashlib
import io
import json
import re
import stat
import time
from base64 import urlsafe_b64encode
from binascii import a2b_base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from packaging.utils import parse_wheel_filename

from builder import metadata, wheelfile
from builder.atomic import replacing
from builder.changeset import ChangeSet
from builder.errors import InputProblem
from builder.patchfile import Patch
from builder.sbom import bill_of_materials
from builder.wheelfile import Member

SCRIPT = "vllm-ndt = vllm_ndt.cli:main"
MANIFEST = "vllm_ndt/manifest.json"  # as vllm_ndt.manifest.NAME; the overlay is data here
CHANGES = "CHANGES.vllm-ndt.txt"
VERSION_MODULE = "vllm/_version.py"
NEW_MODE = stat.S_IFREG | 0o644
_FROM_URL_SAFE = str.maketrans("-_", "+/")
_RECORDED = re.compile(r"sha256=[A-Za-z0-9_-]{43}")
_GENERATED = ("METADATA", "WHEEL", "entry_points.txt", "RECORD", "RECORD.jws", "RECORD.p7s")


@dataclass(frozen=True)
class Content:
    """What the patched wheel gets: the changes, the patches behind them with their sha256, the closure's pins."""

    changes: ChangeSet
    patches: tuple[tuple[Patch, str], ...]
    pins: tuple[str, ...]


@dataclass(frozen=True)
class Build:
    """What the wheel is: release, label (without the +), flavor, arch, time of its new members (Unix), and origin."""

    release: str
    label: str
    flavor: str
    arch: str
    epoch: int
    commit: str
    upstream_sha256: str

    @property
    def version(self) -> str:
        """The version with its local part: 0.27.1+ndt.1, on the CPU 0.27.1+ndt.1.cpu (upstream looks for that word)."""
        return f"{self.release}+{self.label}" + (".cpu" if self.flavor == "cpu" and self.label != "cpu" else "")

    def file_name(self, upstream: str) -> str:
        """The wheel's file name, with the tags of upstream's."""
        return f"vllm-{self.version}-" + upstream.removesuffix(".whl").split("-", 2)[2] + ".whl"


@dataclass(frozen=True)
class Written:
    """A finished wheel: its path, sha256 (hex) and its manifest's sha256 (hex; empty for a stock control)."""

    path: Path
    sha256: str
    manifest: str


@dataclass
class _Rows:
    """RECORD rows and manifest lines, collected by member: path to (sha256 as RECORD writes it, size in bytes)."""

    files: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        self.files[name] = (recorded_hash(data), len(data))

    def record(self, record_name: str) -> bytes:
        lines = [f"{_quoted(name)},{digest},{size}\n" for name, (digest, size) in self.files.items()]
        return "".join([*lines, f"{record_name},,\n"]).encode()


def _quoted(name: str) -> str:
    """A name as a CSV field."""
    return '"' + name.replace('"', '""') + '"' if "," in name or '"' in name else name


def recorded_hash(data: bytes) -> str:
    """The sha256 of bytes as RECORD writes it."""
    return "sha256=" + urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


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
            if not _RECORDED.fullmatch(digest) or size != str(self.members[name].size):
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
    dist_info = f"vllm-{build.version}.dist-info"
    changes: ChangeSet = content.changes if content else {}
    new = {path: change.after for path, change in changes.items()}
    new |= _generated(upstream, dist_info, build, content)
    dropped = {f"{upstream.dist_info}/{name}" for name in _GENERATED} | new.keys()
    rows = _Rows()

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
        manifest = _manifest(upstream, build, content, rows)
        digest = hashlib.sha256(manifest).hexdigest()
        rows.add(MANIFEST, manifest)
        add(MANIFEST, manifest, MANIFEST)
    add(f"{dist_info}/RECORD", rows.record(f"{dist_info}/RECORD"), f"{upstream.dist_info}/RECORD")
    return writer.finish(), digest


def _generated(upstream: UpstreamWheel, dist_info: str, build: Build, content: Content | None) -> dict[str, bytes]:
    tags = {str(tag) for tag in parse_wheel_filename(upstream.name)[3]}
    old = upstream.dist_info
    edited = metadata.edit_metadata(
        upstream.text(f"{old}/METADATA"),
        version=build.version,
        locked=content.pins if content else (),
        license_files=(CHANGES,) if content else (),
        cpu=build.flavor == "cpu",
    )
    entry_points = upstream.text(f"{old}/entry_points.txt")
    files = {
        VERSION_MODULE: metadata.edit_version_module(upstream.text(VERSION_MODULE), build.version),
        f"{dist_info}/METADATA": edited,
        f"{dist_info}/WHEEL": metadata.edit_wheel(upstream.text(f"{old}/WHEEL"), tags),
        f"{dist_info}/entry_points.txt": metadata.edit_entry_points(entry_points, SCRIPT) if content else entry_points,
    }
    if content:
        files[f"{dist_info}/licenses/{CHANGES}"] = _change_notice(build, content)
    result = {name: text.encode() for name, text in files.items()}
    if content:
        result[f"{dist_info}/sboms/vllm-ndt.cdx.json"] = bill_of_materials(
            version=build.version,
            upstream=build.release,
            upstream_sha256=build.upstream_sha256,
            patches=[(patch.name, digest) for patch, digest in content.patches],
            pins=content.pins,
        )
    return result


def _change_notice(build: Build, content: Content) -> str:
    lines = [
        f"vllm {build.version} is vLLM {build.release} (Apache-2.0) with changes. These files differ from upstream's:",
        "",
        f"{VERSION_MODULE} (the version)",
        "the dist-info folder (name, version, tags, entry points, licence files, extra 'locked', RECORD)",
    ]
    for patch, digest in content.patches:
        files = ", ".join(file.path for file in patch.files)
        lines.append(f"{files} ({patch.name}: {patch.subject}; sha256 {digest})")
    new = [path for path, change in content.changes.items() if not change.before]
    return "\n".join([*lines, "", "These files are new, under the same licence:", "", *new, MANIFEST]) + "\n"


def _manifest(upstream: UpstreamWheel, build: Build, content: Content, rows: _Rows) -> bytes:
    document = {
        "format": 1,
        "name": "vllm",
        "version": build.version,
        "flavor": build.flavor,
        "arch": build.arch,
        "upstream": {
            "version": build.release,
            "commit": build.commit,
            "wheel": upstream.name,
            "sha256": build.upstream_sha256,
        },
        "patches": [
            {
                "name": patch.name,
                "subject": patch.subject,
                "sha256": digest,
                "files": [file.path for file in patch.files],
            }
            for patch, digest in content.patches
        ],
        "changed": sorted([*content.changes, VERSION_MODULE]),
        "files": {name: f"{_hex(digest)} {size}" for name, (digest, size) in sorted(rows.files.items())},
    }
    # A line for each file; the encoder that indents is slow.
    return (json.dumps(document, separators=(",\n", ": ")) + "\n").encode()


def _hex(recorded: str) -> str:
    return a2b_base64(recorded[len("sha256=") :].translate(_FROM_URL_SAFE) + "=").hex()


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
