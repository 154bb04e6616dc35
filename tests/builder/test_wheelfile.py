# SPDX-License-Identifier: Apache-2.0
"""A wheel is read only in its plain form: everything in which two readers could see two wheels is refused."""

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder import wheelfile
from builder.errors import InputProblem
from builder.wheel import UpstreamWheel
from tests.builder.toy import FILES, WHEEL, write_wheel, zip_info


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / WHEEL, FILES)


def refusal(path: Path) -> str:
    with path.open("rb") as file, pytest.raises(InputProblem) as caught:
        wheel = UpstreamWheel(file)
        for name in wheel.members:
            wheel.read(name)
    assert caught.value.status == 3
    return str(caught.value)


def rewrite(path: Path, change: Callable[[zipfile.ZipFile], None]) -> str:
    """The refusal of a wheel to which `change` added something."""
    with zipfile.ZipFile(path, "a") as archive:
        change(archive)
    return refusal(path)


def test_plain_wheel_is_read(plain: Path) -> None:
    with plain.open("rb") as file:
        wheel = UpstreamWheel(file)
        assert {name: wheel.read(name) for name in FILES} == FILES


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../up.py", "vllm/../../up.py", "vllm//a.py", "vllm/./a.py", "vllm\\a.py", "C:/a.py", "vllm/\n.py"],
)
def test_unsafe_names_are_refused(plain: Path, name: str) -> None:
    info = zip_info("placeholder")
    info.filename = name
    assert "relative names" in rewrite(plain, lambda archive: archive.writestr(info, b""))


@pytest.mark.parametrize("mode", [0o120777, 0o040755, 0o020644, 0o644], ids=["link", "folder", "device", "no type"])
def test_members_that_are_no_regular_files_are_refused(plain: Path, mode: int) -> None:
    assert "regular file" in rewrite(plain, lambda archive: archive.writestr(zip_info("vllm/link", mode), b"/etc"))


def test_duplicate_name_is_refused(plain: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        message = rewrite(plain, lambda archive: archive.writestr(zip_info("vllm/cli.py"), b"evil"))
    assert "twice" in message


def test_names_that_differ_in_case_only_are_refused(plain: Path) -> None:
    assert "case" in rewrite(plain, lambda archive: archive.writestr(zip_info("vllm/CLI.py"), b""))


def test_file_that_is_also_a_folder_is_refused(plain: Path) -> None:
    assert "as both" in rewrite(plain, lambda archive: archive.writestr(zip_info("vllm/cli.py/x.py"), b""))


def test_data_descriptor_is_refused(plain: Path) -> None:
    class Pipe(io.RawIOBase):
        """A target that cannot seek makes zipfile write data descriptors."""

        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]
            self.data += bytes(data)
            return len(data)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:  # type: ignore[arg-type]
        archive.writestr(zip_info("vllm/a.py"), b"data")
    plain.write_bytes(pipe.data)
    assert "flags 0x8" in refusal(plain)


def test_zip64_is_refused(plain: Path) -> None:
    def change(archive: zipfile.ZipFile) -> None:
        with archive.open(zip_info("vllm/big.py"), "w", force_zip64=True) as member:
            member.write(b"data")

    assert "expected" in rewrite(plain, change)


def test_extra_field_is_refused(plain: Path) -> None:
    info = zip_info("vllm/a.py")
    info.extra = struct.pack("<HHL", 0x7875, 4, 0)
    assert "extra field" in rewrite(plain, lambda archive: archive.writestr(info, b""))


def test_comment_is_refused(plain: Path) -> None:
    def change(archive: zipfile.ZipFile) -> None:
        archive.comment = b"hello"

    assert "comment" in rewrite(plain, change)


def test_other_compression_is_refused(plain: Path) -> None:
    info = zip_info("vllm/a.py")
    info.compress_type = zipfile.ZIP_BZIP2
    assert "expected" in rewrite(plain, lambda archive: archive.writestr(info, b"data"))


