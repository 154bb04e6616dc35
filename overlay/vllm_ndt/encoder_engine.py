# SPDX-License-Identifier: Apache-2.0
"""What an engine's configuration tells about its encoder cache."""

from typing import Any

from vllm_ndt.encoder_cache import Engine
from vllm_ndt.encoder_memory import DECIDED


def engine_of(vllm_config: Any) -> Engine:
    """The parts of upstream's VllmConfig that decide on the encoder cache's size and risk."""
    cache, drafter = vllm_config.cache_config, vllm_config.speculative_config
    return Engine(
        encoder_decoder=vllm_config.model_config.is_encoder_decoder,
        decided=getattr(vllm_config, DECIDED, None),
        block=cache.block_size if cache.mamba_cache_mode == "align" else None,
        look_ahead=drafter is not None and drafter.use_eagle(),
    )
