# SPDX-License-Identifier: Apache-2.0
"""The NaN guard's Triton kernels: `check_rows` looks at attention layers, `collect` ends a step.

What they share lies on the device, so that a replayed CUDA graph needs nothing of the host:

- ``words`` (int32, one a row of the batch): 0, or what the first layer with a bad value in this row found, see
  `nan_words.word`. The largest word is that of the first layer: an atomic maximum keeps it, whatever the order.
- ``peaks`` (int32, one a layer's number): the largest finite magnitude in real rows so far, as the bits of a float32,
  which order as integers do.
- ``found`` (int32, pinned host memory, see `collect`): what the step has for each request.

Nothing is written as long as all values are finite and no larger than before.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_ndt.nan_words import FLAGS, LAYERS

# What is read of a large batch: of a row's output one piece of PIECE bytes (as memory is read) in PARTS; its inputs in
# one row of SAMPLE, and where the output is bad. Other pieces and rows in each layer.
PARTS = 4
PIECE = 64
SAMPLE = 16
SPLITS = 8  # programs a request that read its logits
FOUND = 2 + SPLITS  # words a request: `words`' largest, its row counted from the request's first, the logits' flags


@triton.jit
def _either(a, b):  # type: ignore[no-untyped-def]
    return a | b


@triton.jit  # type: ignore[untyped-decorator]
def _bits(  # type: ignore[no-untyped-def]
    base, head, step, start, phase,
    length: tl.constexpr, size: tl.constexpr, block: tl.constexpr, parts: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """The magnitudes of up to `block` of the values that `_largest` reads of a row, as the bits of float32."""
    index = start + tl.arange(0, block)
    if parts > 1:
        index = (index // piece * parts + phase) * piece + index % piece
    place = index * step if size == length else (index // size) * head + (index % size) * step
    value = tl.load(base + place, mask=index < length, other=0.0)
    # On the bits, so that no fast-math rule can fold the comparison away.
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    acc, base, head, step, phase,
    length: tl.constexpr, size: tl.constexpr, block: tl.constexpr, parts: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """The larger of acc and the magnitudes in a row: all, or the piece number `phase` of each `parts` pieces."""
    for start in tl.static_range(0, (length + parts * piece - 1) // (parts * piece) * piece, block):
        acc = tl.maximum(acc, _bits(base, head, step, start, phase, length, size, block, parts, piece))
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _look_closer(  # type: ignore[no-untyped-def]
    flags, peak, base, head, step,
    length: tl.constexpr, size: tl.constexpr, block: tl.constexpr, flag: tl.constexpr,
):  # fmt: skip
    """flags with bit `flag` for each NaN and the next for each Inf; the larger of peak and the finite magnitudes."""
    for start in tl.static_range(0, length, block):
        bits = _bits(base, head, step, start, 0, length, size, block, 1, 1)
        flags = flags | tl.where(bits > 0x7F800000, 1 << flag, tl.where(bits == 0x7F800000, 2 << flag, 0))
        peak = tl.maximum(peak, tl.where(bits < 0x7F800000, bits, 0))
    return flags, peak


@triton.jit(do_not_specialize=["layer", "last"], do_not_specialize_on_alignment=["rows"])  # type: ignore[untyped-decorator]
def _check_rows(  # type: ignore[no-untyped-def]
    q, k, v, out, layer,
    rows, words, peaks, last,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, out_row, out_head, out_step,
    q_length: tl.constexpr, q_size: tl.constexpr, k_length: tl.constexpr, k_size: tl.constexpr,
    v_length: tl.constexpr, v_size: tl.constexpr, out_length: tl.constexpr, out_size: tl.constexpr,
    block: tl.constexpr, by_slot: tl.constexpr, parts: tl.constexpr, piece: tl.constexpr, sample: tl.constexpr,
    flags_bits: tl.constexpr, layers: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = pid.to(tl.int64)
    q += row * q_row
    k += row * k_row
    v += row * v_row
    out += row * out_row
    # All loads are issued at once: what decides comes no earlier than what is decided upon.
    real = tl.load(rows + row) >= 0 if by_slot else pid < tl.load(rows + last)
    before = tl.load(peaks + layer)
    acc = tl.zeros([block], dtype=tl.int32)
    acc = _largest(acc, out, out_head, out_step, (pid + layer) % parts, out_length, out_size, block, parts, piece)
    if (pid + layer) % sample == 0:
        acc = _largest(acc, q, q_head, q_step, 0, q_length, q_size, block, 1, 1)
        acc = _largest(acc, k, k_head, k_step, 0, k_length, k_size, block, 1, 1)
        acc = _largest(acc, v, v_head, v_step, 0, v_length, v_size, block, 1, 1)
    # Each thread has loaded `before` for itself, while other programs raise it. A reduction makes all of them agree:
    # threads that go on alone would take the share of the others in the next one from what lies in shared memory.
    over = tl.max((acc > before).to(tl.int32), 0)
    if real & (over != 0):
        flags = tl.zeros([block], dtype=tl.int32)
        peak = tl.zeros([block], dtype=tl.int32)
        flags, peak = _look_closer(flags, peak, q, q_head, q_step, q_length, q_size, block, 0)
        flags, peak = _look_closer(flags, peak, k, k_head, k_step, k_length, k_size, block, 2)
        flags, peak = _look_closer(flags, peak, v, v_head, v_step, v_length, v_size, block, 4)
        flags, peak = _look_closer(flags, peak, out, out_head, out_step, out_length, out_size, block, 6)
        tl.atomic_max(peaks + layer, tl.max(peak, 0), sem="relaxed")
        bits = tl.reduce(flags, 0, _either)
        if bits != 0:
            tl.atomic_max(words + row, ((layers - layer) << flags_bits) | bits, sem="relaxed")


def check_rows(
    tensors: Sequence[torch.Tensor | None],
    number: int,
    count: int,
    rows: torch.Tensor,
    by_slot: bool,
    words: torch.Tensor,
    peaks: torch.Tensor,
    *,
    full: bool = True,
) -> None:
    """Look at rows 0 to `count` - 1 of the tensors of the layer with this number, from 1.

    Tensors are None or have the shape (rows, heads, size), any strides and the type float16, bfloat16 or float32. A row
    is real if its entry in `rows` is not negative (`by_slot`: the slot mapping), or else if it is below the last entry
    of `rows` (the query start locations). `full`: all is read, and not what PARTS and SAMPLE say. Launches one kernel
    on the current stream and allocates nothing.
    """
    some = next(tensor for tensor in tensors if tensor is not None)
    strides: list[int] = []
    shapes: list[int] = []
    for tensor in tensors:
        if tensor is None:
            strides += [0, 0, 0]
            shapes += [0, 1]
            continue
        heads, size = tensor.shape[1:]
        row, head, step = tensor.stride()
        length = heads * size
        if head == size * step or heads == 1:
            head, size = 0, length  # the row is evenly spaced
        strides += [row, head, step]
        shapes += [length, size]
    # eight values a thread, and a row that is read in full in as few blocks as possible
    block = min(4096, max(128, triton.next_power_of_2(-(-max(shapes[::2]) // (1 if full else 8)))))
    _check_rows[(count,)](
        *(some if tensor is None else tensor for tensor in tensors), number,
        rows, words, peaks, rows.shape[0] - 1, *strides, *shapes,
        block, by_slot, 1 if full else PARTS, PIECE // some.element_size(), 1 if full else SAMPLE, FLAGS, LAYERS,
        num_warps=max(1, block // 256),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _collect(  # type: ignore[no-untyped-def]
    words, starts, logits, logit_starts, found,
    limit, stride, vocabulary, share,
    has_logits: tl.constexpr, width: tl.constexpr, block: tl.constexpr, flags_bits: tl.constexpr,
):  # fmt: skip
    request, which = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, block)
    if which == 0:
        first = tl.load(starts + request)
        end = tl.minimum(tl.load(starts + request + 1), limit)
        most = 0
        for at in range(first, end, block):
            row = at + lane
            most = tl.maximum(most, tl.max(tl.load(words + row, mask=row < end, other=0), 0))
        if most != 0:
            flags = 0
            where = limit
            began = limit
            for at in range(first, end, block):
                row = at + lane
                value = tl.load(words + row, mask=row < end, other=0)
                same = (value >> flags_bits) == (most >> flags_bits)
                flags = flags | tl.reduce(tl.where(same, value & ((1 << flags_bits) - 1), 0), 0, _either)
                where = tl.minimum(where, tl.min(tl.where(same, row, limit), 0))
                # masked by multiplication, a bad key or value spoils the outputs of rows before it too
                inputs = same & ((value & ((1 << (flags_bits - 2)) - 1)) != 0)
                began = tl.minimum(began, tl.min(tl.where(inputs, row, limit), 0))
                tl.store(words + row, tl.zeros([block], dtype=tl.int32), mask=row < end)
            tl.store(found + request * width + 1, tl.where(began < limit, began, where) - first)
            tl.store(found + request * width, ((most >> flags_bits) << flags_bits) | flags)
    elif has_logits:
        flags = tl.zeros([block], dtype=tl.int32)
        begin = (which - 1) * share
        for position in range(tl.load(logit_starts + request), tl.load(logit_starts + request + 1)):
            base = logits + tl.cast(position, tl.int64) * stride
            for at in range(begin, tl.minimum(begin + share, vocabulary), block):
                value = tl.load(base + at + lane, mask=at + lane < tl.minimum(begin + share, vocabulary), other=0.0)
                bits = value.to(tl.float32).to(tl.int32, bitcast=True)
                # with its sign: models rule tokens out with -Inf
                flags = flags | tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 1, tl.where(bits == 0x7F800000, 2, 0))
        bits = tl.reduce(flags, 0, _either)
        if bits != 0:
            tl.store(found + request * width + 1 + which, bits)


def collect(
    words: torch.Tensor,
    starts: torch.Tensor,
    requests: int,
    logits: torch.Tensor | None,
    logit_starts: torch.Tensor,
    found: torch.Tensor,
) -> None:
    """End a step: what its rows and logits hold goes to `found`, which must be 0 before; words become 0 again.

    Request i has the rows starts[i] to starts[i + 1] and the logits logit_starts[i] to logit_starts[i + 1] (logits:
    (positions, vocabulary)). found, (requests or more, FOUND), gets the word of its first bad layer and that layer's
    first row with bad inputs, or else outputs, counted from the request's first, and flags (1: NaN, 2: Inf but not
    -Inf) of each share of its logits. Launches one kernel on the current stream and allocates nothing.
    """
    vocabulary = 0 if logits is None else logits.shape[1]
    block = 1024
    share = triton.cdiv(vocabulary, SPLITS * block) * block
    _collect[(requests, 1 if logits is None else 1 + SPLITS)](
        words, starts, words if logits is None else logits, logit_starts, found,
        words.shape[0], 0 if logits is None else logits.stride(0), vocabulary, share,
        logits is not None, FOUND, block, FLAGS,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row"])
def _inject(tensor, armed, row, stride, value):  # type: ignore[no-untyped-def]
    if tl.load(armed) != 0:
        tl.store(tensor + row.to(tl.int64) * stride, value)


def inject(tensor: torch.Tensor, row: int, value: float, armed: torch.Tensor) -> None:
    """Put a value into the first place of a row, when the kernel runs while `armed` (int32, one word) is not 0."""
    _inject[(1,)](tensor, armed, row, tensor.stride(0), value, num_warps=1)
