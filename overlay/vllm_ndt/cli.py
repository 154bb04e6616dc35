# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ndt`. It never imports vllm, which takes seconds and may be broken or another one: it finds it."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from vllm_ndt import verify


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
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vllm-ndt`; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        report = verify.check_running(deep=options.deep, expect=options.expect, against=options.against)
    except Exception as error:  # Python would exit with 1, and that says edited
        report = verify.Report("this environment", verify.UNKNOWN, findings=[f"{type(error).__name__}: {error}"])
    print(json.dumps(report.as_dict()) if options.json else "\n".join(report.lines()))
    return report.status


if __name__ == "__main__":
    sys.exit(main())
