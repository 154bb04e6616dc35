# SPDX-License-Identifier: Apache-2.0
"""The NaN guard: finds the first attention layer with NaN or Inf in q, k, v or its output, and logs it once.

``guard_attention`` stands around the body of vLLM's operator ``unified_attention_with_output``. The check runs inside
the operator, so torch.compile does not see it and CUDA graphs record it. On a GPU it is one kernel a layer (see
``nan_kernel``), which writes to pinned host memory only when it finds something; a thread looks at that memory and
makes no CUDA call. Elsewhere PyTorch does the check at once.

Only rows of real tokens count; the rest of a padded batch holds rubbish. The number of real tokens changes while a
graph does not, so it is read on the device: from the slot mapping (-1 for padding), which both model runners keep at
one address and set to -1 for dummy and warm-up batches, whatever the backend's metadata look like. Layers of other
kinds than decoder self-attention have no slot of their own for each row; there the last of the query start locations
counts, which both runners pad with the number of real tokens.

Limits:
- Only class Attention and its subclasses: not MLA, linear attention, Mamba or vision encoders.
- float16, bfloat16 and float32 only: a tensor of another type (fp8 queries, quantised output) is named as not checked.
- k and v are not checked if they have other rows than q (cross-attention), or are not given (shared KV cache).
- Where the query start locations count, dummy batches count as well.
- With decode or prefill context parallelism a rank may see only the rows whose KV it keeps.
- The first finding a process: what comes later is not logged. Finite wrong values are not found.
"""

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from vllm_ndt import settings

# Below "vllm", whose handlers and format it takes.
logger = logging.getLogger("vllm.ndt.nan_guard")

TENSORS = ("q", "k", "v", "output")
WATCHABLE = (torch.float16, torch.bfloat16, torch.float32)
POLL_SECONDS = 0.25

F = TypeVar("F", bound=Callable[..., Any])


def guard_attention(function: F) -> F:
    """The attention operator's body with the guard around it, or `function` itself if the guard is off.

    Raises settings.SettingError if VLLM_NDT_NAN_GUARD holds a value that is not allowed.
    """
    if settings.nan_guard(os.environ) == "off":
        return function
    return Guard().wrap(function)


class Guard:
    """What one process knows: the layers by number, and whether something was found."""

    def __init__(self) -> None:
        self._layers: dict[str, int] = {}  # name -> number, from 1; the number is frozen into CUDA graphs
        self._checked: dict[int, tuple[bool, ...]] = {}  # number -> which of TENSORS are looked at
        self._watches: dict[torch.device, _Watch] = {}
        self._started = False
        self._found = False
        self._lock = threading.Lock()

    def wrap(self, function: F) -> F:
        @functools.wraps(function)
        def guarded(query: Any, key: Any, value: Any, output: Any, layer_name: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(query, key, value, output, layer_name, *args, **kwargs)
            self.check((query, key, value, output), layer_name)
            return result

        return guarded  # type: ignore[return-value]

    def check(self, tensors: Sequence[torch.Tensor | None], layer_name: Any) -> None:
        """Look at q, k, v and the output, each (rows, heads, size), of the layer that has just run."""
        from vllm.model_executor.layers.attention.attention import get_attention_context
        from vllm.utils.torch_utils import _resolve_layer_name

        name = _resolve_layer_name(layer_name)
        if not self._started:
            self._start()
        output = tensors[3]
        assert output is not None
        watch = self._watch(output.device)  # made in the profiling run, long before a graph is captured
        metadata, layer, _, slots = get_attention_context(name)
        if metadata is None or self._found:
            return
        rows, by_slot = _real_rows(layer, metadata, slots, output.shape[0])
        if rows is None:
            return
        number = self._layers.setdefault(name, len(self._layers) + 1)
        watched = tuple(tensor if _watchable(tensor, output) else None for tensor in tensors)
        count = min(output.shape[0], rows.shape[0]) if by_slot else output.shape[0]
        if count == 0 or not any(tensor is not None for tensor in watched):
            return
        self._checked[number] = tuple(tensor is not None for tensor in watched)
        if watch is None:
            if flags := _flags(watched, _real(rows, by_slot, count)):
                self.report(number, flags)
            return
        from vllm_ndt.nan_kernel import check_rows

        check_rows(watched, count, rows, by_slot, watch.state, watch.view, number)

    def report(self, number: int, flags: int) -> None:
        """Log what was found in a layer, unless something was logged before."""
        with self._lock:
            if self._found:
                return
            self._found = True
        name = next((name for name, other in self._layers.items() if other == number), f"number {number}")
        logger.error(
            "NaN guard: first non-finite values in layer %s: %s. Later ones are not logged.",
            name,
            describe(flags, self._checked.get(number, (True,) * len(TENSORS))),
        )

    def _start(self) -> None:
        """Number the model's layers in the order in which they were made, and say that the guard is on."""
        from vllm.forward_context import get_forward_context
        from vllm.model_executor.layers.attention.attention import Attention

        self._started = True
        layers = get_forward_context().no_compile_layers
        names = [name for name, layer in layers.items() if isinstance(layer, Attention)]
        for name in names:
            self._layers[name] = len(self._layers) + 1
        logger.info("NaN guard: watching q, k, v and the output of %d attention layers.", len(names))

    def _watch(self, device: torch.device) -> "_Watch | None":
        """The device's memory for findings, or None where PyTorch does the check."""
        if device.type != "cuda":
            return None
        watch = self._watches.get(device)
        if watch is None:
            watch = self._watches[device] = _Watch(device, self.report)
        return watch


class _Watch:
    """A GPU's words for findings, and the thread that looks at them."""

    def __init__(self, device: torch.device, report: Callable[[int, int], None]) -> None:
        from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

        from vllm_ndt.nan_kernel import FLAGS

        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self._host = torch.zeros(1 + FLAGS, dtype=torch.int32, pin_memory=True)
        self.view = get_accelerator_view_from_cpu_tensor(self._host)
        self._words = self._host.numpy()
        self._report = report
        atexit.register(self.look)  # a short run may end before the thread looks
        threading.Thread(target=self._run, name="nan-guard", daemon=True).start()

    def look(self) -> bool:
        """Report what the words say, if they say anything; reads plain memory only."""
        number, *flags = self._words.tolist()
        if number and not any(flags):  # the kernel's stores may arrive in any order
            time.sleep(POLL_SECONDS)
            number, *flags = self._words.tolist()
        if number and any(flags):
            self._report(number, sum(1 << place for place, flag in enumerate(flags) if flag))
        return bool(number)

    def _run(self) -> None:
        while not self._words[0]:
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)  # other rows of the same launch may still write
        self.look()


