# SPDX-License-Identifier: Apache-2.0
"""A toy project: build.py and builder/ as they are, with a tiny upstream wheel, one patch and a small overlay."""

import base64
import csv
import datetime
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from builder import lockfile, wheel
from builder.hashing import sha256_of
from builder.inputs import Project, read_inputs
from builder.lockfile import Artefact, Closure, PinnedPatch, PinnedWheel, Release
from builder.pipeline import describe
from builder.wheel import UpstreamWheel

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "vllm-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl"
BUILT = "vllm-0.27.1+ndt.1-cp38-abi3-manylinux_2_28_x86_64.whl"
LINES = [f"line {number}\n" for number in range(1, 31)]

VERSION = """\
__version__ = version = '0.27.1'
__version_tuple__ = version_tuple = (0, 27, 1)
"""
METADATA = """\
Metadata-Version: 2.4
Name: vllm
Version: 0.27.1
Requires-Python: >=3.10
License-File: LICENSE

# vLLM
"""
FILES = {
    "vllm/__init__.py": b"from vllm._version import __version__\n",
    "vllm/_version.py": VERSION.encode(),
    "vllm/lines.py": "".join(f"# {line}" for line in LINES).encode(),
    "vllm/crlf.py": b"ONE = 1\r\nTWO = 2\r\n",
    "vllm/unended.py": b"LAST = 'no newline'",
    "vllm/configs/E=8,N=3584,device_name=H100.json": b"{}\n",
    "vllm/native.abi3.so": b"\x7fELF" + bytes(100),
    "vllm/tool.sh": b"#!/bin/sh\necho tool\n",
    "vllm/cli.py": b"def main():\n    import vllm\n    print(vllm.__version__)\n",
    "vllm-0.27.1.dist-info/METADATA": METADATA.encode(),
    "vllm-0.27.1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: false\nTag: cp38-abi3-linux_x86_64\n",
    "vllm-0.27.1.dist-info/entry_points.txt": b"[console_scripts]\nvllm = vllm.cli:main\n",
    "vllm-0.27.1.dist-info/top_level.txt": b"vllm\n",
    "vllm-0.27.1.dist-info/licenses/LICENSE": b"Apache-2.0\n",
}
MODES = {"vllm/tool.sh": 0o100755, "vllm-0.27.1.dist-info/RECORD": 0o100664}

PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: toy <toy@toy.invalid>
Date: Thu, 13 Aug 2026 00:00:00 +0000
Subject: [PATCH] Change line ten

So that there is something to apply.

Origin: toy
Forwarded: not-needed: a toy
Layer: python
Test: tests/test_toy.py::test_ten
Drop-When: never
---
diff --git a/vllm/lines.py b/vllm/lines.py
index 0000000000000000000000000000000000000001..0000000000000000000000000000000000000002 100644
--- a/vllm/lines.py
+++ b/vllm/lines.py
@@ -7,7 +7,8 @@
 # line 7
 # line 8
 # line 9
-# line 10
+# line ten
+# changed by vllm-ndt: ten
 # line 11
 # line 12
 # line 13
