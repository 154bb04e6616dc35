# SPDX-License-Identifier: Apache-2.0
"""The NaN guard in a worker: looks at attention layers (and layer norms) for NaN and Inf, in real rows only.

The check of a layer runs inside vLLM's operator, or around MLA's implementation, so torch.compile does not see it and
CUDA graphs record it. On a GPU it is a Triton kernel (see `nan_kernel`); elsewhere PyTorch does the same. What a step
found stays on the device until `nan_step` takes it with the step's output.

A row is real if it holds a token of a request; the rest of a padded batch holds rubbish. The number of real rows
changes while a graph does not, so it is read on the device: from the slot mapping (-1 for padding), which both model
runners keep at one address and set to -1 for dummy batches, whatever the backend's metadata look like. Layers of other
kinds than decoder self-attention have no slot of their own for each row; there the last of the query start locations
counts, which both runners pad with the number of real tokens.

In a full CUDA graph a layer is looked at on a branch beside the model's next kernels, which hides the launch. The
branch comes back at the next layer, and until then the layer's tensors are held, so that their memory is not used again
before. To look at several layers at once costs more: memory held for longer is memory that the cache does not have.

Limits: see docs/nan.md.
"""

import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from vllm_ndt import settings

# below "vllm", which vLLM sets up; a name of our own would log nothing
logger = logging.getLogger("vllm.ndt.nan_guard")

ATTENTION = settings.TENSORS
MLA = ("q", "kv_c", "k_pe", "output")
NORM = ("input", "", "", "output")
WATCHABLE = (torch.float16, torch.bfloat16, torch.float32)
FULL_ROWS = 512  # batches of more rows are read in part on a GPU

F = TypeVar("F", bound=Callable[..., Any])


