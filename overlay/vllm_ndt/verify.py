# SPDX-License-Identifier: Apache-2.0
"""Says whether an installed vLLM is the patched build: of the code that would run, not of files that lie there.

Accidents are found: edits, missing files, a stock vLLM in front. Whoever can forge files can forge the manifest too;
against that only its digest helps (`expect`), kept outside the machine.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ndt import bytecode, manifest
from vllm_ndt.manifest import Manifest, ManifestError

PATCHED, EDITED, INCOMPLETE, ROLLED_BACK, UNKNOWN = "patched", "edited", "incomplete", "rolled back", "could not check"
STATUS = {PATCHED: 0, EDITED: 1, INCOMPLETE: 1, ROLLED_BACK: 2, UNKNOWN: 3}
SHOWN = 20
DIGEST = "a digest of 64 hexadecimal digits"
_CODE = (".py", ".so", ".pyc", ".pyd")


@dataclass(frozen=True)
class Report:
    """A verdict on `where`, with what was found (a line each) and the manifest that was read, if any."""

    where: str
    verdict: str
    manifest: Manifest | None = None
    findings: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status that belongs to the verdict."""
        return STATUS[self.verdict]

    def lines(self) -> list[str]:
        """The report for a reader: one line, and one for each finding (at most twenty)."""
        head = f"{self.verdict}: {self.where}"
        if (found := self.manifest) and self.verdict != ROLLED_BACK:
            head += f", vllm {found.version}, manifest {found.digest}, patches: {', '.join(found.patches)}"
        more = [f"  and {len(self.findings) - SHOWN} more"] if len(self.findings) > SHOWN else []
        return [head, *(f"  {finding}" for finding in self.findings[:SHOWN]), *more]

    def as_dict(self) -> dict[str, Any]:
        """The report for a program."""
        found = self.manifest
        facts = {"version": found.version, "manifest": found.digest, "patches": list(found.patches)} if found else {}
        return {"verdict": self.verdict, "status": self.status, "where": self.where, "findings": self.findings} | facts


def check_running(*, deep: bool = False, expect: str | None = None, against: str | None = None) -> Report:
    """Judge the vLLM that this Python would import, and this package beside it; `against` names a wheel file."""
    site = Path(__file__).absolute().parents[1]
    if against is not None:
        try:
            with zipfile.ZipFile(against) as wheel:
                expect = manifest.parse(wheel.read(manifest.NAME)).digest
        except (OSError, zipfile.BadZipFile, KeyError, ManifestError) as error:
            return Report(str(site), UNKNOWN, findings=[f"{against}: expected a wheel of this project, found: {error}"])
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return Report(str(site), INCOMPLETE, findings=["vllm: not there; reinstall the wheel"])
    # Where a regular package begins, or the folders of a package without __init__.py.
    found = [Path(spec.origin)] if spec.origin else [Path(folder) for folder in spec.submodule_search_locations or ()]
    ours = site / "vllm" / "__init__.py" if spec.origin else site / "vllm"
    if strangers := [path for path in found if not _same(path, ours)]:
        place = strangers[0] if strangers[0].name != "__init__.py" else strangers[0].parents[1]
        return Report(str(site), ROLLED_BACK, findings=[f"another vllm comes first on the path: {place}"])
    return check_site(site, deep=deep, expect=expect)


def find_site(folder: Path) -> Path:
    """The site-packages folder with vllm: the only one of the environment `folder`, or `folder` itself."""
    candidates = [
        folder,
        *sorted(folder.glob("lib*/python*/site-packages")),
        *sorted(folder.glob("lib/python*/dist-packages")),
    ]
    found = [path for path in candidates if (path / "vllm").is_dir() or (path / manifest.NAME).is_file()]
    places = {path.resolve(): path for path in reversed(found)}  # lib64 is a link to lib
    return next(iter(places.values())) if len(places) == 1 else folder


def check_site(site: Path, *, deep: bool = False, expect: str | None = None, same_python: bool = True) -> Report:
    """Judge a site-packages folder: every Python file by its sha256, the rest by size; all by sha256 if `deep`.

    `expect` is the manifest digest (sha256, with or without that word in front) that it must have. Bytecode can only be
    judged by the `same_python`, down to the last number of its version; with another one only what runs whatever its
    source says is found.
    """
    where = str(site)
    if expect is not None and not is_digest(expect):
        return Report(where, UNKNOWN, findings=[f"expected {DIGEST}, found {expect!r}; copy it from the build"])
    try:
        installed = _installed(site)
        if not (site / "vllm").is_dir() and not installed:
            return Report(
                where, UNKNOWN, findings=["no vllm here, or for several Pythons; give its site-packages folder"]
            )
        try:
            found = manifest.read(site)
        except (FileNotFoundError, NotADirectoryError):
            return _without_manifest(where, installed)
        except ManifestError as error:
            return Report(where, EDITED, findings=[str(error)])
        if not (site / "vllm").is_dir() and not installed:
            return Report(where, INCOMPLETE, found, ["vllm: not there; reinstall the wheel"])
        if installed and found.version not in installed:
            return Report(where, ROLLED_BACK, found, [f"vllm {', '.join(installed)} is installed over {found.version}"])
        return _compare(site, found, installed, deep, expect, same_python)
    except OSError as error:
        return Report(
            where,
            UNKNOWN,
            findings=[f"{error.filename}: expected to read it, found: {error.strerror}; run as a user who can"],
        )


