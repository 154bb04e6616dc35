# SPDX-License-Identifier: Apache-2.0
"""What a check of `vllm-ndt doctor` returns."""

from dataclasses import dataclass

GOOD, WARNING, FAULT, UNCHECKED = "good", "warning", "fault", "not checked"
LEVELS = (FAULT, WARNING, UNCHECKED, GOOD)  # in a report's order


@dataclass(frozen=True)
class Finding:
    """One line of the report: the check's name, a level of LEVELS, what was found, why it matters and what to do.

    `reason` and `remedy` are empty where there is nothing to do.
    """

    name: str
    level: str
    found: str
    reason: str = ""
    remedy: str = ""


def listed(names: "list[str] | tuple[str, ...]", most: int = 10) -> str:
    """Names in one line, the first `most` of them and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
