# SPDX-License-Identifier: Apache-2.0
"""Checks of what goes wrong on a V100 (sm_70): dtypes, quantisation, and the package flash-attention-v100."""

import contextlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ndt.doctor_findings import FAULT, GOOD, UNCHECKED, WARNING, Finding
from vllm_ndt.doctor_flags import Serving
from vllm_ndt.nvml import Gpu

V100 = (7, 0)
_FLOAT16 = "--dtype float16"
_PLAIN = "--attention-backend TRITON_ATTN"
# upstream's least compute capability by name of the method, times ten; gptq_marlin is another name of gptq there
_LEAST = {
    "gptq": 60, "auto_gptq": 60, "gptq_marlin": 60, "moe_wna16": 70, "bitsandbytes": 70, "compressed-tensors": 75,
    "marlin": 75, "fp8": 75, "humming": 75, "torchao": 75, "modelopt_fp4": 75, "modelopt": 80, "modelopt_mxfp8": 80,
    "mxfp8": 80, "fbgemm_fp8": 80, "experts_int8": 80, "mxfp4": 80, "fp_quant": 100,
}  # fmt: skip
_AWQ = ("awq", "auto_awq", "awq_marlin")
_MODULE, _EXTENSION = "flash_attn_v100", "flash_attn_v100_cuda"


@dataclass(frozen=True)
class FlashAttention:
    """flash-attention-v100 as installed: name and version of its distribution, or "", and where it says it is from.

    `origin`: its metadata's addresses and the file that it was installed from, in one text; `extension`: its native
    part is there; `fake`: the module flash_attn is its own stand-in.
    """

    version: str = ""
    origin: str = ""
    extension: bool = False
    fake: bool = False

    @property
    def provider(self) -> str:
        """Whose it is: "ai-bond", "zhinianqin" (a port that takes the place of vllm_flash_attn), or ""."""
        # the port's metadata may name the original as well
        return next((name for name in ("zhinianqin", "ai-bond") if name in self.origin.lower()), "")


def traps(gpus: Sequence[Gpu], serving: Serving | None, environ: Mapping[str, str]) -> list[Finding]:
    """What a V100 cannot do of what the flags and the model's config ask for."""
    name = "V100"
    if not any(gpu.capability == V100 for gpu in gpus):
        return [Finding(name, GOOD, "no such card here")] if gpus else []
    if serving is None:
        return [Finding(name, UNCHECKED, "no model given", remedy="vllm-ndt doctor --model MODEL, with your flags")]
    found = [*_dtype(name, serving), *_quantisation(name, serving, environ)]
    return found or [Finding(name, GOOD, "no trap in these flags and this model's config.json")]


def _dtype(name: str, serving: Serving) -> list[Finding]:
    asked = serving.dtype.lower()
    if asked == "bfloat16":
        return [Finding(name, FAULT, "--dtype bfloat16", "refused below compute capability 8.0", _FLOAT16)]
    if asked in ("", "auto") and serving.model.dtype == "bfloat16":
        reason = (
            "the card has no bfloat16: upstream takes float16 with one line in the log, and what was trained in "
            "bfloat16 may overflow there to Inf and NaN"
        )
        remedy = f"{_FLOAT16}, so that it is meant, and vllm-ndt nan-check --model {serving.model.name} (docs/nan.md)"
        return [Finding(name, WARNING, "the model's config says bfloat16", reason, remedy)]
    return []


