# SPDX-License-Identifier: Apache-2.0
"""What the NaN guard says in the log: which layer, which tensor, where it came from, which step and request.

One line for each place in the model where values went bad first. The same again, and what a request that was hit goes
on to find in its own KV cache, is counted in the metrics, not logged.
"""

import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_ndt.nan_guard import NORM, layer_index
from vllm_ndt.nan_words import bad_inputs, describe, kinds_of

if TYPE_CHECKING:
    from vllm_ndt.nan_guard import Guard
    from vllm_ndt.nan_step import Hit
    from vllm_ndt.settings import Injection

# vLLM sets up the logger "vllm" and what is below it; a name of our own would log nothing
logger = init_logger("vllm.ndt.nan_guard")

# how many requests that were hit are remembered
REMEMBERED = 10_000


class Reporter:
    """One worker's log lines."""

    def __init__(self, guard: "Guard") -> None:
        self._guard = guard
        self._said: set[tuple[int, int]] = set()
        self._hit: OrderedDict[str, None] = OrderedDict()

    def say_watching(self, layers: int, norms: int, others: Sequence[str]) -> None:
        """At start: that the guard is on, what it watches, and which layers with a cache or state it does not."""
        more = f" and {norms} norms" if norms else ""
        logger.info("NaN guard: %s, watching %d attention layers%s and the logits.", self._guard.mode, layers, more)
        if others:
            named = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            logger.info("NaN guard: %d layers with a cache or state of their own are not watched: %s.", len(others), named)  # noqa: E501  # fmt: skip

    def say_injected(self, fault: "Injection", tokens: int) -> None:
        """In the step of a fault: that it is put in, or why not."""
        if tokens <= fault.row:
            logger.warning("NaN guard: nothing injected: step %d has %d rows, not row %d.", fault.step, tokens, fault.row)  # noqa: E501  # fmt: skip
        elif not self._guard.watches_number(fault.layer):
            logger.warning("NaN guard: nothing injected: no attention layer here has the number %d.", fault.layer)
        else:
            logger.warning(
                "NaN guard: injecting %s into %s of layer %d, row %d, in step %d, as asked for.",
                fault.value, fault.tensor, fault.layer, fault.row, fault.step,
            )  # fmt: skip

    def say(self, step: int, hits: Mapping[str, "Hit"], runner: Any) -> None:
        """Log what a step found, unless it began where something was logged before, or in requests hit before."""
        new = [name for name in hits if name not in self._hit]
        self._hit.update(dict.fromkeys(new))
        while len(self._hit) > REMEMBERED:
            self._hit.popitem(last=False)
        hits = {name: hits[name] for name in new}
        if not hits:
            return
        request, hit = min(hits.items(), key=lambda item: item[1].layer or len(self._guard.names))
        # in the same layer: which of its tensors
        flags = hit.flags
        for other in hits.values():
            if other.layer == hit.layer:
                flags |= other.flags
        key = (hit.layer, flags)
        if key in self._said:
            return
        self._said.add(key)
        others = len(hits) - 1
        what = "the request ends with an error" if self._guard.mode == "abort" else "it goes on"
        logger.error(
            "NaN guard: step %d, request %s%s: %s. The first of its kind; %s. Later ones are counted, not logged.",
            step,
            request,
            f" and {others} more" if others else "",
            self._where(request, hit, flags, runner),
            what,
        )

    def _where(self, request: str, hit: "Hit", flags: int, runner: Any) -> str:
        if not hit.layer:
            where = "what is pooled" if getattr(runner, "is_pooling_model", False) else "the logits"
            return (
                f"{kinds_of(hit.logits)} in {where}, and in no attention layer that is watched: after the last one "
                "(its output projection, MLP, final norm or LM head)"
            )
        guard = self._guard
        name, kind = guard.names[hit.layer], guard.kinds[hit.layer]
        text = describe(flags, kind, guard.checked.get(hit.layer, (True,) * 4))
        return f"first non-finite values in layer {name}, row {hit.row} of its rows in this step: {text}: " + (
            self._origin(request, hit.layer, flags, runner) + self._largest(hit.layer)
        )

    def _origin(self, request: str, number: int, flags: int, runner: Any) -> str:
        guard = self._guard
        if guard.kinds[number] is NORM:
            return "before this norm" if flags & 3 else "in this norm"
        checked = guard.checked.get(number, (True,) * 4)
        if not bad_inputs(flags):
            if all(checked[:3]):
                return "in its attention kernel, or from its KV cache"
            return "in its attention kernel, from its KV cache, or from an input that was not checked"
        if guard.is_first_attention(number):
            items = _bad_items(runner, request)
            if items:
                return f"before the first attention layer, from the encoder (item {', '.join(map(str, items))})"
            return "before this layer's attention: the first one, so in the embeddings, or in its norm or projections"
        before = "its projections or norm, or what lies between it and the attention layer before"
        others = _unguarded_between(runner, guard.names[number - 1], guard.names[number])
        if others:
            before += f", such as {others}"
        return f"before this layer's attention ({before})"

    def _largest(self, number: int) -> str:
        """The largest magnitude before, which tells an overflow that built up; waits for the device."""
        memory = self._guard.memory
        if memory is None:
            return ""
        own = _float(int(memory.peaks[number].item()))
        return f"; largest finite magnitude so far in this layer {own:.4g}"

    def peaks(self) -> dict[str, float]:
        """The largest finite magnitude that each layer that ran has had in real rows."""
        memory = self._guard.memory
        if memory is None:
            return {}
        bits = memory.peaks.cpu().tolist()
        return {name: _float(bits[number]) for number, name in enumerate(self._guard.names) if number}


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _bad_items(runner: Any, request: str) -> list[int]:
    """Which of a request's items have NaN or Inf in the encoder's output, as far as it is still there."""
    cache = runner.encoder_cache
    if cache is None:
        return []
    outputs = getattr(cache, "encoder_outputs", cache)
    features = getattr(cache, "mm_features", {}).get(request)
    if features is None:
        state = getattr(runner, "requests", {}).get(request)
        features = state.mm_features if state is not None else []
    bad = []
    for at, feature in enumerate(features or []):
        output = outputs.get(feature.identifier)
        if output is not None and not bool(output.isfinite().all()):
            bad.append(at)
    return bad


def _unguarded_between(runner: Any, before: str, name: str) -> str:
    """The layers with a state of their own, linear attention for one, between two attention layers."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    first, last = layer_index(before), layer_index(name)
    if first is None or last is None:
        return ""
    found = [
        other
        for other, layer in runner.compilation_config.static_forward_context.items()
        if not isinstance(layer, Attention | MLAAttention)
        and hasattr(layer, "kv_cache")
        and (index := layer_index(other)) is not None
        and first < index < last
    ]
    return ", ".join(found)
