# SPDX-License-Identifier: Apache-2.0
"""The architectures that `vllm_ndt.fatbin` finds in small ELF files made here, and what it says of damaged ones."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_ndt import fatbin
from vllm_ndt.fatbin import CUBIN, PTX, Arch, FatbinError

A, F, ZSTD, LZ4, PLAIN = 1 << 20, 1 << 21, 0x8011, 0x2011, 0x11


def entry(kind: int, sm: int, flags: int = PLAIN, payload: bytes = b"\x7fELF" + b"x" * 60, head: int = 64) -> bytes:
    """An entry: kind 1 is PTX, 2 is a cubin; `head` is its header's size, which newer entries have larger."""
    compressed = len(payload) if flags & (ZSTD | LZ4) != PLAIN else 0
    fields = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, head, len(payload), compressed, 0, 8, 1, sm, 0, 0, flags, 0, 0)
    return fields + b"\xff" * (head - 64) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def elf(sections: dict[bytes, bytes]) -> bytes:
    """A 64-bit little-endian ELF library with these sections and nothing else."""
    names = b"\0" + b"".join(name + b"\0" for name in [*sections, b".shstrtab"])
    body, headers = b"", [bytes(64)]
    for name, data in {**sections, b".shstrtab": names}.items():
        at = 64 + len(body)
        headers.append(
            struct.pack("<IIQQQQIIQQ", names.index(b"\0" + name + b"\0") + 1, 1, 0, 0, at, len(data), 0, 0, 8, 0)
        )
        body += data
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(headers), len(headers) - 1
    )
    return head + body + b"".join(headers)


def found(tmp_path: Path, data: bytes) -> list[str]:
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(data)
    return [str(arch) for arch in fatbin.architectures(path)]


GOOD = elf({b".text": b"code", b".nv_fatbin": container(entry(2, 75), entry(2, 90, ZSTD | A), entry(1, 80, ZSTD))})


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (container(entry(2, 80)), ["sm_80"]),
        (container(entry(2, 80, ZSTD, b"\x28\xb5\x2f\xfd")), ["sm_80"]),
        (container(entry(2, 70, LZ4, b"\xf0")), ["sm_70"]),
        (container(entry(1, 80, payload=b".version 9.0")), ["compute_80"]),
        (container(entry(2, 90, ZSTD | A), entry(2, 100, ZSTD | F, head=112)), ["sm_90a", "sm_100f"]),
        (container(entry(2, 80), entry(2, 75)) + container(entry(2, 120)), ["sm_75", "sm_80", "sm_120"]),
        # containers are aligned, also beyond a page
        (container(entry(2, 80)) + bytes(24) + container(entry(2, 90)) + bytes(9000), ["sm_80", "sm_90"]),
        (container(entry(2, 80)) * 50, ["sm_80"]),
        # of a kind that is neither
        (container(entry(16, 80), entry(2, 89)), ["sm_89"]),
        (container(), []),
        (b"", []),
        (bytes(5000), []),
    ],
)
def test_architectures_of_a_section(tmp_path: Path, section: bytes, expected: list[str]) -> None:
    assert found(tmp_path, elf({b".text": b"code", b".nv_fatbin": section})) == expected


def test_a_library_without_gpu_code_has_none(tmp_path: Path) -> None:
    assert found(tmp_path, elf({b".text": b"code", b".nv_fatbin_other": b"no fat binary"})) == []


def test_the_real_thing_is_all_found(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD) == ["sm_75", "sm_90a", "compute_80"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an empty file"),
        (b"no library at all", "expected an ELF library, found b'no l'"),
        (b"\x7fELF\x01\x01" + bytes(100), "64-bit"),
        (b"\x7fELF\x02\x01", "its beginning alone"),
        (b"\x7fELF\x02\x01" + bytes(58), "section headers"),
        (GOOD[:-1], "cut off"),
        (GOOD[:300], "cut off"),
        (elf({b".nv_fatbin": b"x" * 64}), "in place of 0xba55ed50"),
        (elf({b".nv_fatbin": container(entry(2, 80))[:-1]}), "of fat binary"),
        (elf({b".nv_fatbin": container(entry(2, 80)[:40])}), "an entry"),
        (elf({b".nv_fatbin": container(entry(2, 80)[:-8])}), "bytes of entry"),
        (elf({b".nv_fatbin": container(entry(2, 80)) + b"\x50"}), "the end of the section"),
        (elf({b".nv_fatbin": container(entry(2, 12345))}), "an architecture"),
    ],
)
def test_damage_is_named_with_the_file(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(FatbinError, match=r"^_C\.abi3\.so: expected") as error:
        found(tmp_path, data)
    assert said in str(error.value)


def test_a_file_that_cannot_be_read_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        fatbin.architectures(tmp_path / "nothing.so")
    with pytest.raises(OSError):
        fatbin.architectures(tmp_path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=8)), max_size=4), cut=st.integers(0, len(GOOD)))  # fmt: skip
def test_damage_gives_an_answer_or_its_own_error(tmp_path: Path, edits: list[tuple[int, bytes]], cut: int) -> None:
    data = bytearray(GOOD)
    for at, change in edits:
        data[at : at + len(change)] = change
    try:
        for arch in found(tmp_path, bytes(data[:cut] if edits and cut % 2 else data)):
            assert arch.startswith(("sm_", "compute_"))
    except FatbinError as error:
        assert "expected" in str(error)


@pytest.mark.parametrize(
    ("arch", "runs", "does_not"),
    [
        (Arch(CUBIN, 75), [(7, 5)], [(7, 0), (8, 0)]),
        (Arch(CUBIN, 80), [(8, 0), (8, 9)], [(7, 5), (9, 0)]),
        (Arch(PTX, 80), [(8, 0), (9, 0), (12, 0)], [(7, 0), (7, 5)]),
        (Arch(CUBIN, 90, "a"), [(9, 0)], [(10, 0)]),
        (Arch(PTX, 90, "a"), [(9, 0)], [(10, 0)]),
        (Arch(CUBIN, 100, "f"), [(10, 0), (10, 3)], [(12, 0)]),
        (Arch(CUBIN, 120), [(12, 0), (12, 1)], [(10, 0)]),
    ],
)
def test_what_runs_where(arch: Arch, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]) -> None:
    assert all(arch.runs_on(*card) for card in runs)
    assert not any(arch.runs_on(*card) for card in does_not)
