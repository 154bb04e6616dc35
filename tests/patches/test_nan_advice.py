# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ndt nan-check` makes of runs: recorded outcomes and the rows of the decision table that must apply."""

import dataclasses
import itertools
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_ndt import cli, nan_advice, nan_check, nan_run
from vllm_ndt.nan_advice import Advice, Case, Finding, Run

LENGTHS = (1, 2, 3, 5, 7, 13, 16, 29, 1000, 1008)
FIRST, LATER = "model.layers.0.self_attn.attn", "model.layers.9.self_attn.attn"


def kernel(layer: str = FIRST, token: int = 0) -> Finding:
    return Finding(layer, layer == FIRST, {"output": "NaN"}, 0, token, nan_advice.KERNEL, "")


def inputs(layer: str = LATER) -> Finding:
    origin = nan_advice.EMBEDDINGS if layer == FIRST else nan_advice.INPUTS
    return Finding(layer, layer == FIRST, {"q": "Inf", "output": "NaN"}, 0, 0, origin, "")


ENCODER = Finding(FIRST, True, {"q": "NaN"}, 0, 0, nan_advice.ENCODER, "")
FIRST_NORM, NORM = "model.layers.0.input_layernorm", "model.layers.9.post_attention_layernorm"
NORMS_INPUT = Finding(NORM, False, {"input": "NaN"}, 0, 0, nan_advice.INPUTS, "", True, LATER)
AFTER_NORM = Finding(LATER, False, {"q": "NaN"}, 0, 0, nan_advice.INPUTS, "", False, "model.layers.9.input_layernorm")
IN_NORM = Finding(NORM, False, {"output": "Inf"}, 0, 0, nan_advice.NORM, "", True, LATER)
NORMS_FIRST_INPUT = Finding(FIRST_NORM, False, {"input": "NaN"}, 0, 0, nan_advice.EMBEDDINGS, "", True)
LOGITS = Finding("", False, {}, 0, 0, nan_advice.LOGITS, "")


def outcome(
    found: Callable[[int], Finding | None] = lambda _: None,
    image: Finding | None = None,
    dtype: str = "float16",
    peak: float = 10.0,
    **changes: Any,
) -> Run:
    """A run whose text prompts have what `found` says of their length, and an image prompt of 51 tokens."""
    cases = [Case(f"{n} tokens", 1, n, False, found(n), "NaN" if found(n) else "", (n % 9, 1, 2), 0) for n in LENGTHS]
    cases.append(Case("image", 1, 51, True, image, "", (7, 8), 0))
    run = Run("cuda", dtype, ("FLASH_ATTN",), "awq", (FIRST, LATER), {FIRST: peak, LATER: peak}, tuple(cases))
    return dataclasses.replace(run, **changes)


def first_where(length: Callable[[int], bool], finding: Finding) -> Callable[[int], Finding | None]:
    return lambda n: finding if length(n) else None


ALL_KERNEL = outcome(first_where(lambda n: True, kernel()))
ALL_INPUTS = outcome(first_where(lambda n: True, inputs()))
LONG = outcome(first_where(lambda n: n > 500, inputs()))
CLEAN, FLOAT32 = outcome(), outcome(dtype="float32")
SHORT = first_where(lambda n: n < 50, inputs())
# of the kernels pinned for sm_70: tails are wrong, and decoding goes through all lengths
SM_70 = outcome(lambda n: kernel(token=1 if n % 16 == 0 else 0))


def nan_in_answer(dtype: str = "float16") -> Run:
    cases = tuple(dataclasses.replace(case, bad_logprobs=3) for case in CLEAN.cases)
    return dataclasses.replace(CLEAN, cases=cases, dtype=dtype, own_dtype=dtype)


