# SPDX-License-Identifier: Apache-2.0
"""Printing for commands whose exit status is a verdict, which a stream that is closed or full must not change."""

import errno
import os
from typing import Any


def say(text: str, stream: Any) -> str:
    """Print a text; gives why that failed, or "", also where nobody reads it: the stream closed, or None.

    What the stream's encoding lacks is written as escapes.
    """
    if stream is None:
        return ""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError) as error:
        try:  # Python must not try again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):
            return ""
        if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EBADF):
            return f"expected a stdout that takes the report, found: {error.strerror}; send it elsewhere"
    return ""
