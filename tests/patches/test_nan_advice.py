# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ndt nan-check` makes of runs: recorded outcomes and the rows of the decision table that must apply."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from vllm_ndt import nan_advice, nan_check
from vllm_ndt.nan_advice import Advice, Case, Finding, Run

LENGTHS = (1, 2, 3, 5, 7, 13, 16, 29, 1000, 1008)
FIRST, LATER = "model.layers.0.self_attn.attn", "model.layers.9.self_attn.attn"


def kernel(layer: str = FIRST, token: int = 0) -> Finding:
    return Finding(layer, layer == FIRST, {"output": "NaN"}, 0, token, nan_advice.KERNEL, "")


def inputs(layer: str = LATER) -> Finding:
    origin = nan_advice.EMBEDDINGS if layer == FIRST else nan_advice.INPUTS
    return Finding(layer, layer == FIRST, {"q": "Inf", "output": "NaN"}, 0, 0, origin, "")


ENCODER = Finding(FIRST, True, {"q": "NaN"}, 0, 0, nan_advice.ENCODER, "")
LOGITS = Finding("", False, {}, 0, 0, nan_advice.LOGITS, "")


def outcome(
    found: Callable[[int], Finding | None] = lambda _: None,
    image: Finding | None = None,
    dtype: str = "float16",
    peak: float = 10.0,
    **changes: Any,
) -> Run:
    """A run whose text prompts have what `found` says of their length, and an image prompt of 51 tokens."""
    cases = [Case(f"{n} tokens", 1, n, False, found(n), "NaN" if found(n) else "", (n % 9, 1, 2), 0) for n in LENGTHS]
    cases.append(Case("image", 1, 51, True, image, "", (7, 8), 0))
    run = Run("cuda", dtype, ("FLASH_ATTN",), "awq", (FIRST, LATER), {FIRST: peak, LATER: peak}, tuple(cases))
    return dataclasses.replace(run, **changes)


def first_where(length: Callable[[int], bool], finding: Finding) -> Callable[[int], Finding | None]:
    return lambda n: finding if length(n) else None


ALL_KERNEL = outcome(first_where(lambda n: True, kernel()))
ALL_INPUTS = outcome(first_where(lambda n: True, inputs()))
LONG = outcome(first_where(lambda n: n > 500, inputs()))
CLEAN, FLOAT32 = outcome(), outcome(dtype="float32")
SHORT = first_where(lambda n: n < 50, inputs())
# of the kernels pinned for sm_70: tails are wrong, and decoding goes through all lengths
SM_70 = outcome(lambda n: kernel(token=1 if n % 16 == 0 else 0))


def nan_in_answer() -> Run:
    return dataclasses.replace(CLEAN, cases=tuple(dataclasses.replace(case, bad_logprobs=3) for case in CLEAN.cases))


def other_tokens() -> Run:
    first, *rest = CLEAN.cases
    return dataclasses.replace(CLEAN, cases=(dataclasses.replace(first, output=(5, 5, 5)), *rest))


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({"baseline": CLEAN, "again": CLEAN, "graphs": CLEAN, "plain": CLEAN, "float32": FLOAT32}, []),
        # the article's table
        (
            {"baseline": ALL_KERNEL},
            [("in the first attention layer, whose inputs are clean", "custom attention kernel")],
        ),
        (
            {"baseline": LONG},
            [
                ("already bad, it came before the attention of model.layers.9", "not the attention kernel"),
                ("on long prompts only (from 1000 tokens, clean up to 29)", "float16 is not stable"),
            ],
        ),
        (
            {"baseline": LONG, "float32": FLOAT32},
            [
                ("gone in float32", "precision: float16 overflows"),
                ("already bad", "not the attention kernel"),
                ("on long prompts only", "float16 is not stable, confirmed by float32"),
            ],
        ),
        (
            {"baseline": LONG, "float32": dataclasses.replace(LONG, dtype="float32")},
            [
                ("stays in float32", "not precision"),
                ("already bad", "not the attention kernel"),
                ("on long prompts only", "not precision"),
            ],
        ),
        ({"baseline": nan_in_answer()}, [("NaN in the answer, but in no activation and no logits", "sampling")]),
        ({"baseline": CLEAN, "graphs": ALL_KERNEL}, [("only with CUDA graphs", "a known problem on V100")]),
        (
            {"baseline": ALL_INPUTS, "reference": CLEAN},
            [("gone without quantisation", "the quantised weights or their kernels (awq)"), ("already bad", "not the")],
        ),
        (
            {"baseline": ALL_KERNEL, "reference": ALL_KERNEL},
            [("stays without quantisation", "the attention kernel"), ("in the first attention layer", "custom")],
        ),
        # and more
        (
            {"baseline": ALL_INPUTS, "reference": ALL_INPUTS},
            [("stays without quantisation, and came before", "the model itself in this dtype"), ("already bad", "not")],
        ),
        (
            {"baseline": ALL_KERNEL, "plain": CLEAN},
            [("gone with plain attention", "the attention kernel (FLASH_ATTN)"), ("in the first", "custom")],
        ),
        ({"baseline": ALL_KERNEL, "plain": ALL_KERNEL}, [("stays with plain attention", "not the attention kernel")]),
        (
            {"baseline": ALL_KERNEL, "float32": FLOAT32},
            [("gone in float32", "or the attention kernel"), ("in the first attention layer", "custom")],
        ),
        ({"baseline": CLEAN, "again": other_tokens()}, [("gave another answer (1 tokens)", "a race")]),
        (
            {"baseline": outcome(first_where(lambda n: n == 16, kernel(LATER, token=3)))},
            [("in the attention of a later layer", "its KV cache")],
        ),
        (
            {"baseline": outcome(first_where(lambda n: n == 7, inputs(FIRST)))},
            [("the first attention layer's inputs are already bad (7 tokens)", "came before this layer's attention")],
        ),
        (
            {"baseline": outcome(first_where(lambda n: n == 7, LOGITS))},
            [("in the logits, and in no attention layer", "what follows the last attention")],
        ),
        (
            {"baseline": outcome(SHORT)},
            [
                ("already bad", "not the attention kernel"),
                ("on short prompts only (up to 29 tokens, clean from 1000)", "it came before this layer's attention"),
            ],
        ),
        (
            {"baseline": outcome(image=ENCODER), "float32": FLOAT32},
            [
                ("gone in float32", "precision: float16 overflows"),
                ("from the encoder (image)", "the attention kernels are innocent"),
            ],
        ),
        (
            {"baseline": SM_70},
            [
                ("in the first attention layer", "custom"),
                ("no multiple of 16 (1 tokens, 2 tokens, 3 tokens and 5 more)", "part-filled tile"),
            ],
        ),
        (
            {"baseline": outcome(peak=6e3), "plain": outcome(peak=10.0)},
            [("more than 10 times as large as with plain attention", "wrong finite values")],
        ),
        ({"baseline": outcome(peak=5e4)}, [("values of 5e+04", "an overflow that builds up")]),
        ({"baseline": outcome(peak=5e4, dtype="bfloat16")}, []),
    ],
)
def test_rows_that_apply(runs: Mapping[str, Run], expected: list[tuple[str, str]]) -> None:
    found = nan_advice.advise(runs)
    assert len(found) == len(expected), found
    for advice, (symptom, likely) in zip(found, expected, strict=True):
        assert symptom in advice.symptom
        assert likely in advice.likely


