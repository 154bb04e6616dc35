# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ndt`. Only `encoder-budget` imports vllm, which takes seconds and may be broken or another one.

The engines of `nan-check` run in processes of their own.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from vllm_ndt import health, nan_check, serve, verify

SERVE = "serve"
HEALTH = "health"
BUDGET = "encoder-budget"
NAN_CHECK = "nan-check"


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors exit with 3: 2 says that the patches are gone, but of nan-check that it could not."""

    def error(self, message: str) -> NoReturn:
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
    command.add_argument("--model", required=True, metavar="PATH", help="the model's folder, or its name")
    command.add_argument("--prompts", metavar="FILE", help="UTF-8 text, a prompt a line, in place of the check's own")
    command.add_argument("--json", metavar="FILE", help="write the report as one JSON object, too")
    command.add_argument(
        "--matrix", action="store_true", help="again, with CUDA graphs, plain attention and float32, and compare"
    )
    command.add_argument(
        "--reference-model", metavar="PATH", help="for --matrix: the same model with weights that are not quantised"
    )
    command.add_argument("--dtype", choices=nan_check.DTYPES, default=nan_check.DTYPES[0])
    command.add_argument(
        "--load-format",
        choices=nan_check.LOAD_FORMATS,
        default=nan_check.LOAD_FORMATS[0],
        help="dummy: no weights are read, small random ones are made",
    )
    command.add_argument("--attention-backend", metavar="NAME", help="as of vllm serve")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vllm-ndt`; returns its exit status."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if options.command == SERVE:
        return _serve(options, rest)
    if options.command == BUDGET:
        return _encoder_budget(options, rest)
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
    try:
        if given.json is not None:
            _write(given.json)  # fails now rather than after minutes of work
        if given.prompts is not None:
            options = replace(options, prompts=nan_check.read_prompts(given.prompts))
        report = nan_check.check(options, os.environ, _progress)
        if given.json is not None:
            _write(given.json, json.dumps(report.as_dict(), indent=1))
    except nan_check.CannotRun as error:
        if given.json is not None:
            with contextlib.suppress(nan_check.CannotRun):
                _write(given.json, json.dumps(nan_check.failed(options, str(error)), indent=1))
        print(f"error: {error}", file=sys.stderr)
        return nan_check.CANNOT
    print(report.text(nan_check.width()))
    return report.status


def _write(path: str, text: str | None = None) -> None:
    """Write a report to a file; without one, only make sure that it can be written, and leave what it holds."""
    try:
        if text is None:
            Path(path).open("ab").close()
        else:
            Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise nan_check.CannotRun(
            f"expected a file that can be written at {path}, found: {error.strerror}; correct --json"
        ) from None


def _progress(text: str) -> None:
    """To somebody who waits; a program that reads stderr gets errors alone."""
    if sys.stderr.isatty():
        print(f"running: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
