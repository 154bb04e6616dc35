# SPDX-License-Identifier: Apache-2.0
"""Checks of what leaves the machine: statistics, telemetry, downloads. They read variables and ask nobody."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ndt import settings, usage
from vllm_ndt.doctor_findings import FAULT, GOOD, WARNING, Finding
from vllm_ndt.doctor_flags import Model, Serving, is_true
from vllm_ndt.nvml import Gpu

_OFFLINE = "export HF_HUB_OFFLINE=1"
_ADAPTERS = "VLLM_LORA_RESOLVER_HF_REPO_LIST"
# the file of the encoding that openai-harmony asks for
ENCODING = "o200k_base.tiktoken"


@dataclass(frozen=True)
class Encodings:
    """The token encodings of gpt-oss: TIKTOKEN_ENCODINGS_BASE or "", if its file is there, if some were kept before."""

    base: str
    there: bool
    kept: bool


def statistics(environ: Mapping[str, str], marker: str) -> list[Finding]:
    """Whether usage statistics would be sent, and which switch decides; `marker` is the do_not_track file's path."""
    name = "usage statistics"
    try:
        decision = usage.decide(environ, marker)
    except settings.SettingError as error:
        return [Finding(name, FAULT, str(error), "vllm serve refuses to start", f"unset {settings.USAGE_STATS}")]
    if not decision.enabled:
        return [Finding(name, GOOD, f"off: {decision.reason}")]
    return [
        Finding(
            name,
            WARNING,
            f"on: {decision.reason}",
            "the server sends its model's architecture and its hardware to upstream, every ten minutes",
            f"unset {settings.USAGE_STATS}, if you did not mean it",
        )
    ]


def telemetry(environ: Mapping[str, str]) -> list[Finding]:
    """Whether the model hub's library may tell what runs here."""
    name = "hub telemetry"
    if _offline(environ):
        return [Finding(name, GOOD, "off: the hub is asked nothing (HF_HUB_OFFLINE)")]
    for switch in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        if is_true(environ, switch):
            return [Finding(name, GOOD, f"off: {switch}={environ[switch]}")]
    return [
        Finding(
            name,
            WARNING,
            "on: no switch is set",
            "each request to the model hub says which libraries and versions run here",
            "export HF_HUB_DISABLE_TELEMETRY=1, or HF_HUB_OFFLINE=1 for no request at all",
        )
    ]


def downloads(environ: Mapping[str, str], serving: Serving | None) -> list[Finding]:
    """What would be fetched from the model hub when a server starts."""
    name = "downloads at start"
    model = serving.model if serving else None
    if _offline(environ):
        return [Finding(name, GOOD, "none from the model hub: it is offline (HF_HUB_OFFLINE)")]
    if model and model.local:
        return [Finding(name, GOOD, f"the model is a folder, {model.name}; the hub is not offline (HF_HUB_OFFLINE)")]
    what = f"the model hub is asked for {model.name}" if model else "the model hub may be asked: it is not offline"
    remedy = f"download the model to a folder, give that as --model, and {_OFFLINE}"
    return [Finding(name, WARNING, what, "a start needs the network, and may get other files than the last", remedy)]


def kernels(environ: Mapping[str, str], gpus: Sequence[Gpu], packaged: bool) -> list[Finding]:
    """Whether FlashInfer would ask for kernels; `packaged`: flashinfer-cubin is installed. Nothing for other cards."""
    # where it is upstream's first choice
    if not any(gpu.capability[0] == 10 for gpu in gpus):
        return []
    name = "downloads at start"
    if packaged or environ.get("VLLM_HAS_FLASHINFER_CUBIN") == "1":
        return [Finding(name, GOOD, "FlashInfer has its kernels (flashinfer-cubin)")]
    return [
        Finding(
            name,
            WARNING,
            "FlashInfer asks NVIDIA's server for kernels, whatever HF_HUB_OFFLINE says",
            "it is the first choice for attention on this card, and flashinfer-cubin is not installed",
            "pip install flashinfer-cubin, of flashinfer-python's version, or --attention-backend TRITON_ATTN",
        )
    ]


