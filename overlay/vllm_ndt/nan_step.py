# SPDX-License-Identifier: Apache-2.0
"""The NaN guard's steps in a worker: what a step found goes with its output, by request, and is logged once.

`watch_model` names what will be watched when the model is loaded, `start_step` comes before each step, `check_step`
behind its forward pass and logits. On a GPU the latter enqueues one kernel that writes into pinned memory, before the
copies that the step's output waits for; so whoever has waited for the output can read it, and nothing else waits.
"""

import atexit
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ndt import settings
from vllm_ndt.nan_blocks import zero_blocks
from vllm_ndt.nan_guard import NORM, Guard, process_guard, rows_of
from vllm_ndt.nan_report import Reporter
from vllm_ndt.nan_words import FLAGS, parts

LOGITS = "logits"
# steps whose findings may be unread at the same time; engines keep one for each pipeline stage in flight, and one more
SLOTS = 32


@dataclass(frozen=True)
class Hit:
    """What a step found for a request: the number of the first bad layer (0: none), that layer's flags, the first bad
    row (with bad inputs, if any has) counted from the request's first, the logits' flags (1: NaN, 2: Inf, not -Inf)."""

    layer: int
    flags: int
    row: int
    logits: int


@dataclass(frozen=True)
class Findings:
    """A step's number, from 1, and what was found, by request: "logits", or the first bad layer's name."""

    step: int
    requests: dict[str, str]


class Pending:
    """A step's findings, to be read once its output is there; pickled, it is what was found."""

    def __init__(self, steps: "_Steps", step: int, requests: Sequence[str], found: Any, event: Any) -> None:
        self._steps, self._step, self._requests, self._found, self._event = steps, step, requests, found, event
        self._lock = threading.Lock()
        self._result: Findings | None = None

    @property
    def over(self) -> bool:
        """Whether the step is over on the device."""
        return self._event is None or self._found is None or bool(self._event.query())

    def wait(self) -> "Pending":
        """Wait until the step is over."""
        if self._event is not None:
            self._event.synchronize()
        return self

    def read(self) -> Findings | None:
        """What was found, or None; logs it. The step must be over."""
        with self._lock:
            if self._found is not None:
                self._result = self._steps.read(self._step, self._requests, self._found)
                self._found = None
        return self._result

    def __reduce__(self) -> Any:
        return _same, (self.read(),)


def _same(found: Findings | None) -> Findings | None:
    return found


def findings_of(output: Any) -> Findings | None:
    """The findings that a ModelRunnerOutput carries; the step must be over."""
    found = output.ndt_nonfinite
    return found.read() if isinstance(found, Pending) else found


