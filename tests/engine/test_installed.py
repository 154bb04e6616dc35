# SPDX-License-Identifier: Apache-2.0
"""What a user sees of the installed wheel, and why the dependency closure is locked."""

import json
import subprocess
from pathlib import Path

import pytest

from builder.uv import run_uv
from tests.engine.conftest import environment

NEWEST = "2026-11-28T00:00:00Z"  # a day on which the newest dependencies no longer work
LLAVA = "import vllm.model_executor.models.llava"


def run(python: Path, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], env=environment(home, **more), capture_output=True, text=True, check=False
    )


def test_version_command(patched: Path, tmp_path: Path) -> None:
    done = run(patched.parent / "vllm", tmp_path, "--version")
    assert done.stdout.strip().splitlines()[-1] == "0.27.1+ndt.1.cpu"


def test_versions_agree(patched: Path, tmp_path: Path) -> None:
    code = "import importlib.metadata, vllm; print(importlib.metadata.version('vllm'), vllm.__version__)"
    assert run(patched, tmp_path, "-c", code).stdout.split()[-2:] == ["0.27.1+ndt.1.cpu"] * 2


def test_real_installation_is_verified(patched: Path, tmp_path: Path) -> None:
    """Also after its modules were imported and their bytecode written: --deep compares every file of it."""
    for arguments in ([], ["--deep"]):
        done = run(patched.parent / "vllm-ndt", tmp_path, "verify", *arguments)
        assert (done.returncode, done.stdout.split(":")[0]) == (0, "patched"), done.stdout
        assert "register-ndt-settings, default-usage-stats-off, size-encoder-cache-from-env" in done.stdout


def test_stock_control_is_upstreams_code(stock: Path, tmp_path: Path) -> None:
    code = "import vllm; print(vllm.__version__); import vllm_ndt"
    done = run(stock, tmp_path, "-c", code)
    assert done.stdout.split()[-1] == "0.27.1+cpu"
    assert "No module named 'vllm_ndt'" in done.stderr


@pytest.mark.parametrize("value", ["maybe", "2"])
def test_bad_value_stops_serve_with_one_clear_last_line(
    patched: Path, text_model: Path, tmp_path: Path, value: str
) -> None:
    command = ["serve", str(text_model), "--load-format", "dummy", "--port", "0"]
    done = run(patched.parent / "vllm", tmp_path, *command, VLLM_NDT_USAGE_STATS=value)
    assert done.returncode == 1
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert f"VLLM_NDT_USAGE_STATS: expected 0 or 1, found '{value}'; correct the variable or unset it" in last


def test_llava_imports_with_the_locked_closure(patched: Path, tmp_path: Path) -> None:
    done = run(patched, tmp_path, "-c", LLAVA)
    assert done.returncode == 0, done.stderr


def test_llava_does_not_import_with_the_newest_dependencies(patched: Path, uv: str, tmp_path: Path) -> None:
    newest = tmp_path / "newest"
    command = ["pip", "install", "--python", str(patched), "--target", str(newest), "--exclude-newer", NEWEST]
    run_uv(Path(uv), [*command, "transformers==5.24.0"])
    done = run(patched, tmp_path, "-c", LLAVA, PYTHONPATH=str(newest))
    assert done.returncode == 1
    assert "cannot import name 'PixtralRotaryEmbedding'" in done.stderr


def test_doctor_finds_no_fault_here(patched: Path, tmp_path: Path) -> None:
    """On the machine of the tests, without a GPU and offline: warnings at most, and its own files are sound."""
    command = [str(patched.parent / "vllm-ndt"), "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), check=False)
    report = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in report["findings"]}
    faults = [finding for finding in report["findings"] if finding["level"] == "fault"]
    # the kernel's log is the machine's
    assert [fault for fault in faults if fault["name"] != "kernel log"] == []
    assert done.returncode == report["status"] in (0, 1, 2)
    assert findings["own files"]["level"] == "good"
    assert findings["usage statistics"]["level"] == "good"
    assert report["manifest"].startswith("sha256:")
    wrong = subprocess.run([*command, "--expect", f"sha256:{'0' * 64}"], capture_output=True, text=True, env=environment(tmp_path), check=False)  # fmt: skip
    assert wrong.returncode == 2
    assert {"expected build"} <= {
        one["name"] for one in json.loads(wrong.stdout)["findings"] if one["level"] == "fault"
    }
