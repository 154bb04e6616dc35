# SPDX-License-Identifier: Apache-2.0
"""Every patch's test fails on the stock wheel and passes on the patched one.

tests/patches is run by each environment's own Python; the outcomes are read from pytest's report.
"""

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from builder.inputs import Project, read_inputs

ROOT = Path(__file__).resolve().parents[1]
PATCHES = read_inputs(Project(ROOT), os.environ["RELEASE"]).patches


@dataclass(frozen=True)
class Outcome:
    """How a test ended: passed, failed, error or skipped; and with what message."""

    result: str
    message: str


Outcomes = dict[str, list[Outcome]]


# The rows of this one say what stock does.
STOCK_ANSWERS = "tests/patches/test_default_usage_stats_off.py::test_case"


def run_tree(name: str, folder: Path, tests: list[str]) -> Outcomes:
    """The outcomes of tests under one environment, by FILE::FUNCTION."""
    python = os.environ[f"{name.upper()}_PYTHON"]
    report = folder / f"{name}.xml"
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("VLLM_")}
    environment = kept | {"TREE": name, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert report.is_file(), done.stdout + done.stderr
    (folder / f"{name}.txt").write_text(done.stdout + done.stderr)
    outcomes: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  (our own file)
        child = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        result = (
            {"failure": "failed", "error": "error", "skipped": "skipped"}[child.tag] if child is not None else "passed"
        )
        file = case.attrib["classname"].replace(".", "/") + ".py"
        key = f"{file}::{case.attrib['name'].partition('[')[0]}"
        outcomes.setdefault(key, []).append(Outcome(result, child.get("message") or "" if child is not None else ""))
    return outcomes


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    tests = [*(patch.trailers["Test"] for patch in PATCHES), STOCK_ANSWERS]
    return run_tree("stock", tmp_path_factory.mktemp("trees"), tests)


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_tree("patched", tmp_path_factory.mktemp("trees"), ["tests/patches"])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_fails_on_stock_and_passes_on_patched(patch, stock: Outcomes, patched: Outcomes) -> None:
    test = patch.trailers["Test"]
    assert {outcome.result for outcome in patched[test]} == {"passed"}, patched[test]
    assert {outcome.result for outcome in stock[test]} == {"failed"}, stock[test]
    # It must be the behaviour that fails, not an import that stock cannot have.
    assert all("assert" in outcome.message.lower() for outcome in stock[test]), stock[test]


def test_everything_passes_on_patched(patched: Outcomes) -> None:
    bad = {
        test: outcomes for test, outcomes in patched.items() if {outcome.result for outcome in outcomes} - {"passed"}
    }
    assert not bad
    assert len(patched) > len(PATCHES)


def test_stock_does_what_the_cases_say(stock: Outcomes) -> None:
    assert {outcome.result for outcome in stock[STOCK_ANSWERS]} == {"passed"}, stock[STOCK_ANSWERS]


def test_each_patch_has_a_file_of_its_own() -> None:
    files = {f"tests/patches/test_{patch.name.replace('-', '_')}.py" for patch in PATCHES}
    assert {patch.trailers["Test"].partition("::")[0] for patch in PATCHES} == files
