# SPDX-License-Identifier: Apache-2.0
"""Fetches the wheels of a locked closure for a Python that need not be this one, into the cache."""

import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

from builder.atomic import locked
from builder.bootstrap import last_line, pip_environment
from builder.closure import rows
from builder.errors import InputProblem
from builder.hashing import sha256_of

# what wheels for glibc 2.28 and older are called; pip does not go down from one to the next by itself
_OLD = ("manylinux1", "manylinux2010", "manylinux2014", "linux", *(f"manylinux_2_{minor}" for minor in range(5, 29)))


def gather(lock: Path, python: str, arch: str, cache: Path, *, offline: bool) -> Path:
    """The folder with a closure's wheels for a Python such as 3.12.7, each with a hash of the lock.

    Raises InputProblem if they are not there and cannot be fetched.
    """
    folder = cache / "wheelhouses" / f"{lock.stem}-{python}-{arch}-{sha256_of(lock)[:16]}"
    with locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        if offline:
            raise InputProblem(lock.name, expected=f"its wheels in {folder}", found="none", do="run once without --offline")  # noqa: E501  # fmt: skip
        print(f"fetching the wheels of {lock.name} for Python {python}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wanted = Path(scratch, lock.name)
            wanted.write_text(requirements_for(lock.read_text("utf-8"), python, arch), "utf-8")
            _download(wanted, python, arch, Path(scratch, "wheels"))
            Path(scratch, "wheels").replace(folder)
    return folder


def requirements_for(text: str, python: str, arch: str) -> str:
    """The rows of a lock that hold on Linux with such a CPython, without their markers.

    pip would judge markers by the Python that it runs with itself.
    """
    environment = {
        "implementation_name": "cpython",
        "implementation_version": python,
        "os_name": "posix",
        "platform_machine": arch,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": "linux",
    }
    kept = []
    for pin, hashes in rows(text):
        requirement = Requirement(pin)
        if hashes and (requirement.marker is None or requirement.marker.evaluate(environment)):
            kept.append(f"{requirement.name}{requirement.specifier} \\\n{hashes}")
    return "".join(kept)


def _download(lock: Path, python: str, arch: str, folder: Path) -> None:
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar", "off", "--no-deps", "--no-cache-dir"]  # noqa: E501  # fmt: skip
    command += ["--only-binary", ":all:", "--require-hashes", "--requirement", str(lock), "--dest", str(folder)]
    command += ["--implementation", "cp", "--python-version", python]
    command += [f"--platform={name}_{arch}" for name in _OLD]
    command += [f"--abi={abi}" for abi in ("cp" + "".join(python.split(".")[:2]), "abi3", "none")]
    done = subprocess.run(command, env=pip_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputProblem(
            lock.name,
            expected=f"pip to download its wheels for Python {python}",
            found=last_line(done.stderr),
            do="check the network and `pip config list`, or take a base with another Python",
        )
