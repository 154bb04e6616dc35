# SPDX-License-Identifier: Apache-2.0
"""The NaN guard names the first attention layer with bad values, once, and is not there when it is off.

Run as a script, with a word and a folder, this file is the subprocess of its own tests.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import write_text_model

NAN, INF = float("nan"), float("inf")
LAYER = "model.layers.{}.self_attn.attn"


def run_self(word: str, folder: Path, **environ: str) -> str:
    """What this file prints, on either stream, as a script."""
    done = subprocess.run(
        [sys.executable, __file__, word, str(folder)],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


# ---- a real engine ----


def engine(folder: str) -> None:
    """Requests with sound weights, then with a NaN in the query bias of layer 2, and marks between them."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
    )
    prompts: Any = [{"prompt_token_ids": list(range(1, 2 + length))} for length in (1, 7, 20)]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params)
    print("=== poison", flush=True)
    llm.apply_model(poison)
    for _ in range(3):
        llm.generate(prompts, params)
    print("=== end", flush=True)


def poison(model: Any) -> None:
    model.model.layers[2].self_attn.qkv_proj.bias.data[5] = NAN


@pytest.fixture(scope="module")
def engine_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_self(
        "engine",
        write_text_model(tmp_path_factory.mktemp("model")),
        VLLM_NDT_NAN_GUARD="report",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )


def test_names_the_first_layer_and_tensor_once(engine_output: str) -> None:
    assert "=== end" in engine_output
    _, after = engine_output.split("=== poison")
    findings = [line for line in after.splitlines() if "first non-finite" in line]
    assert len(findings) == 1, f"expected one line about the poisoned layer, got {findings}"
    assert LAYER.format(2) in findings[0]
    assert "q (NaN)" in findings[0]
    assert "k, v clean" in findings[0]
    assert "ERROR" in findings[0]


def test_says_once_what_it_watches_and_nothing_on_a_clean_run(engine_output: str) -> None:
    before, _ = engine_output.split("=== poison")
    lines = [line for line in before.splitlines() if "NaN guard" in line]
    assert len(lines) == 1, lines
    assert "4 attention layers" in lines[0]


# ---- the operator under a forward context, with an attention kernel that writes what the test says ----


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The guard's messages."""
    import vllm.logger  # noqa: F401  (its configuration takes the handlers of loggers below "vllm" away)

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.ndt.nan_guard")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(level)


def findings(lines: list[str]) -> list[str]:
    return [line for line in lines if "first non-finite" in line]


