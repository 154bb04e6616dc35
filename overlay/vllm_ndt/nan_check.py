# SPDX-License-Identifier: Apache-2.0
"""`vllm-ndt nan-check`: which prompts make a model's activations NaN or Inf, and in which layer first.

Each engine runs in a process of its own (`nan_run`), so that one that dies, or logs, spoils neither the report nor the
next one. Nothing here imports vllm.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_ndt import nan_advice, settings
from vllm_ndt.nan_advice import Advice, Case, Finding, Run

CLEAN, FOUND, CANNOT = 0, 1, 2
DTYPES = ("float16", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
MAX_TOKENS = 8
BATCHES = (3, 5, 9)
# kernels that go by tiles fail on lengths that leave a part of one; multiples of 16 are the controls
ODD, LONG, CONTROL, LONG_CONTROL = (1, 2, 3, 5, 7, 13, 29), 1000, 16, 1008
ORIGINS = {
    nan_advice.KERNEL: "in this layer's attention kernel, or from its KV cache",
    nan_advice.INPUTS: "input already bad, from between it and the attention layer before",
    nan_advice.EMBEDDINGS: "input already bad, came before this layer's attention, the first one",
    nan_advice.ENCODER: "non-finite before the first attention layer, from the encoder",
    nan_advice.NORM: "in this norm",
    nan_advice.LOGITS: "after the last attention layer",
}
NEVER = (
    f"longer prompts and answers of more than {MAX_TOKENS} tokens",
    "prefix caching, several GPUs, drafters, sampling other than greedy",
)
MODEL_FILES = ("config.json", "params.json")
KILLED = 10.0  # seconds in which the kernel has ended what was killed
# the caller's folder must not shadow modules, as it would with -m
_CODE = "import sys; sys.path[:] = [p for p in sys.path if p]; from vllm_ndt.nan_run import main; sys.exit(main())"


class CannotRun(Exception):
    """No verdict is possible; the message says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Options:
    """What to check: see `vllm-ndt nan-check --help`. `prompts`: the texts, or None for the check's own."""

    model: str
    prompts: tuple[str, ...] | None = None
    matrix: bool = False
    reference: str | None = None
    dtype: str = DTYPES[0]
    load_format: str = LOAD_FORMATS[0]
    backend: str | None = None


@dataclass(frozen=True)
class Attempt:
    """One engine of the check: what it gave, or why there is none."""

    name: str
    run: Run | None
    why_not: str = ""