def guard_attention(function: F) -> F:
    """The attention operator's body with the guard around it, or `function` itself if the guard is off."""
    guard = process_guard()
    if guard is None:
        return function

    @functools.wraps(function)
    def guarded(query: Any, key: Any, value: Any, output: Any, layer_name: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.utils.torch_utils import _resolve_layer_name

        name = _resolve_layer_name(layer_name)
        guard.inject(name, (query, None, None, None))
        result = function(query, key, value, output, layer_name, *args, **kwargs)
        guard.inject(name, (None, None, None, output))
        guard.check(name, (query, key, value, output), ATTENTION)
        return result

    return guarded  # type: ignore[return-value]


def inject_before_cache(function: F) -> F:
    """The operator that writes k and v into the KV cache, with faults put into them first, or `function` itself."""
    guard = process_guard()
    if guard is None or guard.injection is None or guard.injection.tensor not in ("k", "v"):
        return function

    @functools.wraps(function)
    def injected(key: Any, value: Any, layer_name: Any) -> Any:
        from vllm.utils.torch_utils import _resolve_layer_name

        guard.inject(_resolve_layer_name(layer_name), (None, key, value, None))
        return function(key, value, layer_name)

    return injected  # type: ignore[return-value]


def guard_mla(function: F) -> F:
    """As guard_attention, for MLAAttention.forward_impl, which the operator and direct calls end in."""
    guard = process_guard()
    if guard is None:
        return function

    @functools.wraps(function)
    def guarded(layer: Any, q: Any, kv_c: Any, k_pe: Any, kv_cache: Any, metadata: Any, output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: E501  # fmt: skip
        inputs = (rows_of(q), rows_of(kv_c), rows_of(k_pe))
        guard.inject(layer.layer_name, (*inputs, None))
        result = function(layer, q, kv_c, k_pe, kv_cache, metadata, output, *args, **kwargs)
        outputs = rows_of(output)
        guard.inject(layer.layer_name, (None, None, None, outputs))
        guard.check(layer.layer_name, (*inputs, outputs), MLA)
        return result

    return guarded  # type: ignore[return-value]


@functools.cache
def process_guard() -> "Guard | None":
    """This process' guard, or None if it is off, or if a variable holds a value that is not allowed.

    It is asked when upstream's modules are imported, from where an error would not reach the operator. The engine's
    configuration is checked in any case, and says it.
    """
    try:
        mode = settings.nan_guard(os.environ)
        return None if mode == "off" else Guard(mode, settings.nan_inject(os.environ))
    except settings.SettingError:
        return None


class Memory:
    """What the kernels of one device write; see `nan_kernel`. `armed` (int32, one word): whether to inject now."""

    def __init__(self, device: torch.device, rows: int, layers: int) -> None:
        self.words = torch.zeros(rows, dtype=torch.int32, device=device)
        self.peaks = torch.zeros(layers, dtype=torch.int32, device=device)
        self.armed = torch.zeros(1, dtype=torch.int32, device=device)


class Guard:
    """What one process knows: the layers that it watches, by number in the order in which they ran first, from 1.

    `names` and `kinds` give a layer's name and the names of its tensors by number (place 0 is empty), `checked` which
    of its tensors could be looked at. Batches of up to `full_rows` rows are read in full.
    """

    def __init__(self, mode: str, injection: settings.Injection | None = None) -> None:
        self.mode = mode
        self.injection = injection
        self.memory: Memory | None = None
        self.names: list[str] = [""]
        self.kinds: list[Sequence[str]] = [()]
        self.checked: dict[int, tuple[bool, ...]] = {}
        self.full_rows = FULL_ROWS
        self._numbers: dict[str, int] = {}
        self._watched: frozenset[str] | None = None
        self._ends: set[int] = set()  # layers that were a forward's last
        self._beside: torch.cuda.Stream | None = None
        self._running: tuple[torch.cuda.Event, Any] | None = None  # the end of the open branch, and its layer's tensors
        self._previous: tuple[Callable[[], Any], int] = (lambda: None, 0)

    def watch(self, layers: Sequence[str], norms: Sequence[str], device: torch.device, rows: int, beside: bool) -> None:
        """Say what will run: names of attention layers and norms, at most `rows` rows a batch.

        `beside`: whether a layer may be looked at beside what follows it in a CUDA graph, which needs that no compiled
        code uses its tensors' memory again before the next layer.
        """
        self._watched = frozenset((*layers, *norms))
        self.memory = Memory(device, rows, len(self._watched) + 1)
        if beside and device.type == "cuda":
            self._beside = torch.cuda.Stream(device)

    def watches_number(self, number: int) -> bool:
        """Whether a layer with this number in its name is watched."""
        return any(layer_index(name) == number for name in self._watched or ())

    def watches(self, name: str) -> bool:
        """Whether a layer is watched; a drafter's are not."""
        return self._watched is not None and name in self._watched

    def is_first_attention(self, number: int) -> bool:
        """Whether no attention layer runs before this layer."""
        return all(kind is NORM for kind in self.kinds[1:number])

    def inject(self, name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        """Put the fault that the operator asked for into a tensor of this layer, if the step has it."""
        fault = self.injection
        if fault is None or self.memory is None or not self.watches(name) or layer_index(name) != fault.layer:
            return
        tensor = tensors[settings.TENSORS.index(fault.tensor)]
        if tensor is None or tensor.shape[0] <= fault.row:
            return
        if tensor.device.type == "cuda":
            from vllm_ndt.nan_kernel import inject

            inject(tensor, fault.row, fault.value, self.memory.armed)
        elif self.memory.armed:
            tensor[fault.row].view(-1)[0] = fault.value

    def check(self, name: str, tensors: Sequence[torch.Tensor | None], kind: Sequence[str]) -> None:
        """Look at the tensors, each (rows, heads, size) or None, of the layer that has just run."""
        from vllm.forward_context import get_forward_context, is_forward_context_available

        # encoders run outside of a forward pass
        if not self.watches(name) or self.memory is None or not is_forward_context_available():
            return
        number = self._number(name, kind)
        context = get_forward_context()
        if self._previous[0]() is not context and self._previous[1]:
            self._ends.add(self._previous[1])
            self._running = None
        # not the context itself, which would keep the step's tensors while nothing runs
        self._previous = (weakref.ref(context), number)
        output = tensors[3]
        assert output is not None
        self._look(self.memory, name, number, tensors, output, context)
        if number in self._ends:
            self._join()

    def _look(self, memory: Memory, name: str, number: int, tensors: Any, output: torch.Tensor, context: Any) -> None:
        marks = _marks(name, context, output.shape[0])
        if marks is None:
            return
        rows, by_slot = marks
        watched = tuple(tensor if _watchable(tensor, output) else None for tensor in tensors)
        count = min(output.shape[0], memory.words.shape[0])
        if by_slot:
            count = min(count, rows.shape[0])
        self.checked[number] = tuple(tensor is not None for tensor in watched)
        if count == 0 or not any(self.checked[number]):
            return
        if output.device.type != "cuda":
            _check(watched, number, _real(rows, by_slot, count), memory)
            return
        if self._beside and self._ends and torch.cuda.is_current_stream_capturing():
            self._branch(watched, number, count, rows, by_slot)
        else:
            self._run(watched, number, count, rows, by_slot)

    def _branch(self, tensors: Any, *args: Any) -> None:
        self._join()
        assert self._beside
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._run(tensors, *args)
        self._running = self._beside.record_event(), tensors

    def _join(self) -> None:
        """A captured graph must not end with an open branch."""
        if self._running:
            torch.cuda.current_stream().wait_event(self._running[0])
            self._running = None

    def _run(self, tensors: Any, number: int, count: int, rows: torch.Tensor, by_slot: bool) -> None:
        from vllm_ndt.nan_kernel import check_rows

        assert self.memory is not None
        full = count <= self.full_rows
        check_rows(tensors, number, count, rows, by_slot, self.memory.words, self.memory.peaks, full=full)

    def _number(self, name: str, kind: Sequence[str]) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
            self.kinds.append(kind)
        return number


def layer_index(name: str) -> int | None:
    """The first number in a layer's name, as in model.layers.3.self_attn.attn."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def rows_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A view of shape (rows, heads, size) of a tensor with one row a token."""
    return tensor if tensor is None or tensor.dim() == 3 else tensor.unsqueeze(1)


def _watchable(tensor: torch.Tensor | None, output: torch.Tensor) -> bool:
    return tensor is not None and tensor.dtype in WATCHABLE and tensor.dim() == 3 and tensor.shape[0] == output.shape[0]


def _marks(name: str, context: Any, count: int) -> tuple[torch.Tensor, bool] | None:
    """What tells real rows: the slot mapping (True) or the query start locations (False); None without a real batch."""
    metadata, slots = context.attn_metadata, context.slot_mapping
    if isinstance(metadata, list):  # the operator reads the first, too: the model's own, of those of a drafter
        metadata = metadata[0]
    if not isinstance(metadata, dict) or not metadata:
        return None
    if not isinstance(slots, dict):
        slots = {}
    layer = context.no_compile_layers.get(name)
    if layer is None:  # a norm: any decoder layer's marks are those of its rows
        decoders = (n for n in slots if getattr(context.no_compile_layers.get(n), "attn_type", "decoder") == "decoder")
        name = next(decoders, next(iter(metadata)))
        layer = context.no_compile_layers.get(name)
        # one over heads, say, has other rows than the batch
        if name in slots and slots[name].shape[0] != count:
            return None
    if metadata.get(name) is None:
        return None
    own = slots.get(name)
    # A longer mapping is that of keys gathered from other ranks.
    if own is not None and getattr(layer, "attn_type", "decoder") == "decoder" and own.shape[0] <= count:
        return own, True
    starts = getattr(metadata[name], "query_start_loc", None)
    return None if starts is None else (starts, False)


def _real(rows: torch.Tensor, by_slot: bool, count: int) -> torch.Tensor:
    """A mask of `count` rows: which hold real tokens."""
    if by_slot:
        return rows[:count] >= 0
    return torch.arange(count, device=rows.device) < rows[-1]


def _check(tensors: Sequence[torch.Tensor | None], number: int, real: torch.Tensor, memory: Memory) -> None:
    """As nan_kernel.check_rows, for one layer, by PyTorch."""
    from vllm_ndt.nan_words import word

    count = real.shape[0]
    flags = torch.zeros(count, dtype=torch.int32, device=real.device)
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        values = tensor[:count].reshape(count, -1)
        largest = values.abs().amax(1).float()
        finite = largest.isfinite()
        if not bool(finite.all()):
            flags |= values.isnan().any(1).int() << (2 * place)
            flags |= values.isinf().any(1).int() << (2 * place + 1)
            largest = torch.where(values.isfinite(), values, 0).abs().amax(1).float()
        peak = torch.where(real, largest, 0).max().view(torch.int32)
        memory.peaks[number] = torch.maximum(memory.peaks[number], peak)
    flags = torch.where(real, flags, 0)
    if bool(flags.any()):
        words = torch.where(flags > 0, flags + word(number, 0), 0)
        memory.words[:count] = torch.maximum(memory.words[:count], words.int())
