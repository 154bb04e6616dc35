# SPDX-License-Identifier: Apache-2.0
"""Judges cached bytecode: Python runs it in place of the source, so a good source proves nothing by itself."""

import importlib.util
import marshal
from pathlib import Path

_HEADER = 16  # magic, flags, then source mtime and size, or the source's hash
_UNCHECKED_HASH = 0b01


def caches_of(source: Path, names: list[str]) -> list[Path]:
    """The bytecode files of a source among the names of its __pycache__ folder."""
    stem = source.name.removesuffix("py")
    return [source.parent / "__pycache__" / name for name in names if name.startswith(stem) and name.endswith(".pyc")]


def runs_unchecked(cache: Path) -> bool:
    """Whether Python runs this file without looking at the source at all."""
    with cache.open("rb") as file:
        header = file.read(_HEADER)
    return int.from_bytes(header[4:8], "little") & 0b11 == _UNCHECKED_HASH


def is_of(cache: Path, source: Path, data: bytes) -> bool | None:
    """Whether bytecode is what its source `data` compiles to; None if another Python made it, or Python ignores it."""
    compiled = cache.read_bytes()
    if compiled[:4] != importlib.util.MAGIC_NUMBER:
        return None
    flags = int.from_bytes(compiled[4:8], "little")
    if flags == 0:
        status = source.stat()
        seen = int(status.st_mtime).to_bytes(8, "little")[:4] + status.st_size.to_bytes(8, "little")[:4]
        if compiled[8:_HEADER] != seen:
            return None  # out of date: Python compiles the source anew
    elif flags & 0b11 == 0b11 and compiled[8:_HEADER] != importlib.util.source_hash(data):
        return None
    level = cache.name.removesuffix(".pyc").rpartition(".opt-")[2] if ".opt-" in cache.name else ""
    expected = compile(data, str(source), "exec", dont_inherit=True, optimize=int(level) if level.isdigit() else 0)
    try:
        return bool(marshal.loads(compiled[_HEADER:]) == expected)  # noqa: S302  (compared, never run)
    except (ValueError, EOFError, TypeError):
        return False
