# SPDX-License-Identifier: Apache-2.0
"""Reads pip's configuration: where the user's packages come from."""

import ast
import contextlib
import functools
import re
import subprocess
import sys

from builder.bootstrap import pip_environment


@functools.cache
def index_settings() -> tuple[list[str], list[str]]:
    """Index addresses, the main one first, and find-links places, as pip's configuration and environment set them."""
    sections: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in _pip("config", "list").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        with contextlib.suppress(ValueError, SyntaxError):  # pip prints values as Python writes them
            sections.setdefault(section, {})[name] = str(ast.literal_eval(value))
    settings = sections["global"] | sections["download"] | sections[":env:"]
    # pip's own default address is told by its help text only (which hides passwords).
    main = re.search(r"--index-url <url>.*?\(default ([^)\s]+)\)", _pip("download", "--help"), re.DOTALL)
    index = [settings.get("index-url") or (main[1] if main else "")]
    index = [address for address in (*index, *settings.get("extra-index-url", "").split()) if address]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        index = []
    return index, settings.get("find-links", "").split()


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    environment = pip_environment() | {"COLUMNS": "1000"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
