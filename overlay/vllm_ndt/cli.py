# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ndt`. Only `encoder-budget` imports vllm, which takes seconds and may be broken or another one."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from vllm_ndt import verify

BUDGET = "encoder-budget"


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors exit with 3: 2 says that the patches are gone."""

    def error(self, message: str) -> NoReturn:
        self.exit(verify.STATUS[verify.UNKNOWN], f"error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of `vllm-ndt`."""
    top = _Parser(prog="vllm-ndt", description="Checks of the patched vLLM.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
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
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vllm-ndt`; returns its exit status."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if options.command == BUDGET:
        return _encoder_budget(options, rest)
    if rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return _verify(options)


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


if __name__ == "__main__":
    sys.exit(main())
