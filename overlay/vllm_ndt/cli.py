# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ndt`. Only `encoder-budget` imports vllm, which takes seconds and may be broken or another one.

The engines of `nan-check` run in processes of their own.
"""

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from vllm_ndt import doctor_cli, health, nan_check, serve, verify
from vllm_ndt.streams import say

SERVE = "serve"
HEALTH = "health"
BUDGET = "encoder-budget"
NAN_CHECK = "nan-check"


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors exit with 3: 2 says that the patches are gone, but of nan-check that it could not."""

    def error(self, message: str) -> NoReturn:
        _open_closed()
        status = nan_check.CANNOT if self.prog.endswith(f" {NAN_CHECK}") else verify.STATUS[verify.UNKNOWN]
        self.exit(status, f"error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of `vllm-ndt`."""
    top = _Parser(prog="vllm-ndt", description="Checks of the patched vLLM.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    command = commands.add_parser(
        "verify",
        help="say whether the vLLM that would run is the patched build",
        epilog="exit statuses: 0 patched, 1 edited or incomplete, 2 rolled back, 3 could not check",
    )
    command.add_argument(
        "--deep", action="store_true", help="hash every file; without it Python files only, the rest by size"
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument("--expect", metavar="DIGEST", help="the manifest digest that the build printed")
    which.add_argument("--against", metavar="WHEEL", help="a wheel file that this installation must come from")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command = commands.add_parser(
        BUDGET,
        allow_abbrev=False,
        usage="%(prog)s --model DIR_OR_NAME [--kv-memory BYTES] [--json] [any argument of vllm serve]",
        help="say what a model and its serving flags ask of the encoder cache",
        epilog="exit statuses: 0 fine, 1 the demand does not fit the cache, 3 could not tell",
    )
    command.add_argument(
        "--kv-memory",
        metavar="BYTES",
        help="memory for the KV cache, in bytes or like 24GiB; where it is unknown, only 2 GiB limit the number to set",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    _add_nan_check(commands)
    doctor_cli.add_doctor(commands)
    return top


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser(
        SERVE,
        allow_abbrev=False,
        usage="%(prog)s [--require VERSION] [--expect DIGEST] [--exit-when-unhealthy] [any argument of vllm serve]",
        help="verify this installation, then become `vllm serve`",
        epilog="exit statuses: those of verify where it does not start (another build: 1), else those of vllm serve",
    )
    command.add_argument("--require", metavar="VERSION", help="serve only as this version, such as 0.27.1+ndt.1")
    command.add_argument("--expect", metavar="DIGEST", help="serve only with this manifest digest")
    command.add_argument(
        "--exit-when-unhealthy",
        action="store_true",
        help="end the server when it is no longer healthy, for whoever restarts what ended, as compose does",
    )
    commands.add_parser(
        HEALTH,
        allow_abbrev=False,
        help="ask the server that `vllm-ndt serve` started here for its health, by its own arguments",
        epilog="exit statuses: 0 healthy, 1 not",
    )


def _add_nan_check(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser(
        NAN_CHECK,
        allow_abbrev=False,
        help="say which prompts make a model's activations NaN or Inf, and in which layer first",
        epilog="exit statuses: 0 clean, 1 NaN or Inf found, or a run that does not repeat, 2 could not run",
    )
    command.set_defaults(parser=command)
    command.add_argument("--model", required=True, type=_filled, metavar="PATH", help="the model's folder, or its name")
    command.add_argument(
        "--prompts", type=_filled, metavar="FILE", help="UTF-8 text, a prompt a line, in place of the check's own"
    )
    command.add_argument(
        "--json",
        type=_filled,
        metavar="FILE",
        help="write the report as one JSON object, too, at the end; until then FILE stays as it is",
    )
    command.add_argument(
        "--matrix", action="store_true", help="again, with CUDA graphs, plain attention and float32, and compare"
    )
    command.add_argument(
        "--reference-model",
        type=_filled,
        metavar="PATH",
        help="for --matrix: the same model with weights that are not quantised",
    )
    command.add_argument(
        "--dtype",
        choices=nan_check.DTYPES,
        default=nan_check.DTYPES[0],
        help="what the model is run in, whatever its config says (default: %(default)s)",
    )
    command.add_argument(
        "--load-format",
        choices=nan_check.LOAD_FORMATS,
        default=nan_check.LOAD_FORMATS[0],
        help="dummy: no weights are read, small random ones are made",
    )
    command.add_argument("--attention-backend", type=_filled, metavar="NAME", help="as of vllm serve")


def _filled(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a value, found an empty one; fill it in, or leave the argument out")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vllm-ndt`; returns its exit status."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if options.command == SERVE:
        return _serve(options, rest)
    if options.command == BUDGET:
        return _encoder_budget(options, rest)
    if options.command == doctor_cli.NAME:
        return doctor_cli.run_doctor(options, rest)
    if rest:
        getattr(options, "parser", top).error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == NAN_CHECK:
        return _nan_check(options)
    return _health() if options.command == HEALTH else _verify(options)


def _serve(options: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        return serve.serve(
            rest, require=options.require, expect=options.expect, end_when_unhealthy=options.exit_when_unhealthy
        )
    except health.NoServer as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:  # Python would exit with 1, and that says edited
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
    return verify.STATUS[verify.UNKNOWN]


def _health() -> int:
    try:
        problem = health.ask(health.address(health.find()))
    except health.NoServer as error:
        problem = str(error)
    print(problem or "healthy")
    return int(bool(problem))


def _verify(options: argparse.Namespace) -> int:
    try:
        report = verify.check_running(deep=options.deep, expect=options.expect, against=options.against)
    except Exception as error:  # Python would exit with 1, and that says edited
        report = verify.Report("this environment", verify.UNKNOWN, findings=[f"{type(error).__name__}: {error}"])
    print(json.dumps(report.as_dict()) if options.json else "\n".join(report.lines()))
    return report.status


def _encoder_budget(options: argparse.Namespace, flags: Sequence[str]) -> int:
    from vllm_ndt import encoder_budget

    try:
        memory = None if options.kv_memory is None else encoder_budget.memory_bytes(options.kv_memory)
        report = encoder_budget.report(encoder_budget.facts_from_flags(flags), memory)
    except (encoder_budget.CannotTell, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return encoder_budget.UNKNOWN
    print(json.dumps(report.as_dict()) if options.json else "\n".join(report.lines()))
    return report.status


def _nan_check(given: argparse.Namespace) -> int:
    if given.reference_model is not None and not given.matrix:
        given.parser.error("argument --reference-model: it needs --matrix")
    options = nan_check.Options(
        given.model,
        matrix=given.matrix,
        reference=given.reference_model,
        dtype=given.dtype,
        load_format=given.load_format,
        backend=given.attention_backend,
    )
    _open_closed()
    written = "nothing"
    try:
        with _interruptible():
            if given.json is not None:
                _look_at_place(given.json)  # now rather than after minutes of work
            problem, report = "", None
            try:
                if given.prompts is not None:
                    options = replace(options, prompts=nan_check.read_prompts(given.prompts))
                report = nan_check.check(options, os.environ, _progress)
                made, text = report.as_dict(), report.text(nan_check.width())
            except Exception as error:  # Python would exit with 1, and that says found
                problem = _problem(error)
                made, text = nan_check.failed(options, problem), ""
            if given.json is not None:
                try:
                    _write(given.json, json.dumps(made, indent=1))
                    written = given.json
                except nan_check.CannotRun as error:
                    problem = problem or str(error)
            if text:
                problem = say(text, sys.stdout) or problem
    except _Interrupted as stop:
        problem, report = f"interrupted by {stop}; {written} was written", None
    except Exception as error:
        problem, report = _problem(error), None
    if problem or report is None:
        say(f"error: {problem}", sys.stderr)
        return nan_check.CANNOT
    return report.status


class _Interrupted(BaseException):
    """A signal asks to end; the message is its name."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise _Interrupted for a signal that asks to end, but for one that is ignored, as by nohup.

    It comes once, so that nothing stops the cleaning up.
    """
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}

    def stop(number: int, _: object) -> NoReturn:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise _Interrupted(signal.Signals(number).name)

    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _problem(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, nan_check.CannotRun) else f"{type(error).__name__}: {text}"


def _open_closed() -> None:
    """Python has no object for a stream that the caller closed, and its number would go to the next file."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _look_at_place(path: str) -> None:
    """Raise CannotRun unless a report can be written to a file, which is neither made nor changed."""
    try:
        target = _target(path)
        if target is not None:
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            part = _part(target)
            part.touch()
            part.unlink()
    except OSError as error:
        raise _no_place(path, error) from None


def _write(path: str, text: str) -> None:
    """Write a report to a file, the whole or nothing; raises CannotRun."""
    try:
        target = _target(path)
        if target is None:
            Path(path).write_text(text + "\n", encoding="utf-8")
            return
        part = _part(target)
        try:
            part.write_text(text + "\n", encoding="utf-8")
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise _no_place(path, error) from None


def _target(path: str) -> Path | None:
    """The file to replace, at the end of links; None for a device or a pipe, which stays and is written to."""
    there = Path(path)
    if there.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return None if there.exists() and not there.is_file() else Path(os.path.realpath(path))


def _part(target: Path) -> Path:
    return target.with_name(f".vllm-ndt-{os.getpid()}.part")


def _no_place(path: str, error: OSError) -> nan_check.CannotRun:
    return nan_check.CannotRun(
        f"expected a file that can be written at {path}, found: {error.strerror}; correct --json"
    )


def _progress(text: str) -> None:
    """To somebody who waits; a program that reads stderr gets errors alone."""
    if sys.stderr.isatty():
        print(f"running: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
