# SPDX-License-Identifier: Apache-2.0
"""Whether usage statistics may be sent: only if the operator asked, and nothing says not to."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_ndt import settings

# Upstream compares these three with "1" exactly, and reads only the first non-empty one of the last two.
OPT_OUTS = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK")
_NOT_AN_OPT_OUT = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Decision:
    """Whether statistics are on, and the switch that decided, in a few words."""

    enabled: bool
    reason: str


def decide(environ: Mapping[str, str], marker: str) -> Decision:
    """Statistics are on if VLLM_NDT_USAGE_STATS=1, no opt-out variable is set and nothing stands at `marker`.

    `marker` is the path of the do_not_track file. Whatever stands there counts, and so does a path that cannot be
    looked at: in doubt statistics are off. Raises settings.SettingError on another value of VLLM_NDT_USAGE_STATS.
    """
    if not settings.usage_stats(environ):
        return Decision(False, f"{settings.USAGE_STATS} is not 1")
    for name in OPT_OUTS:
        value = environ.get(name, "")
        if value.strip().lower() not in _NOT_AN_OPT_OUT:
            return Decision(False, f"{name}={value!r}")
    found = _marker(marker)
    if found is not None:
        return Decision(False, found)
    return Decision(True, f"{settings.USAGE_STATS}=1 and no opt-out")


def _marker(path: str) -> str | None:
    """What keeps statistics off at the marker's path, or None if nothing stands there."""
    try:
        # lstat, because a dangling link is a marker too
        os.lstat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return f"{path} cannot be looked at ({reason})"
    return f"{path} exists"