def other_tokens() -> Run:
    first, *rest = CLEAN.cases
    return dataclasses.replace(CLEAN, cases=(dataclasses.replace(first, output=(5, 5, 5)), *rest))


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({"baseline": CLEAN, "again": CLEAN, "graphs": CLEAN, "plain": CLEAN, "float32": FLOAT32}, []),
        # the article's table
        (
            {"baseline": ALL_KERNEL},
            [("in the first attention layer, whose inputs are clean", "custom attention kernel")],
        ),
        (
            {"baseline": LONG},
            [
                ("already bad, it came before the attention of model.layers.9", "not the attention kernel"),
                ("on long prompts only (from 1000 tokens, clean up to 29)", "float16 is not stable"),
            ],
        ),
        (
            {"baseline": LONG, "float32": FLOAT32},
            [
                ("gone in float32", "precision: float16 overflows"),
                ("already bad", "not the attention kernel"),
                ("on long prompts only", "float16 is not stable, confirmed by float32"),
            ],
        ),
        (
            {"baseline": LONG, "float32": dataclasses.replace(LONG, dtype="float32")},
            [
                ("stays in float32", "not precision"),
                ("already bad", "not the attention kernel"),
                ("on long prompts only", "not precision"),
            ],
        ),
        ({"baseline": nan_in_answer()}, [("NaN in the answer, but in no activation and no logits", "sampling")]),
        ({"baseline": CLEAN, "graphs": ALL_KERNEL}, [("only with CUDA graphs", "a known problem on V100")]),
        (
            {"baseline": ALL_INPUTS, "reference": CLEAN},
            [("gone without quantisation", "the quantised weights or their kernels (awq)"), ("already bad", "not the")],
        ),
        (
            {"baseline": ALL_KERNEL, "reference": ALL_KERNEL},
            [("stays without quantisation", "the attention kernel"), ("in the first attention layer", "custom")],
        ),
        # and more
        (
            {"baseline": ALL_INPUTS, "reference": ALL_INPUTS},
            [("stays without quantisation, and came before", "the model itself in this dtype"), ("already bad", "not")],
        ),
        (
            {"baseline": ALL_KERNEL, "plain": CLEAN},
            [("gone with plain attention", "the attention kernel (FLASH_ATTN)"), ("in the first", "custom")],
        ),
        ({"baseline": ALL_KERNEL, "plain": ALL_KERNEL}, [("stays with plain attention", "not the attention kernel")]),
        (
            {"baseline": ALL_KERNEL, "float32": FLOAT32},
            [("gone in float32", "or the attention kernel"), ("in the first attention layer", "custom")],
        ),
        ({"baseline": CLEAN, "again": other_tokens()}, [("gave another answer (1 tokens)", "a race")]),
        (
            {"baseline": outcome(first_where(lambda n: n == 16, kernel(LATER, token=3)))},
            [("in the attention of a later layer", "its KV cache")],
        ),
        (
            {"baseline": outcome(first_where(lambda n: n == 7, inputs(FIRST)))},
            [("the first attention layer's inputs are already bad (7 tokens)", "came before this layer's attention")],
        ),
        (
            {"baseline": outcome(first_where(lambda n: n == 7, LOGITS))},
            [("in the logits, and in no attention layer", "what follows the last attention")],
        ),
        (
            {"baseline": outcome(SHORT)},
            [
                ("already bad", "not the attention kernel"),
                ("on short prompts only (up to 29 tokens, clean from 1000)", "an overflow in the first positions"),
            ],
        ),
        (
            {"baseline": outcome(image=ENCODER), "float32": FLOAT32},
            [
                ("gone in float32", "precision: float16 overflows"),
                ("from the encoder (image)", "the attention kernels are innocent"),
            ],
        ),
        (
            {"baseline": SM_70},
            [
                ("in the first attention layer", "custom"),
                ("no multiple of 16 (1 tokens, 2 tokens, 3 tokens and 5 more)", "part-filled tile"),
            ],
        ),
        (
            {"baseline": outcome(peak=6e3), "plain": outcome(peak=10.0)},
            [("more than 10 times as large as with plain attention", "wrong finite values")],
        ),
        ({"baseline": outcome(peak=5e4)}, [("values of 5e+04", "an overflow that builds up")]),
        ({"baseline": outcome(peak=5e4, dtype="bfloat16")}, []),
        # damaged weights: no run is sound
        (
            {
                "baseline": ALL_INPUTS,
                "reference": ALL_INPUTS,
                "float32": dataclasses.replace(ALL_INPUTS, dtype="float32"),
            },
            [
                ("stays in float32 and without quantisation", "neither precision nor quantisation: damaged weights"),
                ("already bad", "what lies between it and the attention layer before, such as an MLP with damaged"),
            ],
        ),
        (
            {"baseline": ALL_KERNEL, "reference": ALL_KERNEL, "plain": ALL_KERNEL},
            [("stays with plain attention", "not the attention kernel")],
        ),
        # a model that was made for another dtype
        (
            {"baseline": dataclasses.replace(LONG, own_dtype="bfloat16")},
            [
                ("in float16, and the model's own dtype is bfloat16", "beyond float16's range"),
                ("already bad", "not the attention kernel"),
                ("on long prompts only", "float16 is not stable"),
            ],
        ),
        (
            {"baseline": dataclasses.replace(nan_in_answer(), own_dtype="bfloat16")},
            [("the model's own dtype is bfloat16", ""), ("NaN in the answer", "sampling")],
        ),
        ({"baseline": outcome(own_dtype="bfloat16")}, []),
        ({"baseline": nan_in_answer("bfloat16")}, [("NaN in the answer", "sampling")]),
        # with norms watched
        (
            {"baseline": outcome(lambda _: NORMS_INPUT)},
            [(f"it came between {LATER} and {NORM} (1 tokens", "a projection that overflows")],
        ),
        (
            {"baseline": outcome(lambda _: AFTER_NORM)},
            [(f"it came between model.layers.9.input_layernorm and {LATER}", "not the attention kernel")],
        ),
        (
            {"baseline": outcome(lambda _: IN_NORM)},
            [(f"in a norm whose input is clean: {NORM}", "this norm, that overflows")],
        ),
        (
            {"baseline": outcome(lambda _: NORMS_FIRST_INPUT)},
            [("the first norm's input is already bad", "the embeddings")],
        ),
    ],
)
def test_rows_that_apply(runs: Mapping[str, Run], expected: list[tuple[str, str]]) -> None:
    found = nan_advice.advise(runs)
    assert len(found) == len(expected), found
    for advice, (symptom, likely) in zip(found, expected, strict=True):
        assert symptom in advice.symptom
        assert likely in advice.likely