def late_downloads(environ: Mapping[str, str], serving: Serving | None, encodings: Encodings) -> list[Finding]:
    """What would be fetched not at start but when requests come."""
    name = "downloads at requests"
    model = serving.model if serving else None
    found = []
    plugins = environ.get("VLLM_PLUGINS", "").split(",")
    if environ.get(_ADAPTERS) and "lora_hf_hub_resolver" in plugins and not _offline(environ):
        found.append(
            Finding(
                name,
                WARNING,
                f"{_ADAPTERS} is set: a request that names an adapter may fetch it",
                "a client decides what the server downloads",
                f"unset {_ADAPTERS}",
            )
        )
    if model is not None and model.kind == "gpt_oss":
        found.append(_harmony(name, encodings))
    if serving is not None and _takes_media(serving.model) and serving.any_media:
        found.append(
            Finding(
                name,
                WARNING,
                "images and videos that a request names by address are fetched, from anywhere",
                "a client decides where the server connects to",
                "--allowed-media-domains DOMAIN, or stop it with egress.nft (docs/deploying.md#stop-what-leaves)",
            )
        )
    if found:
        return found
    what = "none known for this model" if model and model.config else "none known; with --model more is checked"
    return [Finding(name, GOOD, what)]


def _harmony(name: str, encodings: Encodings) -> Finding:
    reason = "gpt-oss needs this encoding from the first chat request on; HF_HUB_OFFLINE does not stop that download"
    remedy = f"put {ENCODING} into a folder, and export TIKTOKEN_ENCODINGS_BASE=FOLDER"
    if encodings.base and encodings.there:
        return Finding(name, GOOD, f"gpt-oss has its encoding: TIKTOKEN_ENCODINGS_BASE={encodings.base}")
    if encodings.base:
        return Finding(name, FAULT, f"gpt-oss: TIKTOKEN_ENCODINGS_BASE={encodings.base} has no {ENCODING}", reason, remedy)  # noqa: E501  # fmt: skip
    kept = "; some were kept in a folder for temporary files" if encodings.kept else ""
    return Finding(name, WARNING, f"gpt-oss: {ENCODING} is downloaded{kept}; TIKTOKEN_ENCODINGS_BASE is not set", reason, remedy)  # noqa: E501  # fmt: skip


def marker_of(environ: Mapping[str, str]) -> str:
    """Where upstream looks for the file do_not_track."""
    config = environ.get("XDG_CONFIG_HOME", os.path.join(os.path.expanduser("~"), ".config"))
    root = os.path.expanduser(environ.get("VLLM_CONFIG_ROOT", os.path.join(config, "vllm")))
    return os.path.join(root, "do_not_track")


def read_encodings(environ: Mapping[str, str]) -> Encodings:
    """Where the token encodings of gpt-oss would come from."""
    base = environ.get("TIKTOKEN_ENCODINGS_BASE", "")
    # tempfile would write a file to find the folder
    kept_in = os.path.join(environ.get("TMPDIR") or "/tmp", "tiktoken-rs-cache")  # noqa: S108
    cache = Path(environ.get("TIKTOKEN_RS_CACHE_DIR") or kept_in)
    try:
        kept = any(cache.iterdir())
    except OSError:
        kept = False
    return Encodings(base, bool(base) and Path(base, ENCODING).is_file(), kept)


def _offline(environ: Mapping[str, str]) -> bool:
    # huggingface_hub reads the second only where the first is empty
    return is_true(environ, "HF_HUB_OFFLINE" if environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE")


def _takes_media(model: Model) -> bool:
    return any(key in model.config for key in ("vision_config", "audio_config", "thinker_config"))
