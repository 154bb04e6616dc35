# SPDX-License-Identifier: Apache-2.0
"""What happens when an engine's configuration is made: the settings are checked, and one line says what runs."""

import functools
import multiprocessing
import os
from pathlib import Path
from typing import Any

from vllm_ndt import manifest, settings, stacks

MANIFEST = Path(__file__).parents[1] / manifest.NAME

_announced = False


def on_engine_config(config: Any) -> None:
    """Check the VLLM_NDT_* variables and log the start line, once and in the first process only.

    `config` is a VllmConfig that is being made. Raises settings.SettingError if a variable holds a value that is not
    allowed, or not allowed with this configuration.
    """
    global _announced
    settings.check(os.environ)
    stacks.register()
    guarded = settings.nan_guard(os.environ) != "off"
    if guarded:
        _refuse_with_guard(config)
    norms = guarded and settings.nan_guard_norms(os.environ)
    # hooks on norms break torch.compile's fusions, and CUDA graphs would not record them
    if norms and config.model_config is not None and not config.model_config.enforce_eager:
        raise settings.SettingError(
            settings.NAN_GUARD_LAYERS,
            os.environ[settings.NAN_GUARD_LAYERS],
            "attention, or --enforce-eager with attention,norm",
        )
    # API servers, engine cores and workers are children, and have this line in their parent's log already
    if _announced or multiprocessing.parent_process() is not None:
        return
    _announced = True
    from vllm.logger import init_logger

    # vLLM sets up the logger "vllm" and what is below it; a name of our own would log nothing
    init_logger("vllm.ndt").info("%s", start_line(MANIFEST))


def _refuse_with_guard(config: Any) -> None:
    """Raise settings.SettingError where a layer's rows are not the batch's, so that another request would be named."""
    parallel, cache = config.parallel_config, config.cache_config
    refused = {
        "with microbatches (--enable-dbo, --ubatch-size)": parallel.use_ubatching,
        "with --prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "with --kv-sharing-fast-prefill": cache is not None and cache.kv_sharing_fast_prefill,
    }
    for what, there in refused.items():
        if there:
            raise settings.SettingError(settings.NAN_GUARD, os.environ[settings.NAN_GUARD], f"off {what}")


def start_line(path: Path) -> str:
    """One line with the version, the patches in order and the manifest's digest; never fails."""
    try:
        found = manifest.parse(path.read_bytes())
    except FileNotFoundError:
        return "vLLM with vllm_ndt's patches, manifest missing: run `vllm-ndt verify`"
    except OSError as error:
        return f"vLLM with vllm_ndt's patches, manifest unreadable ({error.strerror}): run `vllm-ndt verify`"
    except manifest.ManifestError:
        return "vLLM with vllm_ndt's patches, manifest damaged: run `vllm-ndt verify`"
    return f"vLLM {found.version}, patched: {', '.join(found.patches) or 'nothing'}; manifest {found.digest}"


@functools.cache
def own_build() -> tuple[str, str]:
    """Version and manifest digest of this build, "unknown" where the manifest is missing or damaged."""
    try:
        found = manifest.parse(MANIFEST.read_bytes())
    except (OSError, manifest.ManifestError):
        return "unknown", "unknown"
    return found.version, found.digest