def test_short_prompts_with_bad_inputs_do_not_blame_the_kernel() -> None:
    found: list[Advice] = nan_advice.advise({"baseline": outcome(SHORT)})
    assert not any("the attention kernel" in advice.likely.replace("not the attention kernel", "") for advice in found)


KINDS = [kernel(), kernel(LATER), inputs(), inputs(FIRST), ENCODER, LOGITS, NORMS_INPUT, IN_NORM]


@pytest.mark.parametrize("finding", KINDS, ids=lambda finding: f"{finding.layer}-{finding.origin}")
@pytest.mark.parametrize("where", [lambda n: True, lambda n: n < 50, lambda n: n > 500], ids=["all", "short", "long"])
def test_no_rows_contradict_each_other(finding: Finding, where: Callable[[int], bool]) -> None:
    bad = outcome(first_where(where, finding), image=finding)
    choice = (None, CLEAN, bad)
    for plain, reference, single in itertools.product(choice, choice, choice):
        given = {"baseline": bad, "plain": plain, "reference": reference, "float32": single}
        found = nan_advice.advise({name: run for name, run in given.items() if run})
        likely = [advice.likely for advice in found]
        if single is bad:
            assert any(text.startswith(("not precision", "neither precision")) for text in likely), found
            assert not any("overflow" in text or "not stable" in text for text in likely), found
            assert not any("bfloat16" in advice.do for advice in found), found
        blamed = [text for text in likely if text.startswith(("the attention kernel", "the custom attention kernel"))]
        assert not (plain is bad and blamed), found
        cleared = [text for text in likely if "not the attention kernel" in text]
        assert not (plain is CLEAN and cleared), found


def test_float32_after_plain_attention_failed_is_precision_for_sure() -> None:
    found = nan_advice.advise({"baseline": ALL_KERNEL, "plain": ALL_KERNEL, "float32": FLOAT32})
    assert [advice.likely for advice in found if advice.symptom == "gone in float32"] == [
        "precision: float16 overflows"
    ]