def describe(flags: int, checked: Sequence[bool] = (True,) * len(TENSORS)) -> str:
    """The finding in words: what is bad, what is clean, what was not checked, and where to look.

    `flags` has bit 2 * i for NaN and bit 2 * i + 1 for Inf in TENSORS[i].
    """
    bad, clean, unknown = [], [], []
    for place, name in enumerate(TENSORS):
        kinds = [kind for bit, kind in enumerate(("NaN", "Inf")) if flags >> (2 * place + bit) & 1]
        if kinds:
            bad.append(f"{name} ({', '.join(kinds)})")
        elif checked[place]:
            clean.append(name)
        else:
            unknown.append(name)
    parts = [", ".join(bad)]
    if clean:
        parts.append(f"{', '.join(clean)} clean")
    if unknown:
        parts.append(f"{', '.join(unknown)} not checked")
    return f"{'; '.join(parts)}: {_origin(flags, checked)}"


def _origin(flags: int, checked: Sequence[bool]) -> str:
    if flags & 0b111111:
        return "the values were bad before this layer's attention (its projections, its norm or what feeds them)"
    if all(checked[:3]):
        return "they arose in the attention kernel or came from its KV cache"
    return "they arose in the attention kernel, came from its KV cache or from an input that was not checked"


def _watchable(tensor: torch.Tensor | None, output: torch.Tensor) -> bool:
    return tensor is not None and tensor.dtype in WATCHABLE and tensor.dim() == 3 and tensor.shape[0] == output.shape[0]


def _real_rows(layer: Any, metadata: Any, slots: torch.Tensor | None, count: int) -> tuple[torch.Tensor | None, bool]:
    """What tells real rows: the slot mapping (True) or the query start locations (False); None if neither is there."""
    # A longer mapping is that of keys gathered from other ranks.
    if slots is not None and layer.attn_type == "decoder" and slots.shape[0] <= count:
        return slots, True
    return getattr(metadata, "query_start_loc", None), False


def _real(rows: torch.Tensor, by_slot: bool, count: int) -> torch.Tensor:
    """A mask of `count` rows: which hold real tokens."""
    if by_slot:
        return rows[:count] >= 0
    return torch.arange(count, device=rows.device) < rows[-1]


def _flags(tensors: Sequence[torch.Tensor | None], real: torch.Tensor) -> int:
    """The flags, as `describe` reads them, of the rows that `real` marks."""
    flags = 0
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        values = tensor[: real.shape[0]]
        if bool(torch.isfinite(values).all()):
            continue
        values = values[real]
        flags |= int(values.isnan().any()) << (2 * place) | int(values.isinf().any()) << (2 * place + 1)
    return flags
