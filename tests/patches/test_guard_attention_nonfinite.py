# SPDX-License-Identifier: Apache-2.0
"""Patch guard-attention-nonfinite: the check of a layer, around upstream's own operator, and its kernels.

What becomes of a finding is the matter of the patches that carry it on. Run as a script, this file compares the GPU's
kernels, in Triton's interpreter, with what PyTorch does elsewhere.
"""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NAN, INF = float("nan"), float("inf")
LAYER = "model.layers.{}.self_attn.attn"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> "Model":
    # decorated when it is imported, which must not be with this test's guard
    import vllm.model_executor.layers.attention  # noqa: F401

    try:
        from vllm_ndt import nan_guard
    except ImportError:
        return Model(None)
    guard = nan_guard.Guard("report")
    guard.watch([LAYER.format(at) for at in range(4)], [], torch.device("cpu"), 16, beside=False)
    monkeypatch.setattr(nan_guard, "process_guard", lambda: guard)
    return Model(guard)


class Model:
    """Attention layers behind the guarded operator, with an attention kernel that writes what the test says."""

    def __init__(self, guard: Any) -> None:
        from vllm.model_executor.layers.attention.attention import unified_attention_with_output

        self.guard = guard
        self.operator: Any = unified_attention_with_output
        if guard:
            from vllm_ndt.nan_guard import guard_attention

            self.operator = guard_attention(self.operator)

    def run(
        self,
        layer: int = 0,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        slots: list[int] | None = None,
        starts: list[int] | None = None,
        kind: str = "decoder",
        given: bool = True,
        metadata: bool = True,
    ) -> None:
        """One call for a layer; a tensor that is not given is sound, (5 rows, 4 or 2 heads, 8)."""
        from vllm.forward_context import ForwardContext, override_forward_context

        q = rows(4) if q is None else q
        if given:
            k, v = rows(2) if k is None else k, rows(2) if v is None else v
        result = rows(4) if out is None else out

        def forward(*args: Any, output: torch.Tensor, **kwargs: Any) -> None:
            output.copy_(result)

        name = LAYER.format(layer)
        at = SimpleNamespace(impl=SimpleNamespace(forward=forward), kv_cache=None, attn_type=kind)
        start = torch.tensor(starts if starts is not None else [0, len(q)], dtype=torch.int32)
        mapping = {} if starts is not None else {name: torch.tensor(slots if slots is not None else range(len(q)))}
        context = ForwardContext(
            no_compile_layers={name: at},
            attn_metadata={name: SimpleNamespace(query_start_loc=start) if metadata else None},
            slot_mapping=mapping,
        )
        with override_forward_context(context):
            self.operator(q, k, v, torch.empty_like(result), name, kv_cache_dummy_dep=None)

    def found(self) -> dict[int, str]:
        """What each row's first bad layer has, as in "1: output (NaN); q, k, v clean"."""
        if self.guard is None:
            return {}
        from vllm_ndt.nan_words import describe, parts

        result = {}
        for row, word in enumerate(self.guard.memory.words.tolist()):
            if word:
                number, flags = parts(word)
                index = self.guard.names[number].split(".")[2]
                result[row] = f"{index}: {describe(flags, self.guard.kinds[number], self.guard.checked[number])}"
        return result


def rows(heads: int, bad: dict[int, float] | None = None, count: int = 5) -> torch.Tensor:
    """(count, heads, 8) random values, a strided view of a wider tensor; `bad` puts a value into a row."""
    tensor = torch.randn(count, heads * 8 + 16)[:, : heads * 8].view(count, heads, 8)
    for row, value in (bad or {}).items():
        tensor[row, heads - 1, 3] = value
    return tensor


@pytest.mark.parametrize(("tensor", "heads"), [("q", 4), ("k", 2), ("v", 2), ("out", 4)])
@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (INF, "Inf"), (-INF, "Inf")])
def test_each_tensor_and_kind_is_told_apart(model: Model, tensor: str, heads: int, value: float, kind: str) -> None:
    model.run(0)
    assert model.found() == {}
    model.run(1, **{tensor: rows(heads, {2: value})})
    name = "output" if tensor == "out" else tensor
    clean = ", ".join(other for other in ("q", "k", "v", "output") if other != name)
    assert model.found() == {2: f"1: {name} ({kind}); {clean} clean"}