@pytest.mark.parametrize("run", [SM_70, LONG, outcome(image=ENCODER, untested=("video inputs",))])
def test_a_run_survives_json(run: Run) -> None:
    assert nan_advice.run_from(json.loads(json.dumps(dataclasses.asdict(run)))) == run


@pytest.mark.parametrize("bad", [0, 2])
def test_repeated_tokens_are_no_verdict_and_bad_logprobs_are(bad: int) -> None:
    case = Case("1 token", 1, 1, False, None, "", (0, 0, 0), bad)
    notes = ["2 of 3 logprobs are NaN"] * (bad > 0) + ["token 0 in all 3 positions"]
    assert case.notes == notes
    report = nan_check.Report(
        nan_check.Options("m"), (nan_check.Attempt("baseline", dataclasses.replace(CLEAN, cases=(case,))),)
    )
    assert report.status == (nan_check.FOUND if bad else nan_check.CLEAN)
    assert f"clean; note: {', '.join(notes)}" in report.text(200)


def test_a_run_that_does_not_repeat_is_no_clean_check() -> None:
    attempts = (nan_check.Attempt("baseline", CLEAN), nan_check.Attempt("again", other_tokens()))
    report = nan_check.Report(nan_check.Options("m", matrix=True), attempts)
    assert report.status == nan_check.FOUND
    assert "a race" in report.text(80)


# ---- what the report says ----


def report(run: Run, asked: str = "") -> nan_check.Report:
    return nan_check.Report(nan_check.Options("m"), (nan_check.Attempt("baseline", run),), asked)


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (kernel(), "in this layer's attention kernel, or from its KV cache"),
        (inputs(), "input already bad, from between it and the attention layer before"),
        (inputs(FIRST), "input already bad, came before this layer's attention, the first one"),
        (NORMS_INPUT, f"input already bad, from between it and {LATER}"),
        (AFTER_NORM, "input already bad, from between it and model.layers.9.input_layernorm"),
        (IN_NORM, "in this norm"),
        (NORMS_FIRST_INPUT, "input already bad, came before this norm, the first one"),
    ],
)
def test_a_verdict_names_the_place(finding: Finding, words: str) -> None:
    assert words in report(outcome(lambda n: finding if n == 7 else None)).text(300)


def test_the_same_prompt_in_a_batch_is_one_row() -> None:
    cases = [Case("prompt 1", size, 3, False, inputs(), "NaN", (5, 6), 0) for size in (1, 3, 3, 3)]
    text = report(dataclasses.replace(CLEAN, cases=tuple(cases))).text(300)
    assert text.count("prompt 1 (3 tokens)") == 2, text
    assert "prompt 1 (3 tokens) in a batch of 3, 3 times  " in text


@pytest.mark.parametrize(
    ("asked", "run", "injected", "not_injected"),
    [
        ("", CLEAN, None, None),
        ("layer=2", outcome(injected="nan into q of layer 2"), "nan into q of layer 2", None),
        ("layer=99", outcome(not_injected="no layer 99"), None, "no layer 99"),
        ("step=9999", CLEAN, None, "its step was never reached"),
    ],
)
def test_a_fault_that_was_asked_for(asked: str, run: Run, injected: str | None, not_injected: str | None) -> None:
    made = report(run, asked)
    assert (made.as_dict()["injected"], made.as_dict()["not_injected"]) == (injected, not_injected)
    assert (f"A fault was injected: {injected}, as VLLM_NDT_NAN_INJECT asks for\n" in made.text(200)) == bool(injected)
    line = f"VLLM_NDT_NAN_INJECT asks for a fault, and none was put in: {not_injected}\n"
    assert (line in made.text(200)) == bool(not_injected)


def test_the_guards_lines_about_a_fault() -> None:
    lines = nan_run.FaultLines()
    log = logging.Logger("guard")
    log.addHandler(lines)
    log.info("NaN guard: report, watching %d attention layers and the logits.", 4)
    log.warning("something else")
    assert (lines.injected, lines.not_injected) == ("", "")
    log.warning("NaN guard: nothing injected: step %d has %d rows, not row %d.", 1, 1, 5)
    assert (lines.injected, lines.not_injected) == ("", "step 1 has 1 rows, not row 5")
    log.warning("NaN guard: injecting %s into q of layer 2, as asked for.", float("nan"))
    assert lines.injected == "nan into q of layer 2"


