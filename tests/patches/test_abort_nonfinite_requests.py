# SPDX-License-Identifier: Apache-2.0
"""Patch abort-nonfinite-requests: a hit request ends with an error, and nobody else notices, then or later."""

from typing import Any

import pytest
from nan_engine import outcome
from tiny_models import write_text_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcome("abort", write_text_model(tmp_path_factory.mktemp("model")), "abort")


def test_exactly_the_hit_request_ends_and_others_are_as_without_it(found: Any) -> None:
    clean = found["clean"]
    assert {reason for _, reason in clean} == {"length"}
    assert len(found["faults"]) == 8
    for layer, tensor, prefill, hit, *_ in found["faults"]:
        which = f"{layer}, {tensor}, {'prefill' if prefill else 'decode'}: {hit}"
        assert [reason for _, reason in hit] == ["length", "error", "length"], which
        assert [hit[0], hit[2]] == [clean[0], clean[2]], which
        # no token of the step that went bad leaves
        assert hit[1][0] == clean[1][0][: 0 if prefill else 1], which


def test_later_requests_are_as_in_a_clean_run(found: Any) -> None:
    """With the same prefix and with others, until each block of the pool was used again; the pool holds no NaN then."""
    for layer, tensor, prefill, hit, later, reused, finite, lines in found["faults"]:
        which = f"{layer}, {tensor}, {'prefill' if prefill else 'decode'}: {hit}"
        # a run without an error has nothing to clean
        assert hit[1][1] == "error", which
        assert later, which
        assert reused, which
        assert finite, which
        assert lines == 1, which
