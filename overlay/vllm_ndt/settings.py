# SPDX-License-Identifier: Apache-2.0
"""The VLLM_NDT_* variables: one reader each, and one check of all when the engine's configuration is made."""

import re
from collections.abc import Mapping
from typing import NamedTuple

ENCODER_CACHE_TOKENS = "VLLM_NDT_ENCODER_CACHE_TOKENS"
NAN_GUARD = "VLLM_NDT_NAN_GUARD"
NAN_GUARD_LAYERS = "VLLM_NDT_NAN_GUARD_LAYERS"
NAN_INJECT = "VLLM_NDT_NAN_INJECT"
STALL_SECONDS = "VLLM_NDT_STALL_SECONDS"
USAGE_STATS = "VLLM_NDT_USAGE_STATS"

AUTO = "auto"
TENSORS = ("q", "k", "v", "output")


class Injection(NamedTuple):
    """A fault to put into a tensor (of TENSORS) of one layer: in which step, from 1, and row of the batch, from 0."""

    layer: int
    tensor: str
    step: int
    row: int
    value: float


class SettingError(Exception):
    """A variable holds a value that is not allowed; the message names variable, value and what is allowed.

    It is no ValueError: pydantic would wrap that, and the last line of the log would not be ours.
    """

    def __init__(self, name: str, value: str, allowed: str, remedy: str = "correct the variable or unset it") -> None:
        super().__init__(f"{name}: expected {allowed}, found {value!r}; {remedy}")


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
    """The guard's mode, "off" (the default), "report" or "abort", in any case; raises SettingError on another value."""
    return _one_of(environ, NAN_GUARD, ("off", "report", "abort"))


def nan_guard_norms(environ: Mapping[str, str]) -> bool:
    """Whether the guard watches layer norms beside attention; raises SettingError on another value."""
    value = environ.get(NAN_GUARD_LAYERS, "")
    words = [word.strip().lower() for word in value.split(",")] if value.strip() else ["attention"]
    if words[0] != "attention" or words[1:] not in ([], ["norm"]):
        raise SettingError(NAN_GUARD_LAYERS, value, "attention or attention,norm")
    return "norm" in words


def nan_inject(environ: Mapping[str, str]) -> Injection | None:
    """The fault to inject, or None; raises SettingError if it is not complete, or if the guard is off.

    Its parts may stand in any order.
    """
    value = environ.get(NAN_INJECT, "")
    if not value.strip():
        return None
    allowed = "layer=N,tensor=q|k|v|output,step=N (from 1),row=N (from 0),value=nan|inf, each once"
    forms = {
        "layer": r"\d{1,6}",
        "tensor": "|".join(TENSORS),
        "step": r"[1-9]\d{0,8}",
        "row": r"\d{1,8}",
        "value": "nan|inf",
    }
    parts = [part.partition("=") for part in re.sub(r"\s", "", value).lower().split(",")]
    found = {name: text for name, _, text in parts}
    whole = len(parts) == len(forms) and found.keys() == forms.keys()
    if not whole or not all(re.fullmatch(form, found[name], flags=re.ASCII) for name, form in forms.items()):
        raise SettingError(NAN_INJECT, value, allowed)
    if nan_guard(environ) == "off":
        remedy = f"set {NAN_GUARD} to report or abort, or unset {NAN_INJECT}"
        raise SettingError(NAN_INJECT, value, f"nothing while {NAN_GUARD} is off", remedy)
    layer, step, row = (int(found[name]) for name in ("layer", "step", "row"))
    return Injection(layer, found["tensor"], step, row, float(found["value"]))


def stall_seconds(environ: Mapping[str, str]) -> float:
    """After how many seconds without progress an engine stands still, 150 by default; 0: nobody looks.

    Raises SettingError unless the value is a whole number of 6 digits at most.
    """
    value = environ.get(STALL_SECONDS, "")
    if not re.fullmatch(r"[0-9]{1,6}", value.strip() or "150", flags=re.ASCII):
        raise SettingError(STALL_SECONDS, value, "a whole number of seconds (6 digits at most), or 0 for off")
    return float(value.strip() or 150)


def usage_stats(environ: Mapping[str, str]) -> bool:
    """Whether the operator asked for usage statistics (1); they stay off by default (0).

    Raises SettingError on another value.
    """
    return _one_of(environ, USAGE_STATS, ("0", "1")) == "1"


def check(environ: Mapping[str, str]) -> None:
    """Read every variable, so that a bad value stops the start; raises SettingError for the first one."""
    encoder_cache_tokens(environ)
    nan_guard(environ)
    nan_guard_norms(environ)
    nan_inject(environ)
    stall_seconds(environ)
    usage_stats(environ)


def _one_of(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """The variable's value; the first of `allowed` when it is unset or empty."""
    value = environ.get(name, "")
    word = value.strip().lower() or allowed[0]
    if word not in allowed:
        raise SettingError(name, value, f"{', '.join(allowed[:-1])} or {allowed[-1]}")
    return word
