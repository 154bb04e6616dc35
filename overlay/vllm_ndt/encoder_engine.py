# SPDX-License-Identifier: Apache-2.0
"""What an engine's configuration tells about its encoder cache."""

from typing import Any

from vllm_ndt.encoder_cache import DECIDED, Engine, unsafe_budget


def states_cached(vllm_config: Any) -> bool:
    """Whether recurrent states are cached at the ends of blocks: the model has such layers, and the mode is "align"."""
    model = vllm_config.model_config
    recurrent = model.is_hybrid or model.is_attention_free
    return bool(recurrent and vllm_config.cache_config.mamba_cache_mode == "align")


def engine_of(vllm_config: Any) -> Engine:
    """The parts of upstream's VllmConfig that decide on the encoder cache's size and risk."""
    drafter = vllm_config.speculative_config
    return Engine(
        encoder_decoder=vllm_config.model_config.is_encoder_decoder,
        decided=getattr(vllm_config, DECIDED, None),
        block=vllm_config.cache_config.block_size if states_cached(vllm_config) else None,
        look_ahead=drafter is not None and drafter.use_eagle(),
    )


def budget_of(vllm_config: Any) -> Any:
    """Upstream's MultiModalBudget, or None where upstream's scheduler makes none: for a text-only model."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    if not MULTIMODAL_REGISTRY.supports_multimodal_inputs(vllm_config.model_config):
        return None
    return MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)


def budget_warning(vllm_config: Any) -> str:
    """See encoder_cache.unsafe_budget; empty if nothing is to be said."""
    scheduling = vllm_config.scheduler_config
    return unsafe_budget(
        engine_of(vllm_config).block,
        scheduling.max_num_seqs,
        1 + vllm_config.num_speculative_tokens,
        scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens,
    )