def is_digest(text: str) -> bool:
    """Whether a text is a manifest's digest, with or without `sha256:` in front."""
    return bool(re.fullmatch(r"(?:sha256:)?[0-9a-f]{64}", text))


def other_build(expect: str | None, found: Manifest) -> list[str]:
    """A finding if the manifest is not the one that was expected."""
    if expect is None or found.digest.endswith(expect):
        return []
    return [f"another build: expected manifest sha256:{expect.removeprefix('sha256:')}, found {found.digest}"]


def _compare(
    site: Path, found: Manifest, installed: list[str], deep: bool, expect: str | None, same_python: bool
) -> Report:
    edited = (
        [f"two installations of vllm: {', '.join(installed)}; reinstall into a clean environment"]
        if len(installed) > 1
        else []
    )
    missing: list[str] = []
    listings: dict[Path, list[str]] = {}
    for name, (digest, size) in found.files.items():
        path = site / name
        is_python = name.endswith(".py")
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
                edited.append(f"{name}: changed, it is no file")
                continue
            data = path.read_bytes() if is_python else None
            actual = len(data) if data is not None else status.st_size
        except (FileNotFoundError, NotADirectoryError):
            missing.append(f"{name}: missing")
            continue
        if actual != size or not (not (is_python or deep) or _hash(data, path) == digest):
            edited.append(f"{name}: changed")
        elif data is not None:
            compare = same_python and (deep or name in found.changed)
            edited += _bad_caches(site, path, name, data, compare, same_python, listings)
    edited += _strangers(site, found)
    edited += other_build(expect, found)
    verdict = EDITED if edited else INCOMPLETE if missing else PATCHED
    return Report(str(site), verdict, found, edited + missing)


def _bad_caches(
    site: Path,
    source: Path,
    name: str,
    data: bytes,
    compare: bool,
    same_python: bool,
    listings: dict[Path, list[str]],
) -> Iterator[str]:
    """Findings on the bytecode of one good source."""
    folder = source.parent
    if folder not in listings:
        try:
            listings[folder] = os.listdir(folder / "__pycache__")
        except (FileNotFoundError, NotADirectoryError):
            listings[folder] = []
    for cache in bytecode.caches_of(source, listings[folder]):
        unchecked = bytecode.runs_unchecked(cache)
        if unchecked and not same_python:
            yield f"{cache.relative_to(site)}: bytecode that runs whatever {name} says; delete it"
        elif (
            (compare or unchecked)
            and (verdict := bytecode.is_of(cache, source, data)) is not True
            and (unchecked or verdict is False)
        ):
            yield f"{cache.relative_to(site)}: bytecode that is not {name}'s; delete it"


def _strangers(site: Path, found: Manifest) -> Iterator[str]:
    """Findings on code beside the build's: a package or library of a module's name runs in its place."""
    for package in sorted({name.partition("/")[0] for name in found.changed}):
        for root, folders, names in os.walk(site / package):
            prefix = Path(root).relative_to(site).as_posix()
            if folders and any(Path(root, name).is_symlink() for name in folders):
                yield from (
                    f"{prefix}/{name}: a link in place of a folder" for name in folders if Path(root, name).is_symlink()
                )
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                if name.endswith(_CODE) and f"{prefix}/{name}" not in found.files:
                    yield f"{prefix}/{name}: added"


def _without_manifest(where: str, installed: list[str]) -> Report:
    version = ", ".join(installed) or "of unknown version"
    if "+ndt." in version:
        return Report(where, INCOMPLETE, findings=[f"{manifest.NAME}: missing (vllm {version}); reinstall the wheel"])
    return Report(
        where, ROLLED_BACK, findings=[f"vllm {version} without this project's manifest: reinstall the patched wheel"]
    )


def _installed(site: Path) -> list[str]:
    """The versions of vllm that are installed in `site`, as importlib sees them."""
    found = importlib.metadata.distributions(path=[str(site)])
    return sorted(one.version for one in found if re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower() == "vllm")


def _hash(data: bytes | None, path: Path) -> str:
    if data is not None:
        return hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