def test_each_row_keeps_its_first_layer(model: Model) -> None:
    model.run(0)
    model.run(1, out=rows(4, {0: INF, 1: NAN}))
    model.run(2, q=rows(4, {1: NAN, 3: NAN}), out=rows(4, {1: NAN, 3: INF}))
    first = "output ({}); q, k, v clean"
    assert model.found() == {
        0: "1: " + first.format("Inf"),
        1: "1: " + first.format("NaN"),
        3: "2: q (NaN), output (Inf); k, v clean",
    }


@pytest.mark.parametrize("how", [{"slots": [7, 8, 9, -1, -1]}, {"slots": [7, 8, 9]}, {"starts": [0, 2, 3, 3]}])
def test_padding_rows_do_not_count(model: Model, how: dict[str, list[int]]) -> None:
    bad = {3: NAN, 4: INF}
    model.run(q=rows(4, bad), k=rows(2, bad), v=rows(2, bad), out=rows(4, bad), **how)  # type: ignore[arg-type]
    assert model.found() == {}
    model.run(out=rows(4, {2: NAN, 3: INF}), **how)  # type: ignore[arg-type]
    assert model.found() == {2: "0: output (NaN); q, k, v clean"}


def test_dummy_and_profiling_batches_do_not_count(model: Model) -> None:
    model.run(out=rows(4, {0: NAN}), metadata=False)
    model.run(out=rows(4, {0: NAN}), slots=[-1] * 5)
    assert model.found() == {}
    model.run(out=rows(4, {0: NAN}))
    assert model.found()


def test_layers_that_are_not_decoders_count_by_query_start(model: Model) -> None:
    model.run(out=rows(4, {4: NAN}), slots=[-1] * 5, kind="encoder_only")
    assert list(model.found()) == [4]


def test_missing_keys_and_keys_of_other_rows_are_not_checked(model: Model) -> None:
    model.run(given=False)
    model.run(k=rows(2, {7: NAN}, count=9), v=rows(2, {7: NAN}, count=9), kind="encoder_decoder")
    assert model.found() == {}
    model.run(given=False, out=rows(4, {1: NAN}))
    assert model.found() == {1: "0: output (NaN); q clean; k, v not checked"}


def test_types_without_nan_are_not_checked(model: Model) -> None:
    model.run(q=torch.full((5, 4, 8), 127, dtype=torch.uint8), out=torch.full((5, 4, 8), 255, dtype=torch.uint8))
    assert model.found() == {}
    model.run(q=torch.full((5, 4, 8), 127, dtype=torch.uint8), out=rows(4, {0: NAN}))
    assert model.found() == {0: "0: output (NaN); k, v clean; q not checked"}


def test_a_drafters_layers_are_not_watched(model: Model) -> None:
    model.run(9, out=rows(4, {0: NAN}))
    assert model.found() == {}
    model.run(3, out=rows(4, {0: NAN}))
    assert model.found()


def test_the_largest_finite_magnitude_of_real_rows_is_kept(model: Model) -> None:
    loud = rows(4, {1: -300.0, 2: NAN, 4: 1e6})
    model.run(1, v=rows(2, {0: 200.0}), out=loud, slots=[1, 2, 3, 4, -1])
    assert model.guard is not None
    assert float(model.guard.memory.peaks.view(torch.float32)[1]) == 300.0


# ---- without a model ----