def lying_about_size(plain: Path, size: int) -> None:
    """Give vllm/cli.py another uncompressed size, in both headers and in RECORD alike."""
    real = len(FILES["vllm/cli.py"])
    data = plain.read_bytes()
    with zipfile.ZipFile(plain) as archive:
        info = archive.getinfo("vllm/cli.py")
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        start = data.index(
            b"vllm/cli.py",
            data.index(signature, info.header_offset if signature == b"PK\3\4" else data.index(b"PK\1\2")),
        )
        start -= 30 if signature == b"PK\3\4" else 46
        assert struct.unpack_from("<L", data, start + offset)[0] == real
        data = data[: start + offset] + struct.pack("<L", size) + data[start + offset + 4 :]
    plain.write_bytes(data)


@pytest.mark.parametrize("difference", [-1, 1, 1000])
def test_member_that_lies_about_its_size_is_refused(plain: Path, difference: int) -> None:
    size = len(FILES["vllm/cli.py"]) + difference
    lying_about_size(plain, size)
    with plain.open("rb") as file:
        members = {member.name: member for member in wheelfile.read_members(file)}
        assert members["vllm/cli.py"].size == size
        with pytest.raises(InputProblem, match=r"cli\.py"):
            wheelfile.read_member(file, members["vllm/cli.py"])
    assert "RECORD" in refusal(plain)


def test_record_that_leaves_a_member_out_is_refused(plain: Path) -> None:
    assert "RECORD to list each member" in rewrite(
        plain, lambda archive: archive.writestr(zip_info("vllm/extra.py"), b"")
    )


def test_bytes_between_members_are_refused(plain: Path) -> None:
    """Appended archives keep old bytes in place; one installer sees them over HTTP and refuses the wheel."""
    data = plain.read_bytes()
    directory = data.index(b"PK\1\2")
    end = bytearray(data[-22:])
    struct.pack_into("<L", end, 16, directory + 4)
    plain.write_bytes(data[:directory] + b"evil" + data[directory:-22] + end)
    assert "no bytes between" in refusal(plain)


@pytest.mark.parametrize("kept", [0, 10, 0.3, 0.7, 0.99])
def test_truncated_wheel_is_refused(plain: Path, kept: float) -> None:
    data = plain.read_bytes()
    plain.write_bytes(data[: int(kept * len(data)) if kept < 1 else int(kept)])
    assert "expected" in refusal(plain)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any bytes changed anywhere: the wheel is read as before, or refused with our error and no other."""
    path = write_wheel(tmp_path_factory.mktemp("fuzz") / WHEEL, FILES)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        with path.open("rb") as file:
            wheel = UpstreamWheel(file)
            read = {name: wheel.read(name) for name in FILES}
    except InputProblem:
        return
    assert read == FILES


@pytest.mark.parametrize(
    "record",
    [b"\xff\xfe", b"a,b\n", b"a" * 200_000 + b",b,c\n", b"", b'"', b"vllm/cli.py,sha256=x,1\n", b"\0,,\n"],
    ids=["no UTF-8", "short row", "long field", "empty", "open quote", "bad hash", "NUL"],
)
def test_record_of_any_content_is_an_error_of_ours(tmp_path: Path, record: bytes) -> None:
    """The checksums are right here, so that what refuses it is the reader of RECORD."""
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in [*FILES.items(), ("vllm-0.27.1.dist-info/RECORD", record)]:
            archive.writestr(zip_info(name), data)
    assert "RECORD" in refusal(path)


def test_record_with_a_name_twice_is_refused(plain: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(plain) as archive:
        record = archive.read("vllm-0.27.1.dist-info/RECORD")
    first = record.splitlines(keepends=True)[0]
    path = tmp_path / "twice" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in [*FILES.items(), ("vllm-0.27.1.dist-info/RECORD", first + record)]:
            archive.writestr(zip_info(name), data)
    assert "once" in refusal(path)
