# SPDX-License-Identifier: Apache-2.0
"""Finds docker, buildah or podman, whichever can build here, and runs it. It needs the standard library alone."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from builder.bootstrap import last_line
from builder.errors import ImageProblem, StepProblem

BUILDERS = ("docker", "buildah", "podman")
PATIENCE = 15  # seconds that a builder has to end in order
# what must succeed before a builder is taken: a command of that name alone says little
_PROBES = {
    "docker": (["docker", "buildx", "version"], ["docker", "info"]),
    "buildah": (["buildah", "info"],),
    "podman": (["podman", "info"],),
}
INSTALL = "install docker with buildx, buildah or podman, or use --image no"


def find_builder(wanted: str | None) -> str:
    """The first builder that can build here, or the one that is wanted; raises ImageProblem if there is none."""
    said = {}
    for name in (wanted,) if wanted else BUILDERS:
        said[name] = next((problem for probe in _PROBES[name] if (problem := problem_with(probe))), "")
        if not said[name]:
            return name
    found = "; ".join(f"{name}: {problem}" for name, problem in said.items())
    raise ImageProblem("--image", expected="a builder of images", found=found, do=INSTALL)


def problem_with(words: Sequence[str]) -> str:
    """Why a short command does not succeed, or "" if it does."""
    if not shutil.which(words[0]):
        return "not installed"
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(words)}`: {error}"
    return f"`{' '.join(words)}`: {last_line(done.stderr or done.stdout)}" if done.returncode else ""


def run(words: Iterable[str], *, log: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints, which is kept in the file `log` if one is given; raises ImageProblem with its last words.

    If this process is told to end meanwhile, the command is told too, so that it removes what it made.
    """
    words = list(words)
    with open(log, "w+b") if log else tempfile.TemporaryFile() as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})})  # noqa: E501  # fmt: skip
        try:
            status = process.wait()
        except BaseException:
            _end(process)
            raise
        file.seek(0)
        said = file.read().decode(errors="replace")
    if status:
        raise _problem(" ".join(words[:2]), said)
    return said


def attempt(words: Iterable[str]) -> str:
    """The same of a command that may fail: of one that tidies up."""
    try:
        return run(words)
    except ImageProblem:
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except BaseException:  # it took too long, or we were told again
        process.kill()
        process.wait()


def _problem(what: str, said: str) -> ImageProblem:
    lines = [line.strip() for line in said.splitlines()]
    ours = [line for line in lines if "error: " in line and "expected" in line]  # of builder.layer and builder.full
    if ours:
        return StepProblem(ours[-1].partition("error: ")[2])
    do = f"correct what it says, or run `{what}` by hand"
    return ImageProblem(what, expected="it to succeed", found=last_line(said), do=do)
