# SPDX-License-Identifier: Apache-2.0
"""Patch carry-nonfinite-with-output: a real engine names what was put into it, to the layer, tensor and request."""

from pathlib import Path
from typing import Any

import pytest
from nan_engine import KINDS, LAYERS, TENSORS, outcome
from tiny_models import write_text_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcome("names", write_text_model(tmp_path_factory.mktemp("model")), "report")


def test_an_injected_fault_is_named_exactly(found: Any) -> None:
    assert len(found["faults"]) == LAYERS * len(TENSORS) * len(KINDS) * 2
    for layer, tensor, kind, prefill, request, lines in found["faults"]:
        which = f"{layer}, {tensor}, {kind}, {'prefill' if prefill else 'decode'}: {lines}"
        assert len(lines) == 1, which
        line = lines[0]
        row = 2 if prefill else 0
        assert f"in layer model.layers.{layer}.self_attn.attn, row {row} of its rows in this step: " in line, which
        bad, _, clean = line.split("in this step: ")[1].partition(" clean: ")
        assert f"{tensor} ({kind})" in bad, which
        assert not any(f"{other} (" in bad for other in TENSORS if other not in (tensor, "output")), which
        assert ("in its attention kernel, or from its KV cache" in clean) == (tensor == "output"), which
        assert ("before this layer's attention" in clean) == (tensor != "output"), which
        # what it spoils later in the same prefill is a row of the same request; nobody else is named
        assert request in line, which
        assert " more:" not in line, which


def test_a_thousand_clean_prompts_raise_no_alarm(found: Any) -> None:
    assert found["served"] == 1000
    assert found["start"] == ["NaN guard: report, watching 4 attention layers and the logits."]
    assert found["clean"] == []


def test_nan_behind_the_last_attention_is_found_in_the_logits(found: Any) -> None:
    assert len(found["logits"]) == 1, found["logits"]
    assert "and 2 more: NaN in the logits, and in no attention layer" in found["logits"][0]


def test_a_model_that_pools_is_looked_at_behind_its_last_attention_too(tmp_path: Path) -> None:
    found = outcome("pooled", write_text_model(tmp_path), "report")
    assert found["clean"] == []
    assert len(found["bad"]) == 1, found["bad"]
    assert "and 2 more: NaN in what is pooled, and in no attention layer" in found["bad"][0]


def test_logits_with_tokens_ruled_out_are_no_finding() -> None:
    """Models rule tokens out with -Inf; NaN and Inf among them are found, in the rows of their request alone."""
    import torch
    from vllm_ndt.nan_step import _collect

    logits = torch.randn(4, 50)
    logits[:, 7] = -torch.inf
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    # the second request has two positions, as with a draft
    positions = torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    words = torch.zeros(8, dtype=torch.int32)
    assert not _collect(words, starts, 3, logits, positions).any()
    logits[2, 9], logits[3, 0] = torch.inf, torch.nan
    assert _collect(words, starts, 3, logits, positions)[:, 2].tolist() == [0, 2, 1]


class TestWarmUp:
    """Upstream's V2 runner warms up with requests that nobody sent."""

    def steps(self, v2: bool) -> Any:
        from types import SimpleNamespace

        import torch
        from vllm_ndt.nan_guard import Guard
        from vllm_ndt.nan_step import _Steps
        from vllm_ndt.settings import Injection

        guard = Guard("report", Injection(0, "v", 1, 0, float("nan")))
        guard.watch(["model.layers.0.self_attn.attn"], [], torch.device("cpu"), 16, beside=False)
        runner = SimpleNamespace(
            device=torch.device("cpu"),
            speculative_config=None,
            vllm_config=SimpleNamespace(use_v2_model_runner=v2),
            kv_cache_config=SimpleNamespace(num_blocks=7),
        )
        return _Steps(guard, runner, 4)

    def test_a_fault_waits_until_it_is_over(self) -> None:
        pytest.importorskip("vllm_ndt")
        steps = self.steps(v2=True)
        armed = steps.guard.memory.armed
        steps.start(5)
        assert not armed.any()
        steps.restart()
        steps.start(5)
        assert armed.any()
        other = self.steps(v2=False)
        other.start(5)
        assert other.guard.memory.armed.any()

    def test_what_it_left_bad_is_zeroed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nan_step = pytest.importorskip("vllm_ndt.nan_step")
        zeroed: list[int] = []
        monkeypatch.setattr(nan_step, "zero_blocks", lambda _runner, blocks: zeroed.extend(blocks))
        steps = self.steps(v2=True)
        steps.start(5)
        steps.restart()
        assert zeroed == []
        steps = self.steps(v2=True)
        steps.start(5)
        steps.guard.memory.words[3] = 1
        steps.restart()
        assert zeroed == list(range(7))
