# SPDX-License-Identifier: Apache-2.0
"""What happens when an engine's configuration is made: the settings are checked, and one line says what runs."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

from vllm_ndt import manifest, settings

MANIFEST = Path(__file__).parents[1] / manifest.NAME

_announced = False


def on_engine_config(config: Any) -> None:
    """Check the VLLM_NDT_* variables and log the start line, once and in the first process only.

    `config` is a VllmConfig that is being made. Raises settings.SettingError if a variable holds a value that is not
    allowed, or not allowed with this configuration.
    """
    global _announced
    settings.check(os.environ)
    guarded = settings.nan_guard(os.environ) != "off"
    if guarded and config.parallel_config.use_ubatching:
        # each microbatch counts its rows from 0
        raise settings.SettingError(
            settings.NAN_GUARD, os.environ[settings.NAN_GUARD], "off with microbatches (--enable-dbo, --ubatch-size)"
        )
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
