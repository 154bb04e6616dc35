# SPDX-License-Identifier: Apache-2.0
"""`vllm-ndt nan-check` as an operator runs it, on tiny models."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine.conftest import environment

LAYER = "model.layers.{}.self_attn.attn"
KEYS = ["status", "error", "model", "load_format", "injected", "not_injected", "runs", "advice", "not_tested"]


def command_for(patched: Path, *arguments: str) -> list[str]:
    return [str(patched), "-m", "vllm_ndt.cli", "nan-check", *arguments]


def run(patched: Path, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = command_for(patched, *arguments)
    settings = environment(home, TMPDIR=str(home), **more)
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


def rows(text: str) -> dict[str, list[str]]:
    """The first table's rows, by prompt: what the cells that are not empty say."""
    lines = text.split("\n\n")[1].splitlines()[2:]
    found = [re.split(r" {2,}", line.strip()) for line in lines]
    return {name: cells for name, *cells in found}


def test_prompts_of_a_file_on_a_sound_model(patched: Path, text_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1+1\n\n  \ngrüße\n" + "x" * 8190 + "\n", encoding="utf-8")
    # a mode of the caller's own does not count
    arguments = ["--model", str(text_model), "--load-format", "dummy", "--prompts", str(prompts)]
    done = run(patched, tmp_path, *arguments, VLLM_NDT_NAN_GUARD="off")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert rows(done.stdout) == {
        "prompt 1 (3 tokens)": ["clean"],
        "prompt 2 (7 tokens)": ["clean"],
        "batch of 3": ["clean"],
        "batch of 5": ["clean"],
        "batch of 9": ["clean"],
    }
    assert "  prompt 3: 8190 tokens, of 1 to 8184 that fit\n" in done.stdout
    assert "  the model's weights: they are dummies\n" in done.stdout
    assert done.stdout.endswith("Clean: no NaN and no Inf in what was tested\n")
    assert not list(tmp_path.glob("vllm-ndt-nan-check-*"))  # the log of a run that worked


def test_an_injected_fault_is_found_and_named(patched: Path, text_model: Path, tmp_path: Path) -> None:
    """Step 17 is the first of the third prompt, as each of the two before it takes eight."""
    report = tmp_path / "report.json"
    fault = "layer=2,tensor=q,step=17,row=1,value=nan"
    arguments = ["--model", str(text_model), "--load-format", "dummy", "--json", str(report)]
    done = run(patched, tmp_path, *arguments, VLLM_NDT_NAN_INJECT=fault)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    found = rows(done.stdout)
    layer, tensors, kinds, logits, verdict = found["3 tokens"]
    assert (layer, tensors, kinds, logits) == (LAYER.format(2), "q, output", "NaN", "NaN")
    assert verdict.startswith(
        "input already bad, from between it and the attention layer before; note: 8 of 8 logprobs are NaN"
    )
    assert all(cells[-1].startswith("clean") for name, cells in found.items() if name != "3 tokens"), found
    assert "16 tokens (control)" in found and "1008 tokens (control)" in found
    put_in = "nan into q of layer 2, row 1, in step 17"
    assert f"A fault was injected: {put_in}, as VLLM_NDT_NAN_INJECT asks for\n" in done.stdout
    assert "such as an MLP that overflows, or quantised weights; not the attention kernel\n" in done.stdout

    made = json.loads(report.read_text(encoding="utf-8"))
    assert list(made) == KEYS
    assert (made["status"], made["injected"], list(made["runs"])) == (1, put_in, ["baseline"])
    baseline = made["runs"]["baseline"]
    assert (baseline["device"], baseline["dtype"], baseline["layers"]) == (
        "cpu",
        "float16",
        [LAYER.format(at) for at in range(4)],
    )
    assert set(baseline["peaks"]) == set(baseline["layers"])
    assert all(0 < peak < 10 for peak in baseline["peaks"].values())
    lengths = [case["tokens"] for case in baseline["cases"] if case["batch"] == 1]
    assert lengths == [1, 2, 3, 5, 7, 13, 16, 29, 1000, 1008]
    assert [sum(case["batch"] == size for case in baseline["cases"]) for size in (3, 5, 9)] == [3, 5, 9]
    (hit,) = [case for case in baseline["cases"] if case["finding"]]
    assert (hit["name"], hit["tokens"], hit["batch"]) == ("3 tokens", 3, 1)
    finding = hit["finding"]
    assert (finding["layer"], finding["row"], finding["token"], finding["origin"]) == (LAYER.format(2), 1, 0, "inputs")
    assert finding["tensors"] == {"q": "NaN", "output": "NaN"}
    assert "k, v clean" in finding["text"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("layer=99,tensor=q,step=1,row=0,value=nan", "no attention layer here has the number 99"),
        ("value=nan,row=9,layer=1,tensor=q,step=1", "step 1 has 3 rows, not row 9"),
        ("layer=1,tensor=q,step=9999,row=0,value=nan", "its step was never reached"),
    ],
)
def test_a_fault_that_was_not_put_in(patched: Path, text_model: Path, tmp_path: Path, fault: str, reason: str) -> None:
    report, prompts = tmp_path / "report.json", tmp_path / "prompts.txt"
    prompts.write_text("1+1\n")
    arguments = ["--model", str(text_model), "--load-format", "dummy", "--json", str(report), "--prompts", str(prompts)]
    # what is logged below ERROR is not lost
    done = run(patched, tmp_path, *arguments, VLLM_NDT_NAN_INJECT=fault, VLLM_LOGGING_LEVEL="ERROR")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"VLLM_NDT_NAN_INJECT asks for a fault, and none was put in: {reason}\n" in done.stdout
    assert "A fault was injected" not in done.stdout
    made = json.loads(report.read_text(encoding="utf-8"))
    assert (made["injected"], made["not_injected"]) == (None, reason)