# ---- the command, with an engine's place taken ----

# a checked model: what a run gives, as if there had been an engine
FOUND = """if True:
    import sys
    from vllm_ndt import cli, nan_advice, nan_check
    finding = nan_advice.Finding("model.layers.0.attn", True, {"output": "NaN"}, 0, 0, nan_advice.KERNEL, "")
    case = nan_advice.Case("1 token", 1, 1, False, finding, "NaN", (5, 6), 0)
    run = nan_advice.Run("cuda", "float16", (), "", ("model.layers.0.attn",), {}, (case,) * 500)
    def check(options, environ, say):
        return nan_check.Report(options, (nan_check.Attempt("baseline", run),))
    nan_check.check = check
    sys.exit(cli.main(["nan-check", "--model", "m", *sys.argv[1:]]))"""
# an engine that never comes up, and has a process of its own
STUCK = """if True:
    import sys
    from vllm_ndt import cli, nan_check
    nan_check._CODE = '''if True:
        import subprocess, sys, time
        from vllm_ndt import nan_run
        def run(job):
            print("pids", subprocess.os.getpid(), subprocess.Popen(["sleep", "600"]).pid, flush=True)
            time.sleep(600)
        nan_run.run = run
        nan_run.main()'''
    sys.exit(cli.main(["nan-check", "--model", "m", *sys.argv[1:]]))"""


def environment(folder: Path) -> dict[str, str]:
    package = str(Path(nan_check.__file__).parents[1])
    return {"PATH": os.environ["PATH"], "PYTHONPATH": package, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A shell's script in which "$0" "$@" is nan-check on a model of which something is found."""
    command = ["bash", "-c", script, sys.executable, "-c", FOUND]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ('"$0" "$@" > out', 1, ""),
        ('"$0" "$@" >&-', 1, ""),
        ('"$0" "$@" >&- 2>&-', 1, ""),
        ('"$0" "$@" | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}', 1, ""),
        (
            '"$0" "$@" >/dev/full',
            2,
            "error: expected a stdout that takes the report, found: No space left on device; send it elsewhere\n",
        ),
        ('"$0" "$@" --json none/r.json 2>&-', 2, ""),
        ('"$0" "$@" --json none/r.json 2>/dev/full', 2, ""),
        ('"$0" "$@" --dtype int8 2>&-', 2, ""),
    ],
)
def test_the_status_does_not_depend_on_who_reads(script: str, status: int, error: str, tmp_path: Path) -> None:
    done = shell(script, tmp_path)
    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.parametrize(
    "arguments", [["--model", ""], ["--model", "m", "--prompts", " "], ["--model", "m", "--json", ""]]
)
def test_an_empty_argument_is_said_to_be_empty(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["nan-check", *arguments])
    assert stop.value.code == nan_check.CANNOT
    error = capsys.readouterr().err
    assert error.startswith(f"error: argument {arguments[-2]}: expected a value, found an empty one;")
    assert error.count("\n") == 1


def checked(monkeypatch: pytest.MonkeyPatch, outcome: Any, *arguments: str) -> int:
    """Run the command with `outcome`, called, in place of the check."""
    monkeypatch.setattr(nan_check, "check", lambda *_: outcome())
    return cli.main(["nan-check", "--model", "m", *arguments])


def test_what_is_no_verdict_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("one line\nand another")

    place = tmp_path / "r.json"
    assert checked(monkeypatch, fail, "--json", str(place)) == nan_check.CANNOT
    assert capsys.readouterr() == ("", "error: RuntimeError: one line and another\n")
    assert json.loads(place.read_text())["error"] == "RuntimeError: one line and another"


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(nan_check.tempfile, "mkdtemp", none)
    with pytest.raises(
        nan_check.CannotRun, match=r"expected a folder for temporary files, found: No usable temp.*TMPDIR"
    ):
        nan_check.check(nan_check.Options("m"), {})