def test_short_prompts_with_bad_inputs_do_not_blame_the_kernel() -> None:
    found: list[Advice] = nan_advice.advise({"baseline": outcome(SHORT)})
    assert not any("the attention kernel" in advice.likely.replace("not the attention kernel", "") for advice in found)


def test_float32_after_plain_attention_failed_is_precision_for_sure() -> None:
    found = nan_advice.advise({"baseline": ALL_KERNEL, "plain": ALL_KERNEL, "float32": FLOAT32})
    assert [advice.likely for advice in found if advice.symptom == "gone in float32"] == [
        "precision: float16 overflows"
    ]


@pytest.mark.parametrize("run", [SM_70, LONG, outcome(image=ENCODER, untested=("video inputs",))])
def test_a_run_survives_json(run: Run) -> None:
    assert nan_advice.run_from(json.loads(json.dumps(dataclasses.asdict(run)))) == run


@pytest.mark.parametrize("bad", [0, 2])
def test_repeated_tokens_are_no_verdict_and_bad_logprobs_are(bad: int) -> None:
    case = Case("1 token", 1, 1, False, None, "", (0, 0, 0), bad)
    notes = ["2 of 3 logprobs are NaN"] * (bad > 0) + ["token 0 in all 3 positions"]
    assert case.notes == notes
    report = nan_check.Report(
        nan_check.Options("m"), (nan_check.Attempt("baseline", dataclasses.replace(CLEAN, cases=(case,))),)
    )
    assert report.status == (nan_check.FOUND if bad else nan_check.CLEAN)
    assert f"clean; note: {', '.join(notes)}" in report.text(200)


def test_a_run_that_does_not_repeat_is_no_clean_check() -> None:
    attempts = (nan_check.Attempt("baseline", CLEAN), nan_check.Attempt("again", other_tokens()))
    report = nan_check.Report(nan_check.Options("m", matrix=True), attempts)
    assert report.status == nan_check.FOUND
    assert "a race" in report.text(80)


# ---- its own prompts ----


@pytest.mark.parametrize(
    ("room", "lengths", "missing"),
    [
        (8184, [1, 2, 3, 5, 7, 13, 16, 29, 1000, 1008], []),
        (1000, [1, 2, 3, 5, 7, 13, 16, 29, 992, 1000], []),
        (504, [1, 2, 3, 5, 7, 13, 16, 29, 496], ["prompts of 1000 tokens: the engine takes 504"]),
        (13, [1, 2, 3, 5, 7, 13], ["prompts of 16, 29, 1000 tokens: the engine takes 13"]),
        (0, [], ["prompts of 1, 2, 3, 5, 7, 13, 16, 29, 1000 tokens: the engine takes 0"]),
    ],
)
def test_lengths_by_room(room: int, lengths: list[int], missing: list[str]) -> None:
    assert nan_check.own_lengths(room) == (lengths, missing)


def test_token_ids_are_usable_vary_and_repeat() -> None:
    usable = [3, 5, *range(10, 260)]
    prompts = {length: nan_check.token_ids(length, usable) for length in LENGTHS}
    assert prompts == {length: nan_check.token_ids(length, usable) for length in LENGTHS}
    assert all(len(ids) == length and set(ids) <= set(usable) for length, ids in prompts.items())
    assert len({ids[0] for ids in prompts.values()}) == len(LENGTHS)
    assert len(set(prompts[1000])) > 100


def test_batches_take_prompts_from_all_over() -> None:
    assert nan_check.spread(range(11), 3) == [0, 5, 10]
    assert nan_check.spread(range(11), 9) == [0, 1, 2, 3, 5, 6, 7, 8, 10]
    assert nan_check.spread(range(2), 5) == [0, 1, 0, 1, 0]
