# SPDX-License-Identifier: Apache-2.0
"""The VLLM_NDT_* variables: one reader each, and one check of all when the engine's configuration is made."""

import re
from collections.abc import Mapping

ENCODER_CACHE_TOKENS = "VLLM_NDT_ENCODER_CACHE_TOKENS"
NAN_GUARD = "VLLM_NDT_NAN_GUARD"
USAGE_STATS = "VLLM_NDT_USAGE_STATS"

AUTO = "auto"


class SettingError(Exception):
    """A variable holds a value that is not allowed; the message names variable, value and what is allowed.

    It is no ValueError: pydantic would wrap that, and the last line of the log would not be ours.
    """

    def __init__(self, name: str, value: str, allowed: str) -> None:
        super().__init__(f"{name}: expected {allowed}, found {value!r}; correct the variable or unset it")


def encoder_cache_tokens(environ: Mapping[str, str]) -> int | str | None:
    """The encoder cache's least size in embeddings, AUTO (in any case), or None if the variable is unset.

    Raises SettingError unless the value is AUTO or a whole number from 1 up, of 15 digits at most (int() itself
    refuses thousands of them with another error); spaces around it are ignored.
    """
    value = environ.get(ENCODER_CACHE_TOKENS)
    if value is None:
        return None
    if value.strip().lower() == AUTO:
        return AUTO
    if not re.fullmatch(r"[0-9]{1,15}", value.strip()) or int(value) < 1:
        raise SettingError(
            ENCODER_CACHE_TOKENS, value, "a whole number of embeddings from 1 up (15 digits at most), or auto"
        )
    return int(value)


def nan_guard(environ: Mapping[str, str]) -> str:
    """The guard's mode, "off" (the default) or "report", in any case; raises SettingError on another value."""
    return _one_of(environ, NAN_GUARD, ("off", "report"))


def usage_stats(environ: Mapping[str, str]) -> bool:
    """Whether the operator asked for usage statistics (1); they stay off by default (0).

    Raises SettingError on another value.
    """
    return _one_of(environ, USAGE_STATS, ("0", "1")) == "1"


def check(environ: Mapping[str, str]) -> None:
    """Read every variable, so that a bad value stops the start; raises SettingError for the first one."""
    encoder_cache_tokens(environ)
    nan_guard(environ)
    usage_stats(environ)


def _one_of(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """The variable's value; the first of `allowed` when it is unset or empty."""
    value = environ.get(name, "")
    word = value.strip().lower() or allowed[0]
    if word not in allowed:
        raise SettingError(name, value, " or ".join(allowed))
    return word
