# SPDX-License-Identifier: Apache-2.0
"""`build.py test`: makes the environments that the tests need, and runs pytest.

The CPU flavor's closure is installed once; the stock control and the patched wheel each get an environment of their
own that sees it, so that both are installed as a user installs them and 6 GB are not there twice.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from builder.atomic import locked
from builder.bootstrap import python_key
from builder.hashing import sha256_of
from builder.inputs import Project
from builder.lockfile import Release
from builder.pipeline import build, build_stock
from builder.uv import run_uv

# as pip does by itself: an engine's processes import thousands of modules each
_INSTALL = ("pip", "install", "--compile-bytecode", "--python")


@dataclass(frozen=True)
class Trees:
    """The Python of an environment with the stock control, and of one with the patched wheel (CPU flavor)."""

    stock: Path
    patched: Path


def make_trees(project: Project, release: Release, arch: str, cache: Path, uv: Path, *, offline: bool) -> Trees:
    """Build both wheels of the CPU flavor and install them over the closure; what is there already is kept."""
    closure = _closure_site(project, release, cache, uv)
    wheels = cache / "test-wheels"
    stock = build_stock(release, "cpu", arch, wheels, cache, offline=offline)
    patched = build(project, release, "cpu", arch, wheels, cache, offline=offline)
    return Trees(*(_install(wheel.path, wheel.sha256, closure, cache, uv) for wheel in (stock, patched)))


def run_pytest(
    project: Project, release: Release, dev: Path, uv: Path, trees: Trees | None, cache: Path, arguments: list[str]
) -> bool:
    """Run the tests that need no engine, then, if there are trees, the others, two files at a time; or what is asked.

    Returns whether all passed.
    """
    path = os.pathsep.join(str(folder) for folder in (dev, project.root, project.overlay))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"UV": str(uv), "BUILD_CACHE": str(cache), "RELEASE": release.version}
    runs = [arguments] if arguments else [["--numprocesses=auto", "tests/builder"]]
    if trees:
        environment |= {"STOCK_PYTHON": str(trees.stock), "PATCHED_PYTHON": str(trees.patched)}
        # an engine's start is one core's work; a file's tests share their servers
        runs += [] if arguments else [["--numprocesses=2", "--dist=loadfile", "tests", "--ignore=tests/builder"]]
    passed = True
    for run in runs:
        command = [sys.executable, "-m", "pytest", *run]
        passed &= subprocess.run(command, cwd=project.root, env=environment, check=False).returncode == 0
    return passed


def _closure_site(project: Project, release: Release, cache: Path, uv: Path) -> Path:
    """The site-packages folder of an environment with the CPU closure and the tests' own packages."""
    locks = [project.locks / f"{release.version}-cpu.txt", project.locks / "dev.txt"]
    key = "-".join(sha256_of(lock)[:8] for lock in locks)
    folder = cache / "envs" / f"closure-{python_key()}-{key}"
    with locked(folder.with_suffix(".lock")):
        if not _is_complete(folder):
            print(f"installing the CPU closure (about 6 GB) into {folder}", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            run_uv(uv, ["venv", "--python", sys.executable, str(folder)])
            requirements = [option for lock in locks for option in ("--requirement", str(lock))]
            run_uv(
                uv,
                [*_INSTALL, str(folder / "bin" / "python"), "--require-hashes", *requirements],
                cache / "uv",
            )
            (folder / "complete").touch()
    return _site_packages(folder)


def _install(wheel: Path, digest: str, closure: Path, cache: Path, uv: Path) -> Path:
    folder = cache / "envs" / f"{digest[:16]}-{closure.parents[2].name}"
    python = folder / "bin" / "python"
    with locked(folder.with_suffix(".lock")):
        if not _is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            run_uv(uv, ["venv", "--python", sys.executable, str(folder)])
            (_site_packages(folder) / "closure.pth").write_text(f"{closure}\n", "utf-8")
            run_uv(uv, [*_INSTALL, str(python), "--no-deps", str(wheel)], cache / "uv")
            (folder / "complete").touch()
    return python


def _is_complete(folder: Path) -> bool:
    """Whether an environment was made to the end, and its Python is still there."""
    return (folder / "complete").is_file() and (folder / "bin" / "python").is_file()


def _site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))