def test_norms_narrow_down_where_weights_are_damaged(patched: Path, text_model: Path, tmp_path: Path) -> None:
    """In a bfloat16 model, which is run in float16; nobody reads the table."""
    model, report, prompts = tmp_path / "model", tmp_path / "report.json", tmp_path / "prompts.txt"
    shutil.copytree(text_model, model)
    prompts.write_text("1+1\n")
    code = """if True:
        import sys, torch, transformers
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(sys.argv[1])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            model.model.layers[2].self_attn.o_proj.weight[0, 0] = float("nan")
        model.save_pretrained(sys.argv[1])"""
    subprocess.run([str(patched), "-c", code, str(model)], check=True, env=environment(tmp_path), capture_output=True)
    command = command_for(patched, "--model", str(model), "--prompts", str(prompts), "--json", str(report))
    settings = environment(tmp_path, TMPDIR=str(tmp_path), VLLM_NDT_NAN_GUARD_LAYERS="attention,norm")
    shell = ["bash", "-c", '"$@" >&-', "bash", *command]
    done = subprocess.run(shell, env=settings, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    made = json.loads(report.read_text(encoding="utf-8"))
    norm = "model.layers.2.post_attention_layernorm"
    cases = made["runs"]["baseline"]["cases"]
    assert {case["finding"]["layer"] for case in cases} == {norm}
    assert {case["finding"]["after"] for case in cases} == {LAYER.format(2)}
    assert cases[0]["verdict"].startswith(f"input already bad, from between it and {LAYER.format(2)}; note")
    assert [one["symptom"] for one in made["advice"]] == [
        "in float16, and the model's own dtype is bfloat16",
        f"the input is already bad, it came between {LAYER.format(2)} and {norm} (prompt 1)",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_is_left_of_an_interrupted_check(
    patched: Path, text_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    report, folder = tmp_path / "report.json", tmp_path / "tmp"
    report.write_text("old")
    folder.mkdir()
    command = command_for(patched, "--model", str(text_model), "--load-format", "dummy", "--json", str(report))
    settings = environment(tmp_path, TMPDIR=str(folder))
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not any(log.stat().st_size for log in folder.glob("vllm-ndt-*/log")):
            time.sleep(0.1)
        assert process.poll() is None
        assert engines(folder)
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    if number == signal.SIGTERM:
        assert (process.returncode, out) == (2, "")
        assert error == "error: interrupted by SIGTERM; nothing was written\n"
    end = time.monotonic() + 30
    while (engines(folder) or list(folder.glob("vllm-ndt-*"))) and time.monotonic() < end:
        time.sleep(0.1)
    assert (engines(folder), list(folder.glob("vllm-ndt-*"))) == ([], [])
    assert report.read_text() == "old"


def engines(folder: Path) -> list[str]:
    """The processes of a check, by the folder that it has in its environment; but not the command itself."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            settings, line = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"TMPDIR={folder}\0".encode() in settings and b"vllm_ndt.cli" not in line:
            found.append(process.name)
    return found


def test_the_matrix_on_a_vision_tower_that_overflows(patched: Path, deepstack_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(deepstack_model, model)
    code = """if True:
        import sys, torch, transformers
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(sys.argv[1])
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            model.model.visual.merger.linear_fc1.bias.fill_(5e4)  # fits float16, the sum of 256 of them does not
            model.model.visual.merger.linear_fc2.weight.fill_(1.0)
        model.save_pretrained(sys.argv[1])"""
    subprocess.run([str(patched), "-c", code, str(model)], check=True, env=environment(tmp_path), capture_output=True)
    report = tmp_path / "report.json"
    done = run(patched, tmp_path, "--model", str(model), "--matrix", "--json", str(report))
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    made = json.loads(report.read_text(encoding="utf-8"))
    hit = {
        name: {case["name"] for case in one["cases"] if case["finding"]}
        for name, one in made["runs"].items()
        if "cases" in one
    }
    assert hit == {"baseline": {"image"}, "again": {"image"}, "float32": set()}
    origins = {case["finding"]["origin"] for case in made["runs"]["baseline"]["cases"] if case["finding"]}
    assert origins == {"encoder"}
    # the encoder's output is cached from the second time on
    assert [case["batch"] for case in made["runs"]["baseline"]["cases"] if case["finding"]] == [1, 3, 5, 9]
    assert [one["symptom"] for one in made["advice"]] == [
        "gone in float32",
        "non-finite before the first attention layer, from the encoder (image)",
    ]
    assert made["advice"][0]["likely"] == "precision: float16 overflows"
    assert rows(done.stdout)["image (51 tokens)"][-1].startswith(
        "non-finite before the first attention layer, from the encoder"
    )
    assert "\ngraphs: not here: it needs an NVIDIA GPU\n" in done.stdout
    assert "\nplain: not here: it needs an NVIDIA GPU\n" in done.stdout
    assert "\nreference: --reference-model is not given\n" in done.stdout
    assert re.search(r"\nfloat32: cpu, float32, .*: clean\n", done.stdout)
    assert "\n  video inputs\n" in done.stdout


def test_an_engine_that_does_not_start_is_one_line_and_a_log(patched: Path, text_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--model", str(text_model), "--load-format", "dummy", "--json", str(report)]
    done = run(patched, tmp_path, *arguments, VLLM_CPU_KVCACHE_SPACE="90000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"error: expected an engine that runs {text_model}, found: Available memory on node 0"
    )
    assert done.stderr.count("\n") == 1
    log = Path(done.stderr.strip().rpartition("its log is ")[2])
    assert "Traceback" in log.read_text()
    made = json.loads(report.read_text(encoding="utf-8"))
    assert list(made) == KEYS
    assert (made["status"], f"error: {made['error']}\n") == (2, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "/nowhere"], "expected a model's folder, found nothing at '/nowhere'; correct the path"),
        (["--model", "/" + "x" * 5000], "expected a model's folder, found nothing at '/xxx"),
        (["--model", "EMPTY"], "expected a model with a config.json, found none in EMPTY; correct the path"),
        (
            ["--model", "MODEL", "--prompts", "EMPTY/none"],
            "expected a file of prompts at EMPTY/none, found: No such file or directory; correct --prompts",
        ),
        (["--model", "MODEL", "--prompts", "EMPTY"], "expected a file of prompts at EMPTY, found: Is a directory;"),
        (["--model", "MODEL", "--prompts", "LATIN"], "expected UTF-8 in LATIN, found another byte at 2;"),
        (["--model", "MODEL", "--prompts", "BLANK"], "expected a prompt a line in BLANK, found none;"),
        (
            ["--model", "MODEL", "--json", "EMPTY/none/report.json"],
            "expected a file that can be written at EMPTY/none/report.json, found: No such file or directory; correct --json",
        ),
        (
            ["--model", "MODEL", "--matrix", "--reference-model", "/nowhere"],
            "expected a model's folder, found nothing at '/nowhere'",
        ),
        (["--model", "MODEL", "--reference-model", "MODEL"], "argument --reference-model: it needs --matrix (see "),
        (["--model", "MODEL", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["--model", "MODEL", "more"], "unrecognized arguments: more (see "),
        (["--model", ""], "argument --model: expected a value, found an empty one;"),
        (["--model", "MODEL", "--prompts", ""], "argument --prompts: expected a value, found an empty one;"),
        ([], "the following arguments are required: --model (see "),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    patched: Path, text_model: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    places = {"MODEL": str(text_model)}
    for name, content in {"LATIN": b"gr\xfc\xdfe\n", "BLANK": b" \n\n"}.items():
        places[name] = str(tmp_path / name.lower())
        Path(places[name]).write_bytes(content)
    places["EMPTY"] = str(tmp_path / "empty")
    Path(places["EMPTY"]).mkdir()

    def placed(text: str) -> str:
        for name, path in places.items():
            text = text.replace(name, path)
        return text

    done = run(patched, tmp_path, *map(placed, arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {placed(expected)}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bad_variable_is_one_line_and_status_2(patched: Path, text_model: Path, tmp_path: Path) -> None:
    done = run(patched, tmp_path, "--model", str(text_model), VLLM_NDT_NAN_INJECT="layer=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: VLLM_NDT_NAN_INJECT: expected layer=N,tensor=q|k|v|output,")
    assert done.stderr.count("\n") == 1