def test_off_leaves_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ndt.nan_guard import guard_attention, guard_mla, inject_before_cache, process_guard

    def function() -> None:
        raise AssertionError

    for value in (None, "", "off", "OFF", "report", "abort"):
        process_guard.cache_clear()
        monkeypatch.delenv("VLLM_NDT_NAN_GUARD", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_NDT_NAN_GUARD", value)
        on = value in ("report", "abort")
        assert (guard_attention(function) is not function) == on
        assert (guard_mla(function) is not function) == on
        assert inject_before_cache(function) is function
    process_guard.cache_clear()


def test_off_leaves_the_operator_upstreams_own() -> None:
    if os.environ.get("VLLM_NDT_NAN_GUARD", "off") != "off":
        pytest.skip("the guard is on in this environment")
    from vllm.model_executor.layers.attention import MLAAttention, attention

    for function in (
        attention.unified_attention_with_output,
        attention.unified_kv_cache_update,
        MLAAttention.forward_impl,
    ):
        inner: Any = function
        while inner is not None:
            assert "vllm_ndt" not in inner.__code__.co_filename
            inner = getattr(inner, "__wrapped__", None)


def test_latent_attention_is_watched_by_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm_ndt import nan_guard

    guard = nan_guard.Guard("report")
    guard.watch([LAYER.format(0)], [], torch.device("cpu"), 16, beside=False)
    monkeypatch.setattr(nan_guard, "process_guard", lambda: guard)

    def forward_impl(layer: Any, q: Any, kv_c: Any, k_pe: Any, cache: Any, metadata: Any, output: Any) -> None:
        output.fill_(0)

    layer = SimpleNamespace(layer_name=LAYER.format(0))
    context = ForwardContext(
        no_compile_layers={layer.layer_name: layer},
        attn_metadata={layer.layer_name: SimpleNamespace()},
        slot_mapping={layer.layer_name: torch.arange(5)},
    )
    latent = torch.zeros(5, 16)
    latent[3, 2] = INF
    with override_forward_context(context):
        guarded: Any = nan_guard.guard_mla(forward_impl)
        guarded(layer, rows(4), latent, torch.zeros(5, 1, 8), None, None, output=torch.empty(5, 32))
    found = Model(guard).found()
    assert found == {3: "0: kv_c (Inf); q, k_pe, output clean"}


# ---- the GPU's kernels, in Triton's interpreter ----


def compare_kernels() -> None:
    """Compare the kernels with PyTorch on random cases and count them."""
    from vllm_ndt.nan_guard import Memory, _check, _real
    from vllm_ndt.nan_kernel import FOUND, check_rows, collect, inject
    from vllm_ndt.nan_step import _collect
    from vllm_ndt.nan_words import parts, word

    torch.manual_seed(0)
    cases = 0
    for dtype, size, by_slot in ((torch.float16, 64, True), (torch.bfloat16, 80, False), (torch.float32, 192, True)):
        marks = torch.tensor([5, 6, 9, 2, -1, -1]) if by_slot else torch.tensor([0, 3, 4, 4], dtype=torch.int32)
        for place, amount in itertools.product((None, 0, 1, 2, 3), (1, 3)):
            layers = [tensors(size, dtype) for _ in range(amount)]
            for row in (2, 5):
                if place is not None:
                    bad = layers[-1][place]
                    assert bad is not None
                    bad[row, -1, -1], bad[row, 0, 2] = (NAN, 1.0) if row == 2 else (-INF, INF)
            if place == 0:
                layers = [[layer[0], None, None, layer[3]] for layer in layers]
            memory, expected = (Memory(torch.device("cpu"), 8, 20) for _ in range(2))
            for number, layer in enumerate(layers, 12):
                check_rows(layer, number, 6, marks, by_slot, memory.words, memory.peaks)
                _check(layer, number, _real(marks, by_slot, 6), expected)
            assert torch.equal(memory.words, expected.words)
            assert torch.equal(memory.peaks, expected.peaks)
            cases += bool(memory.words.any())

    # in a large batch: an input that the kernel hides is found in its turn, and any where the output shows it
    for dtype in (torch.float32, torch.bfloat16):
        memory = Memory(torch.device("cpu"), 64, 20)
        layer = [torch.randn(33, 2, 80, dtype=dtype) for _ in range(4)]
        q, _, _, output = layer
        assert q is not None
        assert output is not None
        q[13], q[12], q[20], output[20] = NAN, NAN, NAN, NAN
        # one value of an output in one piece of four: in row 4 and layer 3 the fourth, eighth, ... piece of 64 bytes
        piece = 64 // dtype.itemsize
        output.view(33, 160)[4, 3 * piece], output.view(33, 160)[5, 3 * piece] = INF, INF
        check_rows(layer, 3, 33, torch.arange(33), True, memory.words, memory.peaks, full=False)
        assert {row: parts(value) for row, value in enumerate(memory.words.tolist()) if value} == {
            4: (3, 0b10000000),
            13: (3, 0b1),
            20: (3, 0b1000001),
        }
    # and of each piece of a row, one row in four
    for at in range(0, 160, 7):
        memory = Memory(torch.device("cpu"), 64, 20)
        layer = [torch.zeros(8, 2, 80) for _ in range(4)]
        output = layer[3]
        assert output is not None
        output.view(8, 160)[:, at] = NAN
        check_rows(layer, 3, 8, torch.arange(8), True, memory.words, memory.peaks, full=False)
        assert memory.words.count_nonzero() == 2, at

    for lengths, drafts in itertools.product(([1], [1, 1, 1], [3000, 1, 17]), (0, 2)):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        logit_starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * (1 + drafts)
        words = torch.zeros(4096, dtype=torch.int32)
        words[starts[1] - 1] = word(4, 0b1000)
        if lengths[0] > 1:
            words[2010], words[2500] = word(2, 0b1000000), word(2, 0b100)
        logits = torch.randn(int(logit_starts[-1]), 9001)
        logits[-1, 9000], logits[0, 5000], logits[0, 1] = NAN, INF, -INF
        found = torch.zeros(len(lengths), FOUND, dtype=torch.int32)
        own = words.clone()
        collect(own, starts, len(lengths), logits, logit_starts, found)
        wanted = _collect(words, starts, len(lengths), logits, logit_starts)
        flags = [0] * len(lengths)
        for at, row in enumerate(found[:, 2:].tolist()):
            for value in row:
                flags[at] |= value
        assert torch.equal(found[:, :2], wanted[:, :2])
        assert flags == wanted[:, 2].tolist()
        assert not own.any()
        cases += 1

    armed, tensor = torch.zeros(1, dtype=torch.int32), torch.ones(4, 2, 3)
    inject(tensor, 2, NAN, armed)
    assert tensor.isfinite().all()
    inject(tensor, 2, NAN, armed + 1)
    assert tensor.isnan().nonzero().tolist() == [[2, 0, 0]]
    print(f"{cases} cases with bad values")


def tensors(size: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """q, k, v as views of one tensor, and an output that is unevenly spaced; six rows."""
    fused = torch.randn(6, 8 * size).to(dtype)
    return [
        fused[:, : 4 * size].view(6, 4, size),
        fused[:, 4 * size : 6 * size].view(6, 2, size),
        fused[:, 6 * size :].view(6, 2, size),
        torch.randn(6, 4, size + 16).to(dtype)[:, :, :size],
    ]


def test_kernels_agree_with_pytorch() -> None:
    import triton  # noqa: F401  (in the closure; without it there would be nothing to test)

    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "30 cases with bad values" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    compare_kernels()


class TestNorms:
    """A layer norm's hook, beside an attention layer's slot mapping of five rows."""

    def look(self, output: torch.Tensor, inside: bool = True) -> list[int]:
        """Which rows have a finding after a norm gave `output`, within a forward pass or outside of one."""
        from vllm.forward_context import ForwardContext, override_forward_context
        from vllm_ndt.nan_guard import Guard
        from vllm_ndt.nan_step import _norm_hook

        guard = Guard("report")
        guard.watch([LAYER.format(0)], ["norm"], torch.device("cpu"), 16, beside=False)
        name = LAYER.format(0)
        context = ForwardContext(
            no_compile_layers={name: SimpleNamespace(attn_type="decoder")},
            attn_metadata={name: SimpleNamespace(query_start_loc=torch.tensor([0, 5]))},
            slot_mapping={name: torch.arange(5)},
        )
        with override_forward_context(context if inside else None):
            _norm_hook(guard, "norm")(None, (output,), output)
        assert guard.memory is not None
        return guard.memory.words.nonzero().flatten().tolist()

    def test_each_row_is_its_tokens(self) -> None:
        pytest.importorskip("vllm_ndt")
        output = torch.zeros(5, 8)
        output[2, 3] = NAN
        assert self.look(output) == [2]

    def test_a_norm_over_heads_has_other_rows_and_is_left_out(self) -> None:
        pytest.importorskip("vllm_ndt")
        output = torch.zeros(5 * 2, 8)
        output[2, 3] = NAN
        assert self.look(output) == []

    def test_an_encoders_norm_runs_outside_of_a_forward_pass(self) -> None:
        pytest.importorskip("vllm_ndt")
        output = torch.full((5, 8), NAN)
        assert self.look(output, inside=False) == []


def test_the_layer_of_a_fault_is_known_before_it_runs() -> None:
    pytest.importorskip("vllm_ndt")
    from vllm_ndt.nan_guard import Guard

    guard = Guard("report")
    guard.watch([LAYER.format(3)], [], torch.device("cpu"), 16, beside=False)
    assert guard.names == [""]
    assert (guard.watches_number(3), guard.watches_number(4)) == (True, False)
