# SPDX-License-Identifier: Apache-2.0
"""`vllm-ndt doctor`: its arguments, its table and its JSON."""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from vllm_ndt import doctor, verify
from vllm_ndt.doctor_findings import GOOD, Finding
from vllm_ndt.doctor_flags import FlagError
from vllm_ndt.streams import say

NAME = "doctor"
_WIDE = 100  # from here on the findings stand in columns
_NARROWEST = 30


def add_doctor(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the parser of `vllm-ndt`; its arguments of `vllm serve` are what that does not know."""
    command = commands.add_parser(
        NAME,
        allow_abbrev=False,
        usage="%(prog)s [--expect DIGEST] [--json] [--model DIR_OR_NAME and any argument of vllm serve]",
        help="say what is wrong with this installation, this machine and these serving flags",
        epilog="exit statuses: 0 good, 1 warnings, 2 faults, 3 could not run",
    )
    command.add_argument("--expect", metavar="DIGEST", help="the manifest digest that this build must have")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(options: argparse.Namespace, flags: Sequence[str] = ()) -> int:
    """Run the checks and print the report; `flags` are arguments of `vllm serve`. Returns the exit status."""
    try:
        if options.expect is not None and not verify.is_digest(options.expect):
            raise FlagError(f"expected {verify.DIGEST}, found {options.expect!r}; copy it from the build")
        report = doctor.run(os.environ, flags, options.expect)
    except Exception as error:  # Python would exit with 1, and that says warnings
        text = str(error) if isinstance(error, FlagError) else f"{type(error).__name__}: {error}"
        if options.json:
            say(json.dumps(doctor.failed(text)), sys.stdout)
        say(f"error: {text}", sys.stderr)
        return doctor.CANNOT
    say(json.dumps(report.as_dict()) if options.json else "\n".join(lines(report, _width())), sys.stdout)
    return report.status


def lines(report: doctor.Report, width: int) -> list[str]:
    """The report for a reader: a line for each finding, its reason and remedy below, the summary last."""
    found = report.manifest
    head = f"vllm {found.version}, manifest {found.digest}" if found else "vllm with no manifest of this project"
    names = max((len(finding.name) for finding in report.findings), default=0)
    levels = max((len(finding.level) for finding in report.findings), default=0)
    body = [line for finding in report.findings for line in _finding(finding, levels, names, width)]
    return [*_wrap(head, "", "  ", width), "", *body, "", *_wrap(report.summary, "", "  ", width)]


def _finding(finding: Finding, levels: int, names: int, width: int) -> list[str]:
    if width >= _WIDE:
        first = f"{finding.level:<{levels}}  {finding.name:<{names}}  "
        indent = " " * len(first)
        found = _wrap(finding.found, first, indent, width)
    else:
        indent = "  "
        found = [*_wrap(f"{finding.level}: {finding.name}", "", indent, width), *_wrap(finding.found, indent, indent, width)]  # noqa: E501  # fmt: skip
    why = _wrap(finding.reason, f"{indent}why: ", f"{indent}     ", width) if finding.reason else []
    shown = finding.remedy and (finding.level != GOOD)
    return [*found, *why, *(_wrap(finding.remedy, f"{indent}do:  ", f"{indent}     ", width) if shown else [])]


def _wrap(text: str, first: str, rest: str, width: int) -> list[str]:
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return textwrap.wrap(
        plain,
        max(width, _NARROWEST),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _width() -> int:
    try:
        return shutil.get_terminal_size().columns if os.isatty(1) else 240
    except OSError:
        return 240
