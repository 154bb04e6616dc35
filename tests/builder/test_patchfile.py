# SPDX-License-Identifier: Apache-2.0
"""Patches are read strictly and applied at their own lines, or refused with a reason."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.errors import PatchProblem
from builder.patchfile import apply, parse
from tests.builder.toy import FILES, PATCH

MAIL, _, DIFF = PATCH.partition("---\n")
BEFORE = FILES["vllm/lines.py"]


def read(path: str) -> bytes | None:
    return FILES.get(path)


def with_diff(diff: str) -> bytes:
    return (MAIL + "---\n" + diff).encode()


def refusal(data: bytes) -> str:
    """The message with which a patch is refused, by the reader or when it is applied."""
    with pytest.raises(PatchProblem) as caught:
        apply(parse("toy", data), read)
    assert caught.value.status == 4
    return str(caught.value)


def test_good_patch_is_read_and_applied() -> None:
    patch = parse("toy", PATCH.encode())
    assert patch.subject == "Change line ten"
    assert patch.body == "So that there is something to apply."
    assert patch.trailers["Test"] == "tests/test_toy.py::test_ten"
    after = apply(patch, read)
    assert after == {"vllm/lines.py": BEFORE.replace(b"# line 10\n", b"# line ten\n# changed by vllm-ndt: ten\n")}


def test_look_alike_place_is_no_match() -> None:
    """The same lines stand elsewhere: git apply would move the hunk there; here it is refused, with both lines."""
    lines = BEFORE.splitlines(keepends=True)
    moved = b"".join([*lines[:3], b"# new\n", *lines[3:]])
    with pytest.raises(
        PatchProblem, match=r"vllm/lines.py: hunk 1: expected line 7 to be '# line 7', found '# line 6'"
    ):
        apply(parse("toy", PATCH.encode()), {"vllm/lines.py": moved}.get)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# line 8", "# line eight", "hunk 1: expected line 8 to be '# line eight', found '# line 8'"),
        ("@@ -7,7", "@@ -8,7", "hunk 1"),
        ("+7,8 @@", "+9,8 @@", "new line 7, found 9"),
        ("-7,7 +7,8", "-7,6 +7,8", "hunk 1"),
        ("-7,7 +7,8", "-7,9 +7,9", "hunk 1"),
        ("@@ -7,7 +7,8 @@\n # line 7\n", "@@ -8,6 +8,7 @@\n", "3 lines of context"),
        ("\n # line 13\n", "\n", "hunk 1"),
        ("vllm/lines.py", "vllm/nothing.py", "no such file"),
        ("vllm/lines.py", "../lines.py", "stay inside"),
        ("vllm/lines.py", "vllm/../lines.py", "stay inside"),
        ("vllm/lines.py", "/etc/passwd", "stay inside"),
        ("vllm/lines.py", "vllm/a b.py", "one plain path"),
        ("vllm/lines.py", "vllm/\\303\\274.py", "stay inside"),
        ("vllm/lines.py", "vllm/\0.py", "stay inside"),
        (" 100644\n", " 120000\n", "full index line"),
        (" 100644\n", " 160000\n", "full index line"),
        ("index 0000000000000000000000000000000000000001..", "index 0000001..", "full index line"),
        ("diff --git a/vllm/lines.py b/vllm/lines.py", 'diff --git "a/vllm/lines.py" "b/vllm/lines.py"', "plain path"),
        ("diff --git a/vllm/lines.py b/vllm/lines.py", "diff --git a/vllm/lines.py b/vllm/renamed.py", "plain path"),
        ("+# line ten\n+# changed by vllm-ndt: ten\n", " # line ten\n", "hunk 1"),
    ],
)
def test_damaged_patch_is_refused(old: str, new: str, message: str) -> None:
    assert old in PATCH
    assert message in refusal(PATCH.replace(old, new).encode())


@pytest.mark.parametrize(
    "diff",
    [
        "diff --git a/vllm/lines.py b/vllm/lines.py\nold mode 100644\nnew mode 100755\n",
        "diff --git a/vllm/lines.py b/vllm/more.py\nsimilarity index 100%\nrename from vllm/lines.py\nrename to vllm/more.py\n",
        "diff --git a/vllm/lines.py b/vllm/lines.py\nold mode 100644\nnew mode 100755\nsimilarity index 90%\n",
        f"diff --git a/vllm/new.py b/vllm/new.py\nnew file mode 100644\nindex {'0' * 40}..{'1' * 40}\n",
        f"diff --git a/vllm/new b/vllm/new\nnew file mode 120000\nindex {'0' * 40}..{'1' * 40}\n--- /dev/null\n+++ b/vllm/new\n"
        "@@ -0,0 +1 @@\n+/etc\n\\ No newline at end of file\n",
        "diff --git a/vllm/lines.py b/vllm/lines.py\ndeleted file mode 100644\n",
        f"diff --git a/vllm/native.abi3.so b/vllm/native.abi3.so\nindex {'0' * 40}..{'1' * 40} 100644\nGIT binary patch\nliteral 0\n",
        f"diff --git a/vllm/native.abi3.so b/vllm/native.abi3.so\nindex {'0' * 40}..{'1' * 40} 100644\n"
        "Binary files a/vllm/native.abi3.so and b/vllm/native.abi3.so differ\n",
        DIFF + DIFF,
        "",
        "Index: vllm/lines.py\n--- a/vllm/lines.py\n+++ b/vllm/lines.py\n",
        DIFF + "-- \n2.39.5\n",
    ],
    ids=[
        "mode",
        "rename",
        "rename and mode",
        "empty file",
        "link",
        "deletion",
        "binary",
        "binary differ",
        "twice",
        "none",
        "no git",
        "signature",
    ],
)
def test_what_is_no_plain_change_is_refused(diff: str) -> None:
    assert "expected" in refusal(with_diff(diff))


@pytest.mark.parametrize("trailer", ["Origin", "Forwarded", "Layer", "Test", "Drop-When"])
def test_missing_trailer_is_named(trailer: str) -> None:
    assert f"no {trailer}" in refusal(re.sub(rf"^{trailer}: .*\n", "", PATCH, flags=re.MULTILINE).encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0000000000 Mon Sep 17 00:00:00 2001", "0000000001 Mon Sep 17 00:00:00 2001"),
        ("Subject: [PATCH] Change", "Subject: Change"),
        ("So that there is something to apply.\n\n", ""),
        ("Layer: python", "Layer: fortran"),
        ("\n---\n", "\n"),
    ],
)
def test_other_mail_form_is_refused(old: str, new: str) -> None:
    assert old in PATCH
    assert "expected" in refusal(PATCH.replace(old, new).encode())


def test_crlf_patch_is_refused() -> None:
    assert "expected LF line ends, found CRLF" in refusal(PATCH.replace("\n", "\r\n").encode())


def test_crlf_file_is_patched_byte_for_byte() -> None:
    diff = (
        f"diff --git a/vllm/crlf.py b/vllm/crlf.py\nindex {'0' * 40}..{'1' * 40} 100644\n--- a/vllm/crlf.py\n+++ b/vllm/crlf.py\n"
        "@@ -1,2 +1,2 @@\n ONE = 1\r\n-TWO = 2\r\n+TWO = 22\r\n"
    )
    assert apply(parse("toy", with_diff(diff)), read) == {"vllm/crlf.py": b"ONE = 1\r\nTWO = 22\r\n"}


@pytest.mark.parametrize(
    ("tail", "after"),
    [
        ("-LAST = 'no newline'\n\\ No newline at end of file\n+LAST = 1\n", b"LAST = 1\n"),
        ("-LAST = 'no newline'\n\\ No newline at end of file\n+LAST = 1\n\\ No newline at end of file\n", b"LAST = 1"),
    ],
)
def test_missing_last_newline_is_kept_or_added(tail: str, after: bytes) -> None:
    diff = (
        f"diff --git a/vllm/unended.py b/vllm/unended.py\nindex {'0' * 40}..{'1' * 40} 100644\n"
        f"--- a/vllm/unended.py\n+++ b/vllm/unended.py\n@@ -1 +1 @@\n{tail}"
    )
    assert apply(parse("toy", with_diff(diff)), read) == {"vllm/unended.py": after}


def test_newline_that_the_file_lacks_is_no_match() -> None:
    diff = (
        f"diff --git a/vllm/unended.py b/vllm/unended.py\nindex {'0' * 40}..{'1' * 40} 100644\n"
        "--- a/vllm/unended.py\n+++ b/vllm/unended.py\n@@ -1 +1 @@\n-LAST = 'no newline'\n+LAST = 1\n"
    )
    assert "hunk 1: expected line 1" in refusal(with_diff(diff))


texts = st.lists(st.sampled_from(["a", "b", "", "  c", "\td", "e\r", "# f"]), max_size=40).flatmap(
    lambda lines: st.sampled_from(["\n", ""]).map(lambda end: "\n".join(lines) + end)
)


@settings(max_examples=150, deadline=None)
@given(texts, texts)
def test_result_is_that_of_git(tmp_path_factory: pytest.TempPathFactory, old: str, new: str) -> None:
    """What git diff writes between two texts turns the one into the other here too."""
    if old == new or not old or not new:
        return
    folder = tmp_path_factory.mktemp("git")
    for side, text in (("a", old), ("b", new)):
        (folder / side / "vllm").mkdir(parents=True)
        (folder / side / "vllm" / "f.py").write_bytes(text.encode())
    command = [
        "git",
        "-c",
        "core.autocrlf=false",
        "diff",
        "--no-index",
        "--no-prefix",
        "--full-index",
        "--text",
        "-U3",
        "a/vllm/f.py",
        "b/vllm/f.py",
    ]
    environment = {
        "PATH": "/usr/bin:/bin:/usr/local/bin",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "HOME": str(folder),
    }
    diff = subprocess.run(command, cwd=folder, capture_output=True, check=False, env=environment).stdout
    assert diff.startswith(b"diff --git a/vllm/f.py b/vllm/f.py\n"), diff
    patch = parse("toy", (MAIL + "---\n").encode() + diff)
    assert apply(patch, {"vllm/f.py": old.encode()}.get) == {"vllm/f.py": new.encode()}


def test_git_reads_the_patch_the_same(tmp_path: Path) -> None:
    """The project's form is one that git am takes."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "lines.py").write_bytes(BEFORE)
    (tmp_path / "toy.patch").write_text(PATCH)
    identity = ["-c", "user.name=toy", "-c", "user.email=toy@toy.invalid", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "vllm"], ["commit", "-qm", "base"], ["am", "-q", "toy.patch"]):
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "vllm" / "lines.py").read_bytes() == apply(parse("toy", PATCH.encode()), read)["vllm/lines.py"]
