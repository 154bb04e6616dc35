# SPDX-License-Identifier: Apache-2.0
"""sha256 of a file, read in pieces."""

import hashlib
from pathlib import Path

PIECE = 1 << 20  # bytes


def sha256_of(path: Path) -> str:
    """The sha256 (hex) of the file at `path`."""
    digest = hashlib.sha256()
    buffer = bytearray(PIECE)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()