@dataclass(frozen=True)
class Report:
    """The verdict. `attempts`: the baseline first, which has a run; `asked`: the fault that was asked for, or ""."""

    options: Options
    attempts: tuple[Attempt, ...]
    asked: str = ""

    @property
    def runs(self) -> dict[str, Run]:
        """The runs that there are, by name."""
        return {attempt.name: attempt.run for attempt in self.attempts if attempt.run}

    @property
    def advice(self) -> list[Advice]:
        """What is likely, and what to do."""
        return nan_advice.advise(self.runs)

    @property
    def injected(self) -> str:
        """The fault that was put into the baseline, or ""."""
        return self.runs[nan_advice.BASELINE].injected

    @property
    def not_injected(self) -> str:
        """Why the fault that was asked for was not put in, or ""."""
        if not self.asked or self.injected:
            return ""
        return self.runs[nan_advice.BASELINE].not_injected or "its step was never reached"

    @property
    def status(self) -> int:
        """The exit status: FOUND for anything non-finite in any run, logprobs too, or a run that does not repeat."""
        runs = self.runs
        again = runs.get(nan_advice.AGAIN)
        differs = again is not None and nan_advice.differing(runs[nan_advice.BASELINE], again)
        return FOUND if differs or any(run.bad for run in runs.values()) else CLEAN

    @property
    def untested(self) -> list[str]:
        """What this check says nothing of."""
        graphs = (
            []
            if nan_advice.GRAPHS in self.runs
            else ["CUDA graphs" if self.options.matrix else "CUDA graphs (see --matrix)"]
        )
        dummy = ["the model's weights: they are dummies"] if self.options.load_format == "dummy" else []
        return [*dummy, *self.runs[nan_advice.BASELINE].untested, *graphs, *NEVER]

    def as_dict(self) -> dict[str, Any]:
        """The report for a program; the keys are always the same."""
        return {
            "status": self.status,
            "error": None,
            "model": self.options.model,
            "load_format": self.options.load_format,
            "injected": self.injected or None,
            "not_injected": self.not_injected or None,
            "runs": {
                attempt.name: {"why_not": attempt.why_not or None} | (_run_dict(attempt.run) if attempt.run else {})
                for attempt in self.attempts
            },
            "advice": [asdict(one) for one in self.advice],
            "not_tested": self.untested,
        }

    def text(self, width: int) -> str:
        """The report for a reader, in lines of up to `width` characters."""
        baseline = self.runs[nan_advice.BASELINE]
        lines = [_head(nan_advice.BASELINE, baseline), _table(_rows(baseline.cases), width), ""]
        for attempt in self.attempts[1:]:
            lines += _attempt(attempt, width)
        lines += [""] if self.attempts[1:] else []
        if self.injected:
            lines += [f"A fault was injected: {self.injected}, as {settings.NAN_INJECT} asks for", ""]
        if self.not_injected:
            lines += [f"{settings.NAN_INJECT} asks for a fault, and none was put in: {self.not_injected}", ""]
        for one in self.advice:
            lines += [f"Seen:    {one.symptom}", f"Likely:  {one.likely}", f"Do:      {one.do}", ""]
        lines += ["Not tested:", *(f"  {text}" for text in self.untested), ""]
        lines.append("Found: see above" if self.status else "Clean: no NaN and no Inf in what was tested")
        return "\n".join(lines)


def failed(options: Options, error: str) -> dict[str, Any]:
    """The report for a program when the check could not run; the keys are those of Report.as_dict."""
    keys: dict[str, Any] = {
        "load_format": options.load_format,
        "injected": None,
        "not_injected": None,
        "runs": {},
        "advice": [],
        "not_tested": [],
    }
    return {"status": CANNOT, "error": error, "model": options.model, **keys}


