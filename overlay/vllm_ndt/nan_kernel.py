# SPDX-License-Identifier: Apache-2.0
"""The NaN guard's Triton kernel: one launch a layer, one program a row, no store unless a value is bad.

The kernel keeps everything that a replayed CUDA graph needs on the device. Memory that it uses, all int32:

- ``state`` (2 words on the device): the number of the first layer with a hit (0: none yet), set with a
  compare-and-swap, and a seal. Rows of the same launch may still add to the report, because a bad key in one row
  shows in the output of others; the next layer's launch sets the seal, after which nothing is added.
- ``report`` (1 + 8 words of pinned host memory): the layer's number and one word for each flag, in the order of
  ``FLAGS``. Only plain stores of a constant go there, so rows need no order among themselves.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

FLAGS = 8  # 2 * tensor + kind; tensors q, k, v, output; kinds NaN, Inf


@triton.jit
def _either(a, b):  # type: ignore[no-untyped-def]
    return a | b


@triton.jit  # type: ignore[untyped-decorator]
def _flags(  # type: ignore[no-untyped-def]
    acc, base, head, step,
    length: tl.constexpr, size: tl.constexpr, block: tl.constexpr, flag: tl.constexpr,
):  # fmt: skip
    """acc with bit `flag` for each NaN and bit `flag` + 1 for each Inf of one row of `length` values."""
    for start in tl.static_range(0, length, block):
        index = start + tl.arange(0, block)
        place = index * step if size == length else (index // size) * head + (index % size) * step
        value = tl.load(base + place, mask=index < length, other=0.0)
        # On the bits, so that no fast-math rule can fold the comparison away.
        magnitude = value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        acc = acc | tl.where(magnitude > 0x7F800000, 1 << flag, tl.where(magnitude == 0x7F800000, 2 << flag, 0))
    return acc


@triton.jit(do_not_specialize=["layer", "last"], do_not_specialize_on_alignment=["rows"])  # type: ignore[untyped-decorator]
def _check_rows(  # type: ignore[no-untyped-def]
    q, k, v, out,
    rows, state, report,
    layer, last,
    q_row, q_head, q_step,
    k_row, k_head, k_step,
    v_row, v_head, v_step,
    out_row, out_head, out_step,
    q_length: tl.constexpr, q_size: tl.constexpr,
    k_length: tl.constexpr, k_size: tl.constexpr,
    v_length: tl.constexpr, v_size: tl.constexpr,
    out_length: tl.constexpr, out_size: tl.constexpr,
    block: tl.constexpr, by_slot: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = pid.to(tl.int64)
    first = tl.load(state)
    if (pid == 0) & (first != 0) & (first != layer):
        tl.store(state + 1, 1)
    if (first == 0) | (first == layer):
        real = tl.load(rows + row) >= 0 if by_slot else pid < tl.load(rows + last)
        if real:
            acc = tl.zeros([block], dtype=tl.int32)
            acc = _flags(acc, q + row * q_row, q_head, q_step, q_length, q_size, block, 0)
            acc = _flags(acc, k + row * k_row, k_head, k_step, k_length, k_size, block, 2)
            acc = _flags(acc, v + row * v_row, v_head, v_step, v_length, v_size, block, 4)
            acc = _flags(acc, out + row * out_row, out_head, out_step, out_length, out_size, block, 6)
            if tl.max(acc, 0) != 0:
                bits = tl.reduce(acc, 0, _either)
                owner = tl.atomic_cas(state, 0, layer)
                if ((owner == 0) | (owner == layer)) & (tl.load(state + 1) == 0):
                    lane = tl.arange(0, 8)
                    tl.store(report + 1 + lane, tl.full([8], 1, tl.int32), mask=((bits >> lane) & 1) != 0)
                    tl.store(report, layer)


def check_rows(
    tensors: Sequence[torch.Tensor | None],
    count: int,
    rows: torch.Tensor,
    by_slot: bool,
    state: torch.Tensor,
    report: torch.Tensor,
    layer: int,
) -> None:
    """Look at rows 0 to `count` - 1 of q, k, v and the output, in that order; None for a tensor to leave out.

    Each tensor has the shape (rows, heads, size), any strides and the type float16, bfloat16 or float32. A row is real
    if its entry in `rows` is not negative (`by_slot`: the slot mapping), or else if it is below the last entry of
    `rows` (the query start locations). `layer` counts from 1. Launches one kernel on the current stream and allocates
    nothing.
    """
    some = next(tensor for tensor in tensors if tensor is not None)
    pointers, strides, shapes = [], [], []
    for tensor in tensors:
        if tensor is None:
            pointers.append(some)
            strides += [0, 0, 0]
            shapes += [0, 1]
            continue
        heads, size = tensor.shape[1:]
        row, head, step = tensor.stride()
        length = heads * size
        if head == size * step or heads == 1:
            head, size = 0, length  # the row is evenly spaced
        pointers.append(tensor)
        strides += [row, head, step]
        shapes += [length, size]
    # About four blocks for the longest row; eight values a thread.
    block = min(4096, max(128, triton.next_power_of_2(-(-max(shapes[::2]) // 4))))
    _check_rows[(count,)](
        *pointers, rows, state, report, layer, rows.shape[0] - 1, *strides, *shapes, block, by_slot,
        num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