"""
# the overlay's own modules; patches of the toy call none of them
CLI = tuple(sorted(path.stem for path in (ROOT / "overlay" / "vllm_ndt").glob("*.py")))


def zip_info(name: str, mode: int = 0o100644) -> zipfile.ZipInfo:
    """A member as upstream's wheels have it."""
    info = zipfile.ZipInfo(name, (2026, 8, 11, 8, 44, 56))
    info.create_system = 3
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def write_wheel(path: Path, files: dict[str, bytes]) -> Path:
    """Write a wheel in upstream's plain form, with a RECORD."""
    record = next(name for name in files if name.endswith(".dist-info/METADATA")).replace("METADATA", "RECORD")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((record, "", ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in [*files.items(), (record, text.getvalue().encode())]:
            archive.writestr(zip_info(name, MODES.get(name, 0o100644)), data)
    return path


@dataclass
class Toy:
    """A checkout of the toy project, the folder that serves as its package index, and its cache."""

    root: Path
    index: Path
    cache: Path

    @property
    def patch(self) -> Path:
        return self.root / "patches" / "0.27.1" / "change-line-ten.patch"

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    def run(
        self,
        *arguments: str,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run build.py of the toy with its own cache and index, and no more of the environment than a shell has."""
        command = [python, str(self.root / "build.py"), *arguments, "--cache", str(self.cache)]
        return subprocess.run(
            command,
            cwd=cwd or self.root,
            env=self.environment() | (environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )

    def environment(self) -> dict[str, str]:
        """A plain environment in which pip knows the toy's index only, and no builder of images works."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PIP_", "PYTHON", "UV", "GIT_", "LC_"))
        }
        return kept | {
            "PATH": f"{self.root.parent / 'bin'}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
            "PIP_CONFIG_FILE": os.devnull,
            "LC_ALL": "C.UTF-8",
        }

    def pin(self, label: str = "ndt.1") -> Release:
        """Write the lock that fits the checkout as it is now, as `build.py lock` would with a network."""
        project = Project(self.root)
        wheel_path = self.index / WHEEL
        artefact = Artefact("vllm", "cuda", "x86_64", WHEEL, wheel_path.stat().st_size, sha256_of(wheel_path))
        inputs = read_inputs(project, "0.27.1")
        closure = Closure("cuda", "toy.txt", sha256_of(project.locks / "toy.txt"))
        release = Release(
            version="0.27.1",
            commit="abc",
            date=datetime.date(2026, 8, 11),
            label=label,
            source_date_epoch=1786406401,
            closure_date=datetime.datetime(2026, 8, 13, tzinfo=datetime.timezone.utc),
            packages={},
            image={},
            artefact=(artefact,),
            patch=tuple(PinnedPatch(entry.path, entry.sha256) for entry in inputs.entries),
            closure=(closure,),
        )
        with wheel_path.open("rb") as file:
            upstream = UpstreamWheel(file)
            changes = inputs.changes(set(upstream.members), upstream.read)
            content = inputs.content(changes, ("packaging==26.3", "tomli==2.4.1 ; python_version < '3.11'"))
            written = wheel.write(upstream, describe(release, artefact), content, self.cache / "pinned")
        pinned = PinnedWheel(label, "cuda", "x86_64", written.path.name, written.sha256, f"sha256:{written.manifest}")
        changed = tuple(change.pin(path) for path, change in sorted(changes.items()))
        release = replace(release, changed=changed, wheel=(pinned,))
        project.versions.write_text(lockfile.dump({"0.27.1": release}), "utf-8")
        return release


def make_toy(folder: Path, tools: Path) -> Toy:
    """A toy project below `folder`, with the packages of build.py taken from `tools`."""
    toy = Toy(folder / "checkout", folder / "index", folder / "cache")
    toy.root.mkdir(parents=True)
    for name in ("build.py", ".gitattributes"):
        shutil.copy(ROOT / name, toy.root)
    shutil.copytree(ROOT / "builder", toy.root / "builder", ignore=shutil.ignore_patterns("__pycache__"))
    package = toy.root / "overlay" / "vllm_ndt"
    package.mkdir(parents=True)
    for name in CLI:
        shutil.copy(ROOT / "overlay" / "vllm_ndt" / f"{name}.py", package)
    (toy.root / "locks").mkdir()
    shutil.copy(ROOT / "locks" / "tools.txt", toy.root / "locks")
    (toy.root / "locks" / "toy.txt").write_text(
        "packaging==26.3 \\\n    --hash=sha256:00\ntomli==2.4.1 ; python_version < '3.11' \\\n    --hash=sha256:00\n"
    )
    (toy.root / "tests").mkdir()
    (toy.root / "tests" / "test_toy.py").write_text("def test_ten():\n    assert True\n")
    toy.patch.parent.mkdir(parents=True)
    toy.patch.write_text(PATCH)
    (toy.patch.parent / "series").write_text("# the toy's patches\n\nchange-line-ten.patch\n")
    (folder / "bin").mkdir()
    for name in ("docker", "buildah", "podman"):
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\necho '{name} is broken here' >&2\nexit 1\n")
        path.chmod(0o755)
    write_wheel(toy.index / WHEEL, FILES)
    toy.cache.mkdir()
    (toy.cache / "tools").symlink_to(tools)
    toy.pin()
    return toy