class Model:
    """Attention layers behind the guarded operator."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.attention.attention import unified_attention_with_output
        from vllm_ndt.nan_guard import Guard

        self.operator = Guard().wrap(unified_attention_with_output)

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


def rows(heads: int, bad: dict[int, float] | None = None, count: int = 5) -> torch.Tensor:
    """(count, heads, 8) random values, a strided view of a wider tensor; `bad` puts a value into a row."""
    tensor = torch.randn(count, heads * 8 + 16)[:, : heads * 8].view(count, heads, 8)
    for row, value in (bad or {}).items():
        tensor[row, heads - 1, 3] = value
    return tensor


def test_clean_layers_give_no_line(lines: list[str]) -> None:
    model = Model()
    for layer in range(3):
        model.run(layer)
    assert len(lines) == 1, lines  # that the guard is on
    assert "watching" in lines[0]


@pytest.mark.parametrize(("tensor", "heads"), [("q", 4), ("k", 2), ("v", 2), ("out", 4)])
@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (INF, "Inf"), (-INF, "Inf")])
def test_each_tensor_and_kind_is_told_apart(lines: list[str], tensor: str, heads: int, value: float, kind: str) -> None:
    model = Model()
    model.run(0)
    model.run(1, **{tensor: rows(heads, {2: value})})
    name = "output" if tensor == "out" else tensor
    assert len(findings(lines)) == 1, lines
    assert f"layer {LAYER.format(1)}: {name} ({kind}); " in findings(lines)[0]
    assert ("attention kernel" in findings(lines)[0]) == (name == "output")


def test_first_layer_wins_and_later_ones_are_silent(lines: list[str]) -> None:
    model = Model()
    model.run(0)
    for layer in (1, 2, 0):
        model.run(layer, out=rows(4, {0: INF, 1: NAN}))
    assert len(findings(lines)) == 1, lines
    assert f"{LAYER.format(1)}: output (NaN, Inf); q, k, v clean" in findings(lines)[0]


@pytest.mark.parametrize("how", [{"slots": [7, 8, 9, -1, -1]}, {"slots": [7, 8, 9]}, {"starts": [0, 2, 3, 3]}])
def test_padding_rows_do_not_count(lines: list[str], how: dict[str, list[int]]) -> None:
    model = Model()
    bad = {3: NAN, 4: INF}
    model.run(q=rows(4, bad), k=rows(2, bad), v=rows(2, bad), out=rows(4, bad), **how)  # type: ignore[arg-type]
    assert findings(lines) == []
    model.run(out=rows(4, {2: NAN, 3: INF}), **how)  # type: ignore[arg-type]
    assert len(findings(lines)) == 1, lines
    assert "output (NaN);" in findings(lines)[0]


def test_dummy_and_profiling_batches_do_not_count(lines: list[str]) -> None:
    model = Model()
    model.run(out=rows(4, {0: NAN}), metadata=False)
    model.run(out=rows(4, {0: NAN}), slots=[-1] * 5)
    assert findings(lines) == []


def test_layers_that_are_not_decoders_count_by_query_start(lines: list[str]) -> None:
    model = Model()
    model.run(out=rows(4, {4: NAN}), slots=[-1] * 5, kind="encoder_only")
    assert len(findings(lines)) == 1, lines


def test_missing_keys_and_keys_of_other_rows_are_not_checked(lines: list[str]) -> None:
    model = Model()
    model.run(given=False)
    model.run(k=rows(2, {7: NAN}, count=9), v=rows(2, {7: NAN}, count=9), kind="encoder_decoder")
    assert findings(lines) == []
    model.run(given=False, out=rows(4, {1: NAN}))
    assert "output (NaN); q clean; k, v not checked: " in findings(lines)[0]


def test_types_without_nan_are_not_checked(lines: list[str]) -> None:
    model = Model()
    model.run(q=torch.full((5, 4, 8), 127, dtype=torch.uint8), out=torch.full((5, 4, 8), 255, dtype=torch.uint8))
    assert findings(lines) == []


# ---- without vLLM ----


def test_off_leaves_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ndt.nan_guard import guard_attention

    def function() -> None:
        raise AssertionError

    for value in (None, "", "off", "OFF"):
        monkeypatch.delenv("VLLM_NDT_NAN_GUARD", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_NDT_NAN_GUARD", value)
        assert guard_attention(function) is function
    monkeypatch.setenv("VLLM_NDT_NAN_GUARD", "report")
    assert guard_attention(function) is not function


def test_off_leaves_the_operator_upstreams_own() -> None:
    if os.environ.get("VLLM_NDT_NAN_GUARD", "off") != "off":
        pytest.skip("the guard is on in this environment")
    from vllm.model_executor.layers.attention import attention

    function: Any = attention.unified_attention_with_output
    while function is not None:
        assert "vllm_ndt" not in function.__code__.co_filename
        function = getattr(function, "__wrapped__", None)


def test_bad_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ndt.nan_guard import guard_attention
    from vllm_ndt.settings import SettingError

    monkeypatch.setenv("VLLM_NDT_NAN_GUARD", "yes")
    with pytest.raises(SettingError, match=r"VLLM_NDT_NAN_GUARD: expected off or report, found 'yes'"):
        guard_attention(test_bad_value_is_refused)


@pytest.mark.parametrize(
    ("flags", "checked", "text"),
    [
        (0b01000000, (True,) * 4, "output (NaN); q, k, v clean: they arose in the attention kernel"),
        (0b11000000, (True, False, False, True), "output (NaN, Inf); q clean; k, v not checked: they arose in"),
        (0b01000001, (True,) * 4, "q (NaN), output (NaN); k, v clean: the values were bad before"),
        (0b11101110, (True,) * 4, "q (Inf), k (NaN, Inf), v (Inf), output (NaN, Inf): the values were bad before"),
        (0b00000100, (True, True, True, False), "k (NaN); q, v clean; output not checked: the values were bad before"),
    ],
)
def test_flags_in_words(flags: int, checked: tuple[bool, ...], text: str) -> None:
    from vllm_ndt.nan_guard import describe

    assert describe(flags, checked).startswith(text)


# ---- the GPU's kernel, in Triton's interpreter ----


def kernel(_folder: str) -> None:
    """Compare the kernel with PyTorch on random cases and count them."""
    from vllm_ndt.nan_guard import _flags, _real
    from vllm_ndt.nan_kernel import FLAGS, check_rows

    torch.manual_seed(0)
    cases = 0
    for dtype, size, by_slot in ((torch.float16, 64, True), (torch.bfloat16, 80, False), (torch.float32, 192, True)):
        fused = torch.randn(6, 8 * size).to(dtype)
        tensors: list[torch.Tensor | None] = [
            fused[:, : 4 * size].view(6, 4, size),
            fused[:, 4 * size : 6 * size].view(6, 2, size),
            fused[:, 6 * size :].view(6, 2, size),
            torch.randn(6, 4, size + 16).to(dtype)[:, :, :size],  # unevenly spaced
        ]
        marks = torch.tensor([5, 6, 9, 2, -1, -1]) if by_slot else torch.tensor([0, 3, 4, 4], dtype=torch.int32)
        for place in (None, 0, 1, 2, 3):
            for row in (2, 5):
                if place is not None:
                    tensor = tensors[place]
                    assert tensor is not None
                    tensor[row, -1, -1], tensor[row, 0, 2] = (NAN, 1.0) if row == 2 else (-INF, INF)
                given = [None if place == 0 and index in (1, 2) else t for index, t in enumerate(tensors)]
                state, report = torch.zeros(2, dtype=torch.int32), torch.zeros(1 + FLAGS, dtype=torch.int32)
                check_rows(given, 6, marks, by_slot, state, report, 3)
                flags = _flags(given, _real(marks, by_slot, 6))
                assert report.tolist() == [3 if flags else 0, *(flags >> bit & 1 for bit in range(FLAGS))]
                assert state.tolist() == [3 if flags else 0, 0]
                cases += bool(flags)
        # Another layer found something: this launch adds nothing but the seal; then neither does that layer.
        for first, seal in (([2, 0], [2, 1]), ([3, 1], [3, 1])):
            state, report = torch.tensor(first, dtype=torch.int32), torch.zeros(1 + FLAGS, dtype=torch.int32)
            check_rows(tensors, 6, marks, by_slot, state, report, 3)
            assert (state.tolist(), report.sum().item()) == (seal, 0)
    print(f"{cases} cases with bad values")


def test_kernel_agrees_with_pytorch(tmp_path: Path) -> None:
    import triton  # noqa: F401  (in the closure; without it there would be nothing to test)

    assert "24 cases with bad values" in run_self("kernel", tmp_path, TRITON_INTERPRET="1")


if __name__ == "__main__":
    {"engine": engine, "kernel": kernel}[sys.argv[1]](sys.argv[2])