def _quantisation(name: str, serving: Serving, environ: Mapping[str, str]) -> list[Finding]:
    config = serving.model.quantization
    methods = [(serving.quantization or "").lower(), str(config.get("quant_method") or "").lower()]
    if any(one in _AWQ for one in methods):
        triton = environ.get("VLLM_USE_TRITON_AWQ", "").strip() == "1"
        level, what = (WARNING, "AWQ with VLLM_USE_TRITON_AWQ=1") if triton else (FAULT, "AWQ")
        reason = (
            "upstream refuses AWQ below compute capability 7.5; where a build allows it, the classic kernels have an "
            "empty body for this card: wrong numbers, no error"
        )
        return [Finding(name, level, what, reason, "export VLLM_USE_TRITON_AWQ=1, or take a GPTQ model")]
    method = methods[0] or methods[1]
    least = _LEAST.get(method.replace("compressed_tensors", "compressed-tensors"))
    if least is None or least <= 70:
        return []
    what = f"{method}{_scheme(config)} needs compute capability {least / 10:.1f}"
    return [Finding(name, FAULT, what, "refused, or no kernel for it, on this card", "take a GPTQ or float16 model")]


def _scheme(config: Mapping[str, Any]) -> str:
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and (bits := weights.get("num_bits")):
            inputs = group.get("input_activations")
            activations = inputs.get("num_bits", 16) if isinstance(inputs, Mapping) else 16
            return f" (W{bits}A{activations})"
    return ""


def flash_attention(facts: FlashAttention, gpus: Sequence[Gpu]) -> list[Finding]:
    """What is known of an installed flash-attention-v100."""
    name = "flash-attention-v100"
    found = []
    if facts.fake:
        found.append(
            Finding(
                name,
                WARNING,
                "the module flash_attn is flash-attention-v100's stand-in, not flash-attn",
                "import flash_attn, and its version, prove nothing",
                f"look for {_MODULE}, and remove the folder flash_attn if something takes it for the real one",
            )
        )
    if not facts.version:
        return found or [Finding(name, GOOD, "not installed")]
    provider = facts.provider or "unknown provider"
    text = f"{facts.version}, {provider}" + ("" if facts.extension else f", and {_EXTENSION} is missing")
    if gpus and not any(gpu.capability == V100 for gpu in gpus):
        reason = "it is for V100 alone, and there is none here"
        return [*found, Finding(name, WARNING, text, reason, "pip uninstall flash-attention-v100")]
    if not facts.extension:
        reason = "without its native part nothing of it runs"
        return [*found, Finding(name, FAULT, text, reason, f"install a wheel of it with {_EXTENSION}, or {_PLAIN}")]
    remedy = f"{_PLAIN}; else VLLM_NDT_NAN_GUARD=abort, and vllm-ndt nan-check (docs/nan.md)"
    reason = (
        "measured wrong, NaN and finite rubbish, where the keys are no multiple of 16 (1, 2, 3, 5, 7, 13, 29, 1000), "
        "and another result at each call (a race)"
    )
    if facts.provider == "zhinianqin":
        reason = (
            f"a port in the place of vllm_flash_attn, not measured here; the kernels that it replaces were {reason}"
        )
    return [*found, Finding(name, WARNING, text, reason, remedy)]


def read_flash_attention() -> FlashAttention:
    """What is installed of flash-attention-v100, without importing it."""
    version = origin = ""
    fake = False
    for candidate in ("flash-attention-v100", "flash-attn-v100"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            one = importlib.metadata.distribution(candidate)
            version = one.version
            keys = ("Home-page", "Project-URL", "Author", "Download-URL", "Summary")
            parts = [str(value) for key in keys for value in one.metadata.get_all(key) or ()]
            origin = " ".join([*parts, one.read_text("direct_url.json") or ""])
            fake = any(str(path) == "flash_attn/__init__.py" for path in one.files or ())
            break
    if not version and importlib.util.find_spec(_MODULE):
        version = "of unknown version"
    return FlashAttention(version, origin, importlib.util.find_spec(_EXTENSION) is not None, fake or _is_fake())


def _is_fake() -> bool:
    """Whether the first flash_attn on the path is made of flash_attn_v100."""
    spec = importlib.util.find_spec("flash_attn")
    if spec is None or not spec.origin:
        return False
    try:
        return bool(re.search(rf"\b{_MODULE}\b", Path(spec.origin).read_text("utf-8", "replace")))
    except OSError:
        return False
