# SPDX-License-Identifier: Apache-2.0
"""The patched schedules are stock's, step by step, where stock gives tokens to each request whose items it looked at.

Where it gives none, stock also keeps what the request took, so that the next steps differ in any case.
"""

import json
import os
import subprocess
from pathlib import Path

PATCH_TESTS = Path(__file__).parent / "patches"
LOADS = 250


def schedules(tree: str, home: Path) -> dict[int, dict]:
    """What the scheduler of a tree does with LOADS random loads, by seed."""
    python = os.environ[f"{tree}_PYTHON"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR"
    command = [python, str(PATCH_TESTS / "schedules.py"), "0", str(LOADS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.pop("seed"): row for row in rows}


def test_schedules_are_stocks_where_stock_gives_tokens(tmp_path: Path) -> None:
    stock, patched = schedules("STOCK", tmp_path), schedules("PATCHED", tmp_path)
    alike = [seed for seed, row in stock.items() if not row.get("zero", True)]
    assert len(alike) >= LOADS / 10
    assert [seed for seed in alike if stock[seed] != patched[seed]] == []
    # and the loads are such that stock fails many of the others
    assert sum(row.get("stalled", True) for row in stock.values()) >= LOADS / 10
    assert [seed for seed, row in patched.items() if row.get("stalled", True)] == []
