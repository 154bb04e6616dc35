# SPDX-License-Identifier: Apache-2.0
"""The words in which the NaN guard notes a finding, and what they mean in an operator's words."""

from collections.abc import Sequence

FLAGS = 8  # bit 2 * tensor + kind, for the four tensors of a layer in their order; kinds NaN, Inf
LAYERS = 1 << 20  # more layers than any model has
KINDS = ("NaN", "Inf")


def word(layer: int, flags: int) -> int:
    """A finding in a layer, by its number from 1; that of an earlier layer is larger."""
    return (LAYERS - layer) << FLAGS | flags


def parts(found: int) -> tuple[int, int]:
    """The layer's number and the flags of a word that is not 0."""
    return LAYERS - (found >> FLAGS), found & ((1 << FLAGS) - 1)


def kinds_of(flags: int) -> str:
    """The kinds of the lowest two bits, as in "NaN, Inf"."""
    return ", ".join(kind for bit, kind in enumerate(KINDS) if flags >> bit & 1)


def bad_inputs(flags: int, inputs: int = 3) -> bool:
    """Whether one of the first `inputs` tensors is bad."""
    return bool(flags & ((1 << 2 * inputs) - 1))


def describe(flags: int, names: Sequence[str], checked: Sequence[bool]) -> str:
    """What is bad, what is clean, and what was not checked, by the tensors' names."""
    bad, clean, unknown = [], [], []
    for place, name in enumerate(names):
        kinds = kinds_of(flags >> 2 * place)
        if kinds:
            bad.append(f"{name} ({kinds})")
        elif checked[place]:
            clean.append(name)
        elif name:
            unknown.append(name)
    words = [", ".join(bad)]
    if clean:
        words.append(f"{', '.join(clean)} clean")
    if unknown:
        words.append(f"{', '.join(unknown)} not checked")
    return "; ".join(words)
