# SPDX-License-Identifier: Apache-2.0
"""`vllm-ndt encoder-budget` as an operator runs it, on tiny models; no engine starts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import environment

FLAGS = ("--max-num-batched-tokens", "4096")


def run(patched: Path, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [str(patched), "-m", "vllm_ndt.cli", "encoder-budget", *arguments]
    return subprocess.run(command, env=environment(home, **more), capture_output=True, text=True, check=False)


def test_hybrid_with_prefix_caching_is_at_risk_on_stock(patched: Path, vision_model: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--max-num-seqs", "8", "--enable-prefix-caching"]
    done = run(patched, tmp_path, "--model", str(vision_model), *flags)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["image", "2048", "4", "2", "48"],
        ["video", "1024", "4", "4", "96"],
    ]
    rows = [line[18:] for line in lines[4:]]
    assert rows[0] == "8 requests (--max-num-seqs), each up to 4 image + 4 video and 65536 tokens"
    assert rows[1] == "image, video: upstream allows 999 a prompt, 4 are assumed;"
    assert rows[3:7] == [
        "8 x 12288 = 98304 embeddings",
        "4096 embeddings a step",
        "4096 embeddings, 1048576 bytes (1.0 MiB)",
        "256 bytes: hidden size 128, bfloat16",
    ]
    assert rows[7] == (
        "at risk of a standstill: the demand does not fit, and chunks end where states are cached "
        "(block decided at start)"
    )
    assert rows[8] == "never a standstill; without the variable requests wait for each other: slower"
    # on a CPU the memory is known: VLLM_CPU_KVCACHE_SPACE
    assert rows[9] == (
        "VLLM_NDT_ENCODER_CACHE_TOKENS=98304, 25165824 bytes (24.0 MiB): enough for every slot; "
        "memory for the KV cache: 1073741824 bytes (1.0 GiB)"
    )
    assert rows[10] == "an item above 4096 embeddings, with HTTP 400, whatever the variable says;"
    assert rows[11] == "--max-num-batched-tokens raises that limit"


def test_json_of_a_dense_model_with_deepstack(patched: Path, deepstack_model: Path, tmp_path: Path) -> None:
    """One object alone on stdout, also where vLLM logs: 49,152 embeddings of 1 KiB, of which 5 % of 800 MiB hold 40,960."""
    flags = [*FLAGS, "--max-num-seqs=8", "--limit-mm-per-prompt", '{"image": 3, "video": 0}']
    done = run(
        patched, tmp_path, str(deepstack_model), *flags, "--json", "--kv-memory", "800MiB", VLLM_LOGGING_LEVEL="INFO"
    )
    assert done.returncode == 1, done.stderr
    assert "Resolved architecture: Qwen3VLForConditionalGeneration" in done.stderr
    image = {"largest": 2048, "items_per_prompt": 3, "limit": 3, "assumed": False, "fit": 2, "fit_with_number": 20}
    found = json.loads(done.stdout)
    why = found["set"].pop("why")
    assert "KV cache" in why
    assert found == {
        "status": 1,
        "model": str(deepstack_model),
        "nothing_to_size": None,
        "modalities": {"image": image},
        "slots": 8,
        "max_model_len": 65_536,
        "demand_per_prompt": 6144,
        "demand": 49_152,
        "compute_budget": 4096,
        "cache": 4096,
        "cache_bytes": 4 * 2**20,
        "item_limit": 4096,
        "fits": False,
        "embedding": {"hidden_size": 128, "deepstack_layers": 3, "dtype": "bfloat16", "bytes": 1024},
        "stock": {"at_risk": False, "states_cached": False, "block": None, "look_ahead": False},
        "patched": {"at_risk": False, "waits": True},
        "set": {
            "variable": "VLLM_NDT_ENCODER_CACHE_TOKENS",
            "number": 40_960,
            "bytes": 40 * 2**20,
            "fits": False,
            "kv_memory": 800 * 2**20,
        },
    }


def test_a_text_model_has_nothing_to_size(patched: Path, text_model: Path, tmp_path: Path) -> None:
    done = run(patched, tmp_path, "--model", str(text_model))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the model takes no images or videos: nothing to size\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--kv-memory", "3parsec"],
            "error: expected bytes or a number with KiB, MiB, GiB or TiB, like 24GiB, found '3p",
        ),
        (["--model", "/nowhere"], "error: expected a model's folder, found nothing at /nowhere; correct --model"),
        (
            ["--max-num-seqs", "x"],
            "error: expected arguments of vllm serve, found: argument --max-num-seqs: invalid int",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_3(patched: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    done = run(patched, tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


def test_a_machine_without_a_device_is_told_so(patched: Path, vision_model: Path, tmp_path: Path) -> None:
    code = (
        "import sys, vllm.platforms as found; found._current_platform = found.interface.UnspecifiedPlatform();"
        "from vllm_ndt import cli; sys.exit(cli.main(['encoder-budget', '--model', sys.argv[1]]))"
    )
    done = in_python(patched, tmp_path, code, str(vision_model))
    assert (done.returncode, done.stdout) == (3, "")
    assert "error: expected a device of the kind that this vllm was built for, found none;" in done.stderr


def test_other_commands_do_not_import_vllm(patched: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from vllm_ndt import cli; cli.main(['verify']); print(sorted({'vllm', 'torch'} & {*sys.modules}))"
    )
    assert in_python(patched, tmp_path, code).stdout.splitlines()[-1] == "[]"


def test_verdicts_by_numbers(patched: Path, tmp_path: Path) -> None:
    """27 B of production (5,120 x 2 bytes): slots, items, memory and what stands still on stock."""
    code = """if True:
        import dataclasses, json
        from vllm_ndt import encoder_budget as b
        base = b.Facts("m", 32768, 16, {"image": 4096}, {"image": 4}, 8192, 8192, 5120, 0, "bfloat16", 2, False, None, False)
        cases = {
            "dense": ({}, None),
            "drafter": ({"look_ahead": True}, None),
            "hybrid": ({"states_cached": True, "block": 784}, None),
            "hybrid that fits": ({"states_cached": True, "block": 784, "slots": 2, "limits": {"image": 1}}, None),
            "deepstack": ({"deepstack_layers": 3}, None),
            "its memory": ({"kv_memory": 20 * 2**30}, None),
            "option first": ({"kv_memory": 20 * 2**30}, 10 * 2**30),
        }
        reports = {name: b.report(dataclasses.replace(base, **more), memory) for name, (more, memory) in cases.items()}
        print(json.dumps({name: [one.as_dict(), one.lines()] for name, one in reports.items()}))"""
    found: dict[str, list[Any]] = json.loads(in_python(patched, tmp_path, code).stdout)
    risks = {name: (facts["status"], facts["stock"]["at_risk"]) for name, (facts, _) in found.items()}
    assert risks == {
        "dense": (1, False),
        "drafter": (1, True),
        "hybrid": (1, True),
        "hybrid that fits": (0, False),
        "deepstack": (1, False),
        "its memory": (1, False),
        "option first": (1, False),
    }
    numbers = {name: facts["set"]["number"] for name, (facts, _) in found.items()}
    assert numbers["dense"] == 2**31 // (5120 * 2)  # 16 x 4 x 4,096 would take 2.5 GiB
    assert numbers["deepstack"] == 2**31 // (5120 * 2 * 4)
    assert numbers["its memory"] == 2**30 // (5120 * 2)
    assert numbers["option first"] == 2**29 // (5120 * 2)
    assert numbers["hybrid that fits"] == 8192
    rows = {name: {line[:16].strip(): line[18:] for line in lines[3:]} for name, (_, lines) in found.items()}
    assert "(block of 784 tokens)" in rows["hybrid"]["stock vLLM"]
    assert "a drafter looks ahead" in rows["drafter"]["stock vLLM"]
    assert rows["dense"]["stock vLLM"].startswith("not at risk of a standstill")
    assert rows["dense"]["set"].endswith(
        ": limited to 2 GiB; requests wait for each other: slower; --kv-memory is not given: the rule of 2 GiB alone"
    )
    assert rows["hybrid that fits"]["stock vLLM"] == "not at risk of a standstill: the demand fits"
    assert rows["hybrid that fits"]["this build"] == "never a standstill; the demand fits"
    assert rows["hybrid that fits"]["set"].startswith("nothing: 8192, ")


def in_python(patched: Path, home: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(patched), "-c", code, *arguments]
    return subprocess.run(command, env=environment(home), capture_output=True, text=True, check=False)
