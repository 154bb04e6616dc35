# SPDX-License-Identifier: Apache-2.0
"""Patch abort-nonfinite-requests: a hit request ends with an error, and nobody else notices, then or later."""

from types import SimpleNamespace
from typing import Any

import pytest
from loads import Engine, Prompt, make_config, make_request, make_scheduler, parse
from nan_engine import outcome
from tiny_models import write_hybrid_vision_model, write_text_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcome("abort", write_text_model(tmp_path_factory.mktemp("model")), "abort")


def test_exactly_the_hit_request_ends_and_others_are_as_without_it(found: Any) -> None:
    clean = found["clean"]
    assert {reason for _, reason in clean} == {"length"}
    assert len(found["faults"]) == 8
    for layer, tensor, prefill, hit, *_ in found["faults"]:
        which = f"{layer}, {tensor}, {'prefill' if prefill else 'decode'}: {hit}"
        assert [reason for _, reason in hit] == ["length", "error", "length"], which
        assert [hit[0], hit[2]] == [clean[0], clean[2]], which
        # no token of the step that went bad leaves
        assert hit[1][0] == clean[1][0][: 0 if prefill else 1], which


def test_later_requests_are_as_in_a_clean_run(found: Any) -> None:
    """With the same prefix and with others, until each block of the pool was used again; the pool holds no NaN then."""
    for layer, tensor, prefill, hit, later, reused, finite, lines in found["faults"]:
        which = f"{layer}, {tensor}, {'prefill' if prefill else 'decode'}: {hit}"
        # a run without an error has nothing to clean
        assert hit[1][1] == "error", which
        assert later, which
        assert reused, which
        assert finite, which
        assert lines == 1, which


# ---- the scheduler alone, told what a step found ----


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return make_config(write_hybrid_vision_model(tmp_path_factory.mktemp("vision")))


class Steps:
    """Upstream's scheduler in mode abort, stepped by hand."""

    def __init__(self, config: Any, engine: Engine) -> None:
        self.scheduler = make_scheduler(config, engine)
        self.ended: dict[str, str] = {}

    def add(self, name: str, words: str, tokens: int = 20) -> None:
        self.scheduler.add_request(make_request(self.scheduler, Prompt(name, parse(words.split()), tokens)))

    def step(self, *hit: str) -> Any:
        """One step, in which these requests are hit; gives what was scheduled."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm_ndt.nan_step import Findings

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        decodes = [not self.scheduler.requests[name].is_prefill_chunk for name in names]
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7] if last else [] for last in decodes],
            ndt_nonfinite=Findings(1, dict.fromkeys(hit, "layer")) if hit else None,
        )
        for outputs in self.scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
                    assert not one.new_token_ids or one.request_id not in hit
        return output

    def blocks(self, name: str) -> set[int]:
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return {block.block_id for manager in managers for block in manager.req_to_blocks[name] if not block.is_null}


@pytest.fixture
def steps(config: Any, monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setenv("VLLM_NDT_NAN_GUARD", "abort")
    # 40 blocks of 16 tokens, one of them upstream's null block
    return Steps(config, Engine(block=16, hybrid=False, cache=4096, budget=4096, blocks=41))


def test_its_blocks_are_no_prefix_and_are_zeroed_before_they_are_used_again(steps: Steps) -> None:
    steps.add("bad", "t313")
    steps.step()
    dirty = steps.blocks("bad")
    assert len(dirty) == 20
    steps.step("bad")
    assert steps.ended == {"bad": "error"}
    steps.add("again", "t313")
    again = steps.step()
    assert again.num_scheduled_tokens == {"again": 313}
    # upstream hands out blocks that nobody can hit first
    assert again.ndt_block_ids_to_zero == sorted(dirty)
    assert steps.blocks("again") == dirty
    # once each: they are somebody's now
    steps.add("more", "i:b(1) t199")
    assert not steps.step().ndt_block_ids_to_zero


def test_a_copy_that_a_later_step_makes_of_a_bad_block_is_zeroed_too(steps: Steps) -> None:
    """As upstream makes them of a recurrent state that stays in the prefix cache while its request goes on."""
    from vllm_ndt.nan_step import Findings

    steps.add("bad", "t313")
    first = steps.scheduler.schedule()
    bad = min(steps.blocks("bad"))
    free = steps.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    copy = next(block.block_id for block in free)
    later = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={}, kv_cache_block_copies=[(bad, copy)])
    steps.scheduler.nonfinite.end_schedule(later)
    steps.scheduler.nonfinite.take(first, SimpleNamespace(ndt_nonfinite=Findings(1, {"bad": "layer"})))
    assert copy in steps.scheduler.nonfinite._dirty


def test_a_shared_block_is_zeroed_when_its_last_holder_has_gone(steps: Steps) -> None:
    steps.add("good", "t160")
    steps.step()
    steps.add("bad", "t160 t40")
    steps.step()
    shared = steps.blocks("good") & steps.blocks("bad")
    assert len(shared) == 10
    steps.step("bad")
    assert steps.ended == {"bad": "error"}
    steps.add("other", "t11 t300")
    while "other" not in steps.ended:
        output = steps.step()
        zeroed = set(output.ndt_block_ids_to_zero or ())
        assert "good" in steps.ended or not zeroed & steps.blocks("good")
    steps.add("last", "t13 t600", 1)
    last = steps.step()
    assert shared <= set(last.ndt_block_ids_to_zero or ())


def test_its_items_are_encoded_again(steps: Steps) -> None:
    steps.add("bad", "t9 i:a(100) t9")
    assert steps.step().scheduled_encoder_inputs == {"bad": [0]}
    steps.step("bad")
    steps.add("again", "t9 i:a(100) t9")
    again = steps.step()
    assert again.free_encoder_mm_hashes == ["a"]
    assert again.scheduled_encoder_inputs == {"again": [0]}


def test_an_item_that_another_needs_stays_for_that_one_alone(steps: Steps) -> None:
    steps.scheduler.max_num_scheduled_tokens = 60
    steps.add("good", "t9 i:a(100) t9")
    assert steps.step().scheduled_encoder_inputs == {"good": [0]}
    steps.add("bad", "t30 i:a(100) t9")
    steps.step()
    steps.step("bad")
    steps.add("again", "t20 i:a(100) t9")
    runs = []
    while not {"good", "again"} <= set(steps.ended):
        output = steps.step()
        # nobody's item is dropped that is still needed
        held = {name for name in ("good", "again") if name in steps.scheduler.requests}
        runs += [name for name in output.scheduled_encoder_inputs if name in held]
        assert len(runs) < 5
    assert runs == ["again"]
    assert steps.ended == {"bad": "error", "good": "length", "again": "length"}
    manager = steps.scheduler.encoder_cache_manager
    assert manager.num_freeable_slots == manager.cache_size