class _Steps:
    """One worker's steps."""

    def __init__(self, guard: Guard, runner: Any, requests: int) -> None:
        self.guard = guard
        self.runner = runner
        self.step = 0
        # upstream's V2 runner warms up with requests that nobody sent
        self._live = not getattr(runner.vllm_config, "use_v2_model_runner", False)
        self._slot = 0
        self.reporter = Reporter(guard)
        self._unread: deque[Pending] = deque()
        self._lock = threading.Lock()  # an output's thread and the worker's may read different steps
        self._device: list[torch.Tensor] = []
        self._host: list[Any] = []  # numpy's views of the pinned memory
        self._events: list[torch.cuda.Event] = []
        self._starts = torch.arange(requests + 1, dtype=torch.int32, device=runner.device)
        if runner.device.type == "cuda":
            from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

            from vllm_ndt.nan_kernel import FOUND

            pinned = [torch.zeros(requests, FOUND, dtype=torch.int32, pin_memory=True) for _ in range(SLOTS)]
            self._device = [get_accelerator_view_from_cpu_tensor(host) for host in pinned]
            self._host = [host.numpy() for host in pinned]
            self._events = [torch.cuda.Event() for _ in range(SLOTS)]
        atexit.register(self.read_what_is_over)  # of a rank whose outputs nobody reads

    def start(self, tokens: int) -> None:
        memory = self.guard.memory
        if not tokens or memory is None:
            return
        self.step += 1
        # what a drafter, or a step without an end, left
        if self.runner.speculative_config is not None:
            memory.words.zero_()
        fault = self.guard.injection
        if fault is not None and self._live:
            now = self.step == fault.step and tokens > fault.row
            if self.step == fault.step:
                self.reporter.say_injected(fault, tokens)
            memory.armed.fill_(int(now))

    def check(
        self, requests: Sequence[str], starts: torch.Tensor, logits: torch.Tensor | None, logit_starts: Any
    ) -> Pending | None:
        memory = self.guard.memory
        if memory is None or not requests:
            return None
        self.read_what_is_over()
        requests = list(requests)
        if logit_starts is None:
            logit_starts = self._starts
        if not self._device:
            found = _collect(memory.words, starts, len(requests), logits, logit_starts).numpy()
            pending = Pending(self, self.step, requests, found, None)
            self._unread.append(pending)
            return pending
        from vllm_ndt.nan_kernel import collect

        if len(self._unread) == SLOTS:  # nobody read the oldest, and its slot is needed
            oldest = self._unread.popleft().wait()
            if self._live:
                oldest.read()
        self._slot = slot = (self._slot + 1) % SLOTS
        collect(memory.words, starts, len(requests), logits, logit_starts, self._device[slot])
        event = self._events[slot]
        event.record()
        pending = Pending(self, self.step, requests, self._host[slot], event)
        self._unread.append(pending)
        return pending

    def read_what_is_over(self) -> None:
        """Read earlier steps; only the rank that answers has its outputs read by others."""
        while self._live and self._unread and self._unread[0].over:
            self._unread.popleft().read()

    def restart(self) -> None:
        """Forget all steps so far, which must be over: they were no requests'. What they left bad is zeroed."""
        memory = self.guard.memory
        self._live = True
        if memory is None:
            return
        if bool(memory.words.any()) or any(host.any() for host in self._host):
            zero_blocks(self.runner, range(self.runner.kv_cache_config.num_blocks))
        memory.words.zero_()
        for host in self._host:
            host.fill(0)
        self._unread.clear()
        self.step = 0
        self.reporter = Reporter(self.guard)

    def read(self, step: int, requests: Sequence[str], words: Any) -> Findings | None:
        """What a step left in an array of nan_kernel.collect's form, which is 0 again afterwards; logs it."""
        if not words[: len(requests)].any():
            return None
        with self._lock:
            return self._read(step, requests, words)

    def _read(self, step: int, requests: Sequence[str], words: Any) -> Findings | None:
        hits = {}
        for at, request in enumerate(requests):
            value, row, *logits = words[at].tolist()
            if value or any(logits):
                both = 0
                for flags in logits:
                    both |= flags
                layer, flags = parts(value) if value else (0, 0)
                hits[request] = Hit(layer, flags, row, both)
        words.fill(0)
        self.reporter.say(step, hits, self.runner)
        names = {request: self.guard.names[hit.layer] if hit.layer else LOGITS for request, hit in hits.items()}
        return Findings(step, names)


_steps: _Steps | None = None


def watch_model(worker: Any) -> None:
    """Prepare to watch the model that a worker (upstream's Worker) has loaded; nothing if the guard is off."""
    global _steps
    guard = process_guard()
    if guard is None:
        return
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    runner, config = worker.model_runner, worker.vllm_config
    compilation = config.compilation_config
    if _steps is not None and _steps.runner is not runner:
        # captured graphs of the first one write into its memory
        raise settings.SettingError(
            settings.NAN_GUARD, os.environ[settings.NAN_GUARD], "off for a second engine in one process"
        )
    modules = list(runner.get_model().named_modules())
    layers = [m.layer_name for _, m in modules if isinstance(m, Attention) or _is_upstreams(m, MLAAttention)]
    others = sorted(
        name
        for name, layer in compilation.static_forward_context.items()
        if hasattr(layer, "kv_cache") and name not in layers and not isinstance(layer, Attention)
    )
    norms = _norms(modules) if settings.nan_guard_norms(os.environ) else {}
    # compiled code that contains a layer may use its tensors' memory again
    apart = not compilation.mode or (
        compilation.splitting_ops_contain_attention() and not compilation.use_inductor_graph_partition
    )
    rows = max(config.scheduler_config.max_num_batched_tokens, compilation.max_cudagraph_capture_size or 0)
    guard.watch(layers, list(norms), runner.device, rows, beside=apart)
    for name, module in norms.items():
        module.register_forward_hook(_norm_hook(guard, name))
    _steps = _Steps(guard, runner, config.scheduler_config.max_num_seqs)
    _steps.reporter.say_watching(len(layers), len(norms), others)