def check(options: Options, environ: Mapping[str, str], say: Callable[[str], None] = lambda _: None) -> Report:
    """Run the check, a minute an engine or more; `say` is told what starts.

    Raises CannotRun if the baseline gives no verdict. A log that tells why an engine failed stays in a temporary
    folder, which the message names.
    """
    environ = dict(environ) | {settings.NAN_GUARD: "report", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    try:
        settings.check(environ)
    except settings.SettingError as error:
        raise CannotRun(str(error)) from None
    for model in (options.model, options.reference):
        if model is not None:
            _look_at(model)
    say("the first engine")
    baseline = _engine(_job(options), environ)
    attempts = [Attempt(nan_advice.BASELINE, baseline)]
    for name, job in _matrix(options, baseline).items():
        if isinstance(job, str):
            attempts.append(Attempt(name, None, job))
            continue
        say(name)
        try:
            attempts.append(Attempt(name, _engine(job, environ)))
        except CannotRun as error:
            attempts.append(Attempt(name, None, str(error)))
    return Report(options, tuple(attempts), environ.get(settings.NAN_INJECT, "").strip())


def read_prompts(path: str) -> tuple[str, ...]:
    """The lines of a UTF-8 file that are not blank; raises CannotRun if there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise CannotRun(f"expected a file of prompts at {path}, found: {error.strerror}; correct --prompts") from None
    except UnicodeDecodeError as error:
        raise CannotRun(
            f"expected UTF-8 in {path}, found another byte at {error.start}; save the prompts as UTF-8"
        ) from None
    found = tuple(line for line in lines if line.strip())
    if not found:
        raise CannotRun(f"expected a prompt a line in {path}, found none; write one, or leave --prompts out")
    return found


def own_lengths(room: int) -> tuple[list[int], list[str]]:
    """The lengths of the check's own prompts, in tokens, where `room` fit; and what is not tested for want of room."""
    control = min(LONG_CONTROL, room // CONTROL * CONTROL)
    lengths = sorted({*ODD, CONTROL, LONG, *([control] if control else [])})
    fit = [length for length in lengths if length <= room]
    missing = [length for length in lengths if length > room]
    return fit, [f"prompts of {', '.join(map(str, missing))} tokens: the engine takes {room}"] if missing else []


def token_ids(length: int, usable: Sequence[int]) -> list[int]:
    """`length` of the usable ids, from all over: always the same, others for other lengths."""
    chance = random.Random(length)
    return [usable[int(chance.random() * len(usable))] for _ in range(length)]


def spread(prompts: Sequence[Any], size: int) -> list[Any]:
    """A batch of `size` prompts from all over the list; each more than once only where there are fewer."""
    if len(prompts) < size:
        return [prompts[at % len(prompts)] for at in range(size)]
    return [prompts[at * (len(prompts) - 1) // (size - 1)] for at in range(size)]


def _look_at(model: str) -> None:
    """Raise CannotRun for a path that cannot be a model's; a name is left to vLLM, which may fetch it."""
    path = Path(model)
    if not os.path.exists(path):  # unlike Path.exists, no error for a name too long or a folder that is closed
        if model.startswith(("/", "./", "../", "~")) or not model:
            raise CannotRun(f"expected a model's folder, found nothing at {model!r}; correct the path")
        return
    if path.is_dir() and not any((path / name).is_file() for name in MODEL_FILES):
        raise CannotRun(f"expected a model with a {MODEL_FILES[0]}, found none in {model}; correct the path")


def _job(options: Options, **changes: Any) -> dict[str, Any]:
    return {
        "model": options.model,
        "dtype": options.dtype,
        "load_format": options.load_format,
        "enforce_eager": True,
        "attention_backend": options.backend,
        "prompts": options.prompts,
    } | changes


def _matrix(options: Options, baseline: Run) -> dict[str, dict[str, Any] | str]:
    """The runs beside the baseline by name: each a job, or the reason why there is none."""
    if not options.matrix:
        return {}
    gpu = baseline.device == "cuda"
    here = "not here: it needs an NVIDIA GPU"
    plain: dict[str, Any] | str = _job(options, attention_backend=nan_advice.PLAIN_BACKEND) if gpu else here
    if baseline.backends == (nan_advice.PLAIN_BACKEND,):
        plain = f"the baseline has {nan_advice.PLAIN_BACKEND} already"
    return {
        nan_advice.AGAIN: _job(options),
        nan_advice.GRAPHS: _job(options, enforce_eager=False) if gpu else here,
        nan_advice.PLAIN: plain,
        nan_advice.FLOAT32: (
            _job(options, dtype="float32") if baseline.dtype != "float32" else "the baseline is float32 already"
        ),
        nan_advice.REFERENCE: (
            _job(options, model=options.reference) if options.reference else "--reference-model is not given"
        ),
    }


def _engine(job: Mapping[str, Any], environ: Mapping[str, str]) -> Run:
    """What one engine gives; raises CannotRun, with the path of its log, which stays then."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="vllm-ndt-nan-check-"))
    except OSError as error:
        raise CannotRun(
            f"expected a folder for temporary files, found: {error.strerror}; set TMPDIR to one that can be written"
        ) from None
    log, result = folder / "log", folder / "result.json"
    keep = False
    try:
        status = _run(json.dumps({**job, "result": str(result)}), log, environ)
        found = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {"error": _death(status)}
        if "error" in found:
            keep = True
            raise CannotRun(f"expected an engine that runs {job['model']}, found: {found['error']}; its log is {log}")
        return nan_advice.run_from(found)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _run(job: str, log: Path, environ: Mapping[str, str]) -> int:
    """Give a process of nan_run a job; returns its exit status.

    It has a session of its own, which ends in any case: killed from here, or, if this process cannot do that any more,
    by itself, as the pipe that brought the job is closed then.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
    assert process.stdin
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(job.encode() + b"\n")
            process.stdin.flush()
        # not reaped, so that the session's number stays its own
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    return process.returncode


def _death(status: int) -> str:
    if status >= 0:
        return f"it ended with status {status} and no result"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else -status
    memory = ", which the system sends when memory runs out" if status == -signal.SIGKILL else ""
    return f"it was ended by {name}{memory}"


def _run_dict(run: Run) -> dict[str, Any]:
    cases = [asdict(case) | {"notes": case.notes, "verdict": _verdict(case)} for case in run.cases]
    return asdict(run) | {"cases": cases}


def _head(name: str, run: Run) -> str:
    backends = f", {', '.join(run.backends)}" if run.backends else ""
    return f"{name}: {run.device}, {run.dtype}{backends}, {len(run.layers)} layers watched"


def _attempt(attempt: Attempt, width: int) -> list[str]:
    """The part of the report of a run beside the baseline: what was found, or one line."""
    if attempt.run is None:
        return [f"{attempt.name}: {attempt.why_not}"]
    head = _head(attempt.name, attempt.run)
    if not attempt.run.hits:
        return [f"{head}: clean"]
    return ["", head, _table(_rows(attempt.run.hits), width), ""]


def _rows(cases: Sequence[Case]) -> list[list[str]]:
    """Each prompt alone, and of batches what was found, or that they are clean."""
    rows = []
    for size in dict.fromkeys(case.batch for case in cases):
        batch = [case for case in cases if case.batch == size]
        if size == 1:
            rows += [_row(case, "") for case in batch]
        elif any(case.finding for case in batch):
            found = Counter(tuple(_row(case, f" in a batch of {size}")) for case in batch if case.finding)
            rows += [
                [name + (f", {count} times" if count > 1 else ""), *cells] for (name, *cells), count in found.items()
            ]
        else:
            rows.append([f"batch of {size}", "", "", "", "", "clean"])
    return rows


def _row(case: Case, where: str) -> list[str]:
    name = case.name
    if "token" not in name:
        name += f" ({case.tokens} tokens)"
    elif case.tokens % nan_advice.BLOCK == 0:
        name += " (control)"
    finding = case.finding
    tensors = finding.tensors if finding else {}
    kinds = ", ".join(kind for kind in ("NaN", "Inf") if any(kind in found for found in tensors.values()))
    return [name + where, finding.layer if finding else "", ", ".join(tensors), kinds, case.logits, _verdict(case)]


def _verdict(case: Case) -> str:
    """In words: where it came from and when, or that it is clean; and what else is odd."""
    text = "clean"
    if case.finding:
        text = _origin(case.finding)
        if case.finding.token:
            text += f"; first at generated token {case.finding.token + 1}"
    return f"{text}; note: {', '.join(case.notes)}" if case.notes else text


def _origin(finding: Finding) -> str:
    if finding.origin == nan_advice.INPUTS and finding.after:
        return f"input already bad, from between it and {finding.after}"
    if finding.origin == nan_advice.EMBEDDINGS and finding.norm:
        return "input already bad, came before this norm, the first one"
    return ORIGINS[finding.origin]


def _table(rows: Sequence[Sequence[str]], width: int) -> str:
    from rich.box import SIMPLE_HEAD  # type: ignore[import-not-found,unused-ignore]
    from rich.console import Console  # type: ignore[import-not-found,unused-ignore]
    from rich.table import Table  # type: ignore[import-not-found,unused-ignore]
    from rich.text import Text  # type: ignore[import-not-found,unused-ignore]

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("prompt", "first layer", "tensor", "kind", "logits", "verdict"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # a file of its own, so that the table has no colours; it takes the box for the terminal's encoding
    page = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding or "ascii", errors="replace")
    Console(file=page, width=width, no_color=True, force_terminal=False).print(table)
    page.seek(0)
    return "\n".join(line.rstrip() for line in page.read().strip("\n").splitlines())


def width() -> int:
    """The terminal's width in characters; into a file or pipe, wide enough that nothing wraps."""
    return shutil.get_terminal_size().columns if os.isatty(1) else 240