def test_the_old_json_stays_until_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place, link = tmp_path / "r.json", tmp_path / "link"
    place.write_text("old")
    place.chmod(0o640)
    link.symlink_to(place)

    def look() -> nan_check.Report:
        assert (place.read_text(), sorted(os.listdir(tmp_path))) == ("old", ["link", "r.json"])
        return report(ALL_KERNEL)

    assert checked(monkeypatch, look, "--json", str(link)) == nan_check.FOUND
    assert json.loads(place.read_text())["status"] == nan_check.FOUND
    assert (stat.S_IMODE(place.stat().st_mode), link.is_symlink()) == (0o640, True)
    assert sorted(os.listdir(tmp_path)) == ["link", "r.json"]


def test_a_place_that_is_no_file_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(monkeypatch, lambda: report(CLEAN), "--json", os.devnull) == nan_check.CLEAN
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_place_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()

    def remove() -> nan_check.Report:
        folder.rmdir()
        return report(ALL_KERNEL)

    assert checked(monkeypatch, remove, "--json", str(folder / "r.json")) == nan_check.CANNOT
    out, error = capsys.readouterr()
    assert out.endswith("Found: see above\n")
    assert error.startswith(f"error: expected a file that can be written at {folder}/r.json, found: No such file")
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_an_interrupted_check(number: signal.Signals, tmp_path: Path) -> None:
    folder, place = tmp_path / "tmp", tmp_path / "r.json"
    folder.mkdir()
    place.write_text("old")
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "--json", str(place)],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    pids = until(lambda: [int(word) for log in folder.glob("*/log") for word in log.read_text().split()[1:3]])
    assert len(pids) == 2
    assert all(map(alive, pids))
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert (process.returncode, out) == (2, "")
        assert error == f"error: interrupted by {number.name}; nothing was written\n"
        assert not any(map(alive, pids))
        assert not os.listdir(folder)
    assert until(lambda: not any(map(alive, pids)))
    assert until(lambda: not os.listdir(folder))
    assert place.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["r.json", "tmp"]


def test_what_is_ignored_does_not_interrupt(tmp_path: Path) -> None:
    """As under nohup."""
    command = ["bash", "-c", 'trap \'\' HUP; exec "$0" "$@"', sys.executable, "-c", STUCK]
    process = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    assert until(lambda: [log for log in tmp_path.glob("*/log") if log.read_text()])
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "error: interrupted by SIGTERM; nothing was written\n"


def heed_signals() -> None:
    """Whoever runs the tests may ignore these, as nohup does, and children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def until(look: Callable[[], Any]) -> Any:
    """What it gives once that is true, or after half a minute."""
    end = time.monotonic() + 30
    while not (found := look()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- its own prompts ----


@pytest.mark.parametrize(
    ("room", "lengths", "missing"),
    [
        (8184, [1, 2, 3, 5, 7, 13, 16, 29, 1000, 1008], []),
        (1000, [1, 2, 3, 5, 7, 13, 16, 29, 992, 1000], []),
        (504, [1, 2, 3, 5, 7, 13, 16, 29, 496], ["prompts of 1000 tokens: the engine takes 504"]),
        (13, [1, 2, 3, 5, 7, 13], ["prompts of 16, 29, 1000 tokens: the engine takes 13"]),
        (0, [], ["prompts of 1, 2, 3, 5, 7, 13, 16, 29, 1000 tokens: the engine takes 0"]),
    ],
)
def test_lengths_by_room(room: int, lengths: list[int], missing: list[str]) -> None:
    assert nan_check.own_lengths(room) == (lengths, missing)


def test_token_ids_are_usable_vary_and_repeat() -> None:
    usable = [3, 5, *range(10, 260)]
    prompts = {length: nan_check.token_ids(length, usable) for length in LENGTHS}
    assert prompts == {length: nan_check.token_ids(length, usable) for length in LENGTHS}
    assert all(len(ids) == length and set(ids) <= set(usable) for length, ids in prompts.items())
    assert len({ids[0] for ids in prompts.values()}) == len(LENGTHS)
    assert len(set(prompts[1000])) > 100


def test_batches_take_prompts_from_all_over() -> None:
    assert nan_check.spread(range(11), 3) == [0, 5, 10]
    assert nan_check.spread(range(11), 9) == [0, 1, 2, 3, 5, 6, 7, 8, 10]
    assert nan_check.spread(range(2), 5) == [0, 1, 0, 1, 0]