def forget_warm_up() -> None:
    """What ran before was a warm-up with requests that nobody sent."""
    if _steps is not None:
        if _steps.runner.device.type == "cuda":
            torch.cuda.synchronize()
        _steps.restart()


def start_step(worker: Any, scheduler_output: Any) -> None:
    """Before a worker's step: zero the blocks that the scheduler wants zeroed, and inject a fault if asked for."""
    if _steps is None:
        return
    if scheduler_output.ndt_block_ids_to_zero:
        zero_blocks(worker.model_runner, scheduler_output.ndt_block_ids_to_zero)
    _steps.start(scheduler_output.total_num_scheduled_tokens)


def check_step(
    requests: Sequence[str], starts: torch.Tensor, logits: torch.Tensor | None = None, logit_starts: Any = None
) -> Pending | None:
    """Behind a forward pass: what it found for `requests`, to go with the step's output; None if the guard is off.

    Request i has the rows starts[i] to starts[i + 1] and the logits logit_starts[i] to logit_starts[i + 1], or
    logits[i] without the latter. `logits`, (positions, vocabulary), are the model's own: no grammar, no penalties yet.
    A model that pools has its last hidden states in their place, (rows, size).
    """
    return None if _steps is None else _steps.check(requests, starts, logits, logit_starts)


def draft_logit_starts(spec_decode_metadata: Any) -> torch.Tensor | None:
    """`logit_starts` of upstream's V1 runner: each request has its drafts' logits and one more."""
    if _steps is None or spec_decode_metadata is None:
        return None
    ends = spec_decode_metadata.cu_num_draft_tokens
    ends = ends + torch.arange(1, ends.shape[0] + 1, dtype=ends.dtype, device=ends.device)
    return torch.nn.functional.pad(ends, (1, 0))


def _is_upstreams(module: Any, kind: type) -> bool:
    """Whether a layer's forward pass is that of its base class, which is what the guard is around."""
    return isinstance(module, kind) and type(module).forward is kind.forward  # type: ignore[attr-defined]


def _norms(modules: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    kinds = (RMSNorm, GemmaRMSNorm, torch.nn.LayerNorm)
    return {name: module for name, module in modules if isinstance(module, kinds)}


def _norm_hook(guard: Guard, name: str) -> Any:
    """Looks at a norm's input, with the residual if there is one, and its output, if they have one row a token."""

    def hook(_module: Any, given: Any, made: Any) -> None:
        output, residual = made if isinstance(made, tuple) else (made, None)
        if output.dim() > 3:
            return
        # the fused norm has added its input to the residual, in the memory of the latter
        inputs = rows_of(residual if residual is not None else given[0])
        guard.check(name, (inputs, None, None, rows_of(output)), NORM)

    return hook


def _collect(
    words: torch.Tensor, starts: torch.Tensor, requests: int, logits: torch.Tensor | None, logit_starts: torch.Tensor
) -> torch.Tensor:
    """As nan_kernel.collect, by PyTorch; gives (requests, 3), the logits' flags in one word."""
    found = torch.zeros(requests, 3, dtype=torch.int32)
    bounds = starts.tolist()
    if bool(words.any()):
        for at in range(requests):
            own = words[bounds[at] : bounds[at + 1]]
            most = own.max() if own.numel() else own.sum()
            if most:
                same = (own >> FLAGS) == (most >> FLAGS)
                flags = 0
                for value in own[same].tolist():
                    flags |= value & ((1 << FLAGS) - 1)
                found[at, 0] = (most >> FLAGS << FLAGS) | flags
                began = same & (own & ((1 << FLAGS - 2) - 1) != 0)
                found[at, 1] = int((began if began.any() else same).int().argmax())
        words.zero_()
    if logits is not None and not bool(logits.isfinite().all()):
        bounds = logit_starts.tolist()
        for at in range(requests):
            own = logits[bounds[at] : bounds[at + 1]]
            # models rule tokens out with -Inf
            found[at, 2] = int(own.isnan().any()) | int(own.isposinf().any()) << 1
    return found
