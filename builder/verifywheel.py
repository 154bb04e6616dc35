# SPDX-License-Identifier: Apache-2.0
"""Judges a wheel file: every member against the manifest and RECORD, and the file against VERSIONS.lock."""

import hashlib
from pathlib import Path

from vllm_ndt import manifest
from vllm_ndt.manifest import Manifest, ManifestError
from vllm_ndt.verify import DIGEST, EDITED, INCOMPLETE, PATCHED, ROLLED_BACK, Report, is_digest, other_build

from builder.distinfo import recorded_hash
from builder.errors import InputProblem
from builder.hashing import sha256_of
from builder.lockfile import Release
from builder.wheel import UpstreamWheel


def check_wheel(path: Path, releases: dict[str, Release], expect: str | None) -> Report:
    """Judge a wheel file; `expect` is the manifest digest that it must have.

    Raises InputProblem if there is no such file, or it is no plain wheel.
    """
    if expect is not None and not is_digest(expect):
        raise InputProblem("--expect", expected=DIGEST, found=repr(expect), do="copy it from the build")
    if not path.is_file():
        raise InputProblem(str(path), expected="a wheel file", found="no such file", do="give the path of a .whl")
    with path.open("rb") as file:
        wheel = UpstreamWheel(file)
        data = wheel.read(manifest.NAME)
        if data is None:
            return Report(str(path), ROLLED_BACK, findings=["a wheel without this project's manifest"])
        try:
            found = manifest.parse(data)
        except ManifestError as error:
            return Report(str(path), EDITED, findings=[str(error)])
        edited, missing = _compare(wheel, found)
    rows = [row for release in releases.values() for row in release.wheel]
    digest = sha256_of(path)
    edited += [
        f"another build of {found.version}: expected sha256 {row.sha256} (VERSIONS.lock), found {digest}"
        for row in rows
        if row.file == path.name and row.sha256 != digest
    ]
    if expect is None and found.digest not in {row.manifest for row in rows}:
        edited.append(f"manifest {found.digest}: expected one of VERSIONS.lock; give --expect DIGEST for another build")
    edited += other_build(expect, found)
    return Report(str(path), EDITED if edited else INCOMPLETE if missing else PATCHED, found, edited + missing)


def _compare(wheel: UpstreamWheel, found: Manifest) -> tuple[list[str], list[str]]:
    """What differs from the manifest or RECORD, and what is missing."""
    unlisted = {manifest.NAME, f"{wheel.dist_info}/RECORD"}
    edited = [f"{name}: added" for name in sorted(wheel.members.keys() - found.files.keys() - unlisted)]
    missing = [f"{name}: missing" for name in sorted(found.files.keys() - wheel.members.keys())]
    for name in wheel.members.keys() - {f"{wheel.dist_info}/RECORD"}:
        data = wheel.read(name) or b""
        actual = (hashlib.sha256(data).hexdigest(), len(data))
        if found.files.get(name, actual) != actual or wheel.recorded.get(name) != (recorded_hash(data), len(data)):
            edited.append(f"{name}: changed")
    return sorted(edited), missing
