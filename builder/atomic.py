# SPDX-License-Identifier: Apache-2.0
"""Files that appear under their name only when they are whole, scratch folders, second names for files, and locks."""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

YOUNG = 60  # seconds in which a part file may be made but not locked yet


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends without an error, and is gone otherwise.

    A crash of the machine itself may still leave it short: what matters is checked by its sha256 when it is used.
    It lies beside `path` as `.NAME.*.part`, locked while it is written: what a killed process left there is
    unlocked, and a later writer of the same name removes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            part.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made if missing) while the block runs; others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch(path: Path, forget: Callable[[Path], object]) -> Iterator[Path]:
    """A folder beside `path`, `.NAME.TOKEN.part`, that is gone when the block ends; `forget` is called with it before.

    It is locked meanwhile: what a killed process left there is not, and a later call for the same path removes it.
    """
    for part in path.parent.glob(f".{path.name}.*.part"):
        with contextlib.suppress(OSError), _locked_folder(part):
            if any(part.iterdir()) or time.time() - part.stat().st_mtime > YOUNG:
                forget(part)
                shutil.rmtree(part, ignore_errors=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    part.mkdir(parents=True)
    try:
        with _locked_folder(part):
            try:
                yield part
            finally:
                forget(part)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder; raises OSError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    for part in path.parent.glob(f".{path.name}.*.part"):
        with contextlib.suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = part.stat()
            if status.st_size or time.time() - status.st_mtime > YOUNG:  # what is written is locked before
                part.unlink()


def _umask() -> int:
    """This process's file mode mask, which the system tells only to those who set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
