# SPDX-License-Identifier: Apache-2.0
"""What makes an installation of vllm ours: its version, the generated files of its dist-info folder, its manifest.

The wheel writer and the image's layer share it. It needs the standard library alone: the layer is made inside an image.
"""

import hashlib
import json
import re
from base64 import urlsafe_b64encode
from binascii import a2b_base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from builder import metadata
from builder.changeset import ChangeSet
from builder.patchfile import Patch
from builder.sbom import bill_of_materials

SCRIPT_NAME = "vllm-ndt"
SCRIPT = f"{SCRIPT_NAME} = vllm_ndt.cli:main"
MANIFEST = "vllm_ndt/manifest.json"  # as vllm_ndt.manifest.NAME; the overlay is data here
CHANGES = "CHANGES.vllm-ndt.txt"
VERSION_MODULE = "vllm/_version.py"
RECORDED = re.compile(r"sha256=[A-Za-z0-9_-]{43}")
GENERATED = ("METADATA", "WHEEL", "entry_points.txt", "RECORD", "RECORD.jws", "RECORD.p7s")
_FROM_URL_SAFE = str.maketrans("-_", "+/")


@dataclass(frozen=True)
class Content:
    """What a patched installation gets: the changes, the patches behind them with their sha256, the closure's pins."""

    changes: ChangeSet
    patches: tuple[tuple[Patch, str], ...]
    pins: tuple[str, ...]


@dataclass(frozen=True)
class Build:
    """What an installation is: release, label (without the +), flavor, arch, time of its new files, and origin."""

    release: str
    label: str
    flavor: str
    arch: str
    epoch: int
    commit: str
    upstream_sha256: str

    @property
    def version(self) -> str:
        """The version with its local part: 0.27.1+ndt.1, on the CPU 0.27.1+ndt.1.cpu (upstream looks for that word)."""
        return f"{self.release}+{self.label}" + (".cpu" if self.flavor == "cpu" and self.label != "cpu" else "")

    @property
    def dist_info(self) -> str:
        """The name of the dist-info folder."""
        return f"vllm-{self.version}.dist-info"

    def file_name(self, upstream: str) -> str:
        """The wheel's file name, with the tags of upstream's."""
        return f"vllm-{self.version}-" + upstream.removesuffix(".whl").split("-", 2)[2] + ".whl"


@dataclass
class Rows:
    """RECORD rows and manifest lines, collected by file: path to (sha256 as RECORD writes it, size in bytes)."""

    files: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        """Add a file."""
        self.files[name] = (recorded_hash(data), len(data))

    def record(self, record_name: str) -> bytes:
        """RECORD, which names itself as `record_name`."""
        lines = [f"{_quoted(name)},{digest},{size}\n" for name, (digest, size) in self.files.items()]
        return "".join([*lines, f"{record_name},,\n"]).encode()


def _quoted(name: str) -> str:
    """A name as a CSV field."""
    return '"' + name.replace('"', '""') + '"' if "," in name or '"' in name else name


def recorded_hash(data: bytes) -> str:
    """The sha256 of bytes as RECORD writes it."""
    return "sha256=" + urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def generated(
    text: Callable[[str], str],
    old: str,
    build: Build,
    content: Content | None,
    tags: Iterable[str] | None = None,
) -> dict[str, bytes]:
    """The files that are made anew, by path: the version module, and those of the dist-info folder that change.

    `text` gives a file as it was, of the dist-info folder `old`; with no content only the version changes. Without
    `tags` WHEEL stays as it is.
    """
    edited = metadata.edit_metadata(
        text(f"{old}/METADATA"),
        version=build.version,
        locked=content.pins if content else (),
        license_files=(CHANGES,) if content else (),
        cpu=build.flavor == "cpu",
    )
    entry_points, wheel = text(f"{old}/entry_points.txt"), text(f"{old}/WHEEL")
    dist_info = build.dist_info
    files = {
        VERSION_MODULE: metadata.edit_version_module(text(VERSION_MODULE), build.version),
        f"{dist_info}/METADATA": edited,
        f"{dist_info}/WHEEL": wheel if tags is None else metadata.edit_wheel(wheel, tags),
        f"{dist_info}/entry_points.txt": metadata.edit_entry_points(entry_points, SCRIPT) if content else entry_points,
    }
    if content:
        files[f"{dist_info}/licenses/{CHANGES}"] = _change_notice(build, content)
    result = {name: text.encode() for name, text in files.items()}
    if content:
        result[f"{dist_info}/sboms/vllm-ndt.cdx.json"] = bill_of_materials(
            version=build.version,
            upstream=build.release,
            upstream_sha256=build.upstream_sha256,
            patches=[(patch.name, digest) for patch, digest in content.patches],
            pins=content.pins,
        )
    return result


def _change_notice(build: Build, content: Content) -> str:
    lines = [
        f"vllm {build.version} is vLLM {build.release} (Apache-2.0) with changes. These files differ from upstream's:",
        "",
        f"{VERSION_MODULE} (the version)",
        "the dist-info folder (name, version, tags, entry points, licence files, extra 'locked', RECORD)",
    ]
    for patch, digest in content.patches:
        files = ", ".join(file.path for file in patch.files)
        lines.append(f"{files} ({patch.name}: {patch.subject}; sha256 {digest})")
    new = [path for path, change in content.changes.items() if not change.before]
    return "\n".join([*lines, "", "These files are new, under the same licence:", "", *new, MANIFEST]) + "\n"


def manifest(build: Build, content: Content, rows: Rows, origin: dict[str, str]) -> bytes:
    """The manifest of all files of `rows`; `origin` says what the files that did not change are of."""
    document = {
        "format": 1,
        "name": "vllm",
        "version": build.version,
        "flavor": build.flavor,
        "arch": build.arch,
        "upstream": {"version": build.release, "commit": build.commit, **origin},
        "patches": [
            {
                "name": patch.name,
                "subject": patch.subject,
                "sha256": digest,
                "files": [file.path for file in patch.files],
            }
            for patch, digest in content.patches
        ],
        "changed": sorted([*content.changes, VERSION_MODULE]),
        "files": {name: f"{_hex(digest)} {size}" for name, (digest, size) in sorted(rows.files.items())},
    }
    # A line for each file; the encoder that indents is slow.
    return (json.dumps(document, separators=(",\n", ": ")) + "\n").encode()


def _hex(recorded: str) -> str:
    return a2b_base64(recorded[len("sha256=") :].translate(_FROM_URL_SAFE) + "=").hex()
