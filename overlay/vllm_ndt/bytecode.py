# SPDX-License-Identifier: Apache-2.0
"""Judges cached bytecode: Python runs it in place of the source, so a good source proves nothing by itself."""

import importlib.util
import marshal
import re
from pathlib import Path
from types import CodeType
from typing import Any

_HEADER = 16  # magic, flags, then source mtime and size, or the source's hash
_UNCHECKED_HASH = 0b01
_CACHED = re.compile(r"\.[a-z]+-?[0-9]+[a-z]*(?:\.opt-([a-zA-Z0-9]+))?\.pyc")
# What decides what code does. Tables of positions are left out: PYTHONNODEBUGRANGES empties them.
_PARTS = (
    "co_code",
    "co_name",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_stacksize",
    "co_firstlineno",
    "co_exceptiontable",  # since Python 3.11
)


def caches_of(source: Path, names: list[str]) -> list[Path]:
    """The bytecode files of a source among the names of its __pycache__ folder."""
    stem = source.name.removesuffix(".py")
    found = [name for name in names if name.startswith(stem) and _CACHED.fullmatch(name[len(stem) :])]
    paths = (source.parent / "__pycache__" / name for name in found)
    return [path for path in paths if path.is_file()]


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
    match = _CACHED.search(cache.name)
    level = match[1] if match else None
    optimize = min(int(level), 2) if level and level.isdigit() else 0
    try:
        expected = compile(data, str(source), "exec", dont_inherit=True, optimize=optimize)
        return _same(marshal.loads(compiled[_HEADER:]), expected)  # noqa: S302  (compared, never run)
    except (ValueError, EOFError, TypeError, SyntaxError, MemoryError):
        return False


def _same(one: Any, other: Any) -> bool:
    """Whether two constants, code objects among them, are the same in type and value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType):
        parts = [part for part in _PARTS if hasattr(one, part)]
        same = all(getattr(one, part) == getattr(other, part) for part in parts)
        return same and _same(one.co_consts, other.co_consts)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, frozenset):
        return {(type(item), repr(item)) for item in one} == {(type(item), repr(item)) for item in other}
    return repr(one) == repr(other)  # unlike ==, tells 0.0 from -0.0 and takes NaN for NaN
