# SPDX-License-Identifier: Apache-2.0
"""Installs the patched wheel and its locked closure on a plain Python image, in a step of the Dockerfile.

The closure's wheels lie in the folder that the image is built in, so pip fetches nothing. A C++ compiler and Python's
headers, with which Triton and torch.compile make their launchers when the engine runs, come from Debian where the base
lacks them. Needs Python with pip, and the standard library.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from builder.distinfo import MANIFEST
from builder.errors import BuildError, InputProblem
from builder.layer import leave, list_startup

WHEELS, CLOSURE = "wheels", "closure.txt"


def missing(compiler: str | None, header: Path) -> list[str]:
    """The Debian packages that bring what is not there."""
    return [*([] if compiler else ["g++"]), *([] if header.is_file() else ["python3-dev"])]


def install_packages(names: Sequence[str]) -> None:
    """Install Debian's packages and leave no lists behind."""
    if not shutil.which("apt-get"):
        raise InputProblem("the base", expected=f"{', '.join(names)}, or apt-get to install them", found="neither", do="use a Debian image of Python")  # noqa: E501  # fmt: skip
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", *names]):
        _run(["apt-get", "-y", *words], environment)
    for folder in ("/var/lib/apt/lists", "/var/cache/apt", "/var/log/apt"):
        shutil.rmtree(folder, ignore_errors=True)


def install_wheels(root: Path) -> None:
    """Install the closure by its hashes, and the wheel of vllm, from the folder that the image is built in."""
    environment = os.environ | {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--no-compile"]  # noqa: E501  # fmt: skip
    _run([*pip, "--find-links", str(root / WHEELS), "--require-hashes", "-r", str(root / CLOSURE)], environment)
    _run([*pip, *(str(path) for path in root.glob("vllm-*.whl"))], environment)


def _run(words: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # noqa: E501  # fmt: skip
    if done.returncode:
        said = " ".join(done.stdout.split())[-400:]
        raise InputProblem(" ".join(words[:4]), expected="it to succeed", found=said, do="correct what it says")


def main() -> int:
    """Install all; prints the manifest's digest. The folder says what: no argument of the Dockerfile's is needed."""
    root = Path(__file__).resolve().parents[1]
    try:
        if importlib.util.find_spec("vllm"):
            raise InputProblem("the base", expected="a Python without vllm", found="vllm", do="build without --full on it")  # noqa: E501  # fmt: skip
        compiler = next(filter(None, map(shutil.which, ("g++", "c++"))), None)
        if names := missing(compiler, Path(sysconfig.get_path("include"), "Python.h")):
            install_packages(names)
        install_wheels(root)
        manifest = Path(sysconfig.get_path("purelib"), MANIFEST)
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    leave(digest, list_startup())
    print(f"manifest sha256:{digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
