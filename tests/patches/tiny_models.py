# SPDX-License-Identifier: Apache-2.0
"""Tiny models for tests: configuration, tokenizer and processor files, no weights (use load_format="dummy").

A model folder holds all that upstream reads before weights, so that its real configuration, processors and
scheduler can be built on any machine. Nothing is fetched.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

SPECIALS = (
    "<|end|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# byte-level BPE without merges (256 tokens), the specials, and room up to a round number
VOCAB_SIZE = 272
# 2,097,152 pixels / (16 x 2)^2 pixels an embedding = 2,048; an image of 1472 x 1408 gives 2,024
LONGEST_EDGE = 2_097_152
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def token_id(special: str) -> int:
    """The token id of one of SPECIALS."""
    return 256 + SPECIALS.index(special)


def write_text_model(folder: Path) -> Path:
    """A dense Qwen2 with four layers; returns `folder`."""
    _write_tokenizer(folder, "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "eos_token_id": token_id("<|end|>"),
        "dtype": "bfloat16",
    }
    return _write(folder, "config.json", config)


def write_hybrid_vision_model(folder: Path) -> Path:
    """A Qwen3.5 with vision, linear and full attention (3:1), images and videos; returns `folder`.

    On a CPU its linear attention needs bfloat16 and AMX; configuration, processors and scheduler do not.
    """
    content = (
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{% if c['type'] in ('image', 'image_url') %}" + IMAGE + "{% elif c['type'] == 'text' %}{{ c['text'] }}"
        "{% endif %}{% endfor %}{% endif %}"
    )
    _write_tokenizer(folder, "{% for m in messages %}" + content + "\n{% endfor %}")
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        # the CPU kernel refuses heads of 32
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 65_536,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "eos_token_id": token_id("<|end|>"),
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "out_hidden_size": 128,
        "num_position_embeddings": 2304,
    }
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "dtype": "bfloat16",
    }
    pixels = {
        "size": {"shortest_edge": 4096, "longest_edge": LONGEST_EDGE},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    _write(folder, "preprocessor_config.json", pixels | {"image_processor_type": "Qwen2VLImageProcessor"})
    _write(folder, "video_preprocessor_config.json", pixels | {"video_processor_type": "Qwen3VLVideoProcessor"})
    return _write(folder, "config.json", config)


def write_dense_vision_model(folder: Path) -> Path:
    """The same as a dense Qwen3-VL, which any CPU serves; its embeddings carry three more vectors (deepstack)."""
    write_hybrid_vision_model(folder)
    config = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in config["text_config"].items() if not name.startswith("linear_")}
    del text["layer_types"]
    config |= {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    config["text_config"] = text | {"model_type": "qwen3_vl_text"}
    config["vision_config"] |= {"model_type": "qwen3_vl", "depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
    return _write(folder, "config.json", config)


def write_encoder_decoder_model(folder: Path) -> Path:
    """A Whisper with one layer on each side; returns `folder`."""
    _write_tokenizer(folder, "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": VOCAB_SIZE,
        "num_mel_bins": 80,
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "pad_token_id": token_id("<|end|>"),
        "bos_token_id": token_id("<|end|>"),
        "eos_token_id": token_id("<|end|>"),
        "decoder_start_token_id": token_id("<|im_start|>"),
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "dtype": "bfloat16",
    }
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": 80,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
    }
    _write(folder, "preprocessor_config.json", sound)
    return _write(folder, "config.json", config)


def engine_config(folder: Path, **overrides: Any) -> Any:
    """The real VllmConfig for a model folder: 4,096 tokens a step, 8 requests, eager; `overrides` go to EngineArgs."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "enforce_eager": True,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    # Upstream looks at a model class in a new interpreter, which takes as long as importing vllm once more.
    with mock.patch.object(registry, "_run_in_subprocess", lambda look: look()):
        return EngineArgs(model=str(folder), **(arguments | overrides)).create_engine_config()


def scheduler(config: Any, block_size: int = 16, blocks: int = 1000, scheduler_class: Any = None) -> Any:
    """Upstream's real Scheduler (or `scheduler_class`) over one group of full attention with `blocks` KV blocks."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return (scheduler_class or Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )


def _write_tokenizer(folder: Path, chat_template: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[0], pad_token=SPECIALS[0])
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def _write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps(content, indent=1))
    return folder
