# SPDX-License-Identifier: Apache-2.0
"""Brings a pinned artefact into a cache that is keyed by sha256; only a file with the pinned hash is ever taken.

Wheels come through pip, so that the user's mirrors, proxies and certificates hold. The sdist comes from pip's
configured index too, but pip would build it to read its metadata, so it is looked up and fetched without pip.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename

from builder.atomic import locked
from builder.bootstrap import last_line, pip_environment
from builder.errors import InputProblem
from builder.hashing import sha256_of
from builder.lockfile import Artefact


def cached(artefact: Artefact, cache: Path) -> Path:
    """Where an artefact lies in the cache, if it is there."""
    return cache / "sha256" / artefact.sha256 / artefact.file


def fetch(artefact: Artefact, version: str, cache: Path, *, offline: bool) -> Path:
    """The path of `artefact` in the cache, fetched if it is not there.

    Raises InputProblem if it cannot be had, or if what the index serves is not what VERSIONS.lock pins.
    """
    path = cached(artefact, cache)
    with locked(cache / "sha256" / f"{artefact.sha256}.lock"):
        if path.is_file():
            if sha256_of(path) == artefact.sha256:
                return path
            path.unlink()  # a damaged disk or a hand: fetched again below
        if offline:
            raise InputProblem(
                artefact.file,
                expected=f"it in the cache {cache} (--offline)",
                found="nothing",
                do="run once without --offline",
            )
        scratch = cache / "sha256" / f"{artefact.sha256}.download"  # of fixed name: a killed download's is cleared
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            found = download(artefact.project, version, artefact.file, scratch)
            digest = sha256_of(found)
            if digest != artefact.sha256:
                raise InputProblem(
                    artefact.file,
                    expected=f"sha256 {artefact.sha256} (VERSIONS.lock)",
                    found=digest,
                    do="do not use this file; find out who serves it (`pip config list`)",
                )
            store(found, artefact, cache)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def store(found: Path, artefact: Artefact, cache: Path) -> None:
    """Move a file of the cache's file system, whose sha256 is known to be the artefact's, to its place in the cache."""
    path = cached(artefact, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.replace(path)


def download(project: str, version: str, file: str, folder: Path) -> Path:
    """Fetch one file of a release from pip's configured index into `folder`; its hash is not looked at."""
    if file.endswith(".whl"):
        return _download_wheel(project, version, file, folder)
    from builder.index import download_sdist  # needs packages that a build does not

    return download_sdist(project, version, file, folder)


def _download_wheel(project: str, version: str, file: str, folder: Path) -> Path:
    tags = parse_wheel_filename(file)[3]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--implementation", "cp", "--python-version", "3.12", "--dest", str(folder)]
    command += [f"--platform={platform}" for platform in sorted({tag.platform for tag in tags})]
    command += [f"--abi={abi}" for abi in sorted({tag.abi for tag in tags})]
    # === and not ==: a patched wheel in one of the user's own folders satisfies ==, and pip prefers it.
    command.append(f"{project}==={version}")
    terminal = sys.stderr.isatty()
    if not terminal:
        command += ["--quiet", "--progress-bar", "off"]
    done = subprocess.run(
        command,
        env=pip_environment(),
        stdout=sys.stderr if terminal else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InputProblem(
            file,
            expected="pip to download it",
            found=last_line(done.stderr),
            do="check the network and `pip config list`, then run again",
        )
    path = folder / file
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        raise InputProblem(
            file, expected="pip to bring this file", found=", ".join(names), do="check `pip config list`"
        )
    return path
