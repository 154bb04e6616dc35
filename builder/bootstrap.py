# SPDX-License-Identifier: Apache-2.0
"""Makes build.py's own environment from a hash-pinned lock, with nothing but the standard library and pip.

`pip install --target` is used everywhere: Debian's Python has no venv module, and a folder on sys.path is enough.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from builder.errors import BuildError, InputProblem

COMPLETE = "complete"  # the file that is written last


def default_cache() -> Path:
    """The folder for downloads and environments: $XDG_CACHE_HOME/vllm-ndt, else ~/.cache/vllm-ndt."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base, "vllm-ndt")
    try:
        return Path.home() / ".cache" / "vllm-ndt"
    except (RuntimeError, KeyError):
        raise BuildError("cache", expected="a home folder", found="none", do="pass --cache DIR") from None


def ensure(lock: Path, cache: Path, *, offline: bool) -> Path:
    """The folder that holds the packages of `lock` for this Python; it is made on the first call.

    Raises InputProblem if the packages are not there and cannot be fetched.
    """
    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    target = cache / "tools" / f"{lock.stem}-{python_key()}-{key}"
    if not (target / COMPLETE).is_file():
        if offline:
            raise InputProblem(
                f"the packages of {lock.name}",
                expected=f"them in {target}",
                found="nothing",
                do="run once without --offline",
            )
        print(f"making {target} from {lock.name}", file=sys.stderr)
        _install(lock, target)
    return target


def python_key() -> str:
    """What binary packages depend on: the Python, and the machine, since homes are shared over the network."""
    return f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def pip_environment() -> dict[str, str]:
    """The environment for pip: the user's configuration of where packages come from holds, what would bend
    `--target`, `download` or the pinned versions does not (docs/installing.md advises PIP_CONSTRAINT to everybody)."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")}
    kept |= {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_REQUIRE_HASHES": "0", "PIP_DRY_RUN": "0"}
    # Empty, and not unset: so it also takes the place of a constraint in pip's configuration files.
    return kept | {"PIP_CONSTRAINT": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def last_line(output: str) -> str:
    """The line of a tool's output that says what went wrong: the last that names an error, else the last.

    Where that is only the heading of a list ("1 error occurred:"), the last line.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error") and not line.endswith("Exception:")]
    line = (errors or lines or ["no output"])[-1]
    return (lines[-1] if line.endswith(":") else line).removeprefix("ERROR: ")


def _install(lock: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--no-cache-dir", "--target", str(part), "--requirement", str(lock)]
        done = subprocess.run(command, env=pip_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            hint = (
                "install pip for this Python (Debian: python3-pip)"
                if "No module named pip" in done.stderr
                else "see pip's message"
            )
            raise InputProblem(
                f"the packages of {lock.name}", expected="pip to install them", found=last_line(done.stderr), do=hint
            )
        part.chmod(0o755)
        (part / COMPLETE).touch()
        try:
            if target.is_dir() and not (target / COMPLETE).is_file():  # emptied by hand, or of an older build.py
                shutil.rmtree(target)
            part.rename(target)
        except OSError:
            if not (target / COMPLETE).is_file():  # else another run was first
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
