# SPDX-License-Identifier: Apache-2.0
"""Lint, format and types, as part of the tests, so that one command checks all."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: str) -> str:
    """A tool's output if it complains, else nothing."""
    command = [sys.executable, "-m", module, *arguments]
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    if module == "ruff":
        command = [str(Path(spec.origin).parents[1] / "bin" / "ruff"), *arguments]
    environment = os.environ | {"RUFF_NO_CACHE": "true", "MYPY_CACHE_DIR": os.devnull}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_lint() -> None:
    assert run("ruff", "check", "--quiet", ".") == ""


def test_format() -> None:
    assert run("ruff", "format", "--check", "--quiet", ".") == ""


def test_types() -> None:
    assert run("mypy") == ""


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda path: path.name)
def test_links_of_the_docs_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing
