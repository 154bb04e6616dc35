# SPDX-License-Identifier: Apache-2.0
"""The manifest that the build puts into the wheel: version, patches, and sha256 and size of every file."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

NAME = "vllm_ndt/manifest.json"


class ManifestError(ValueError):
    """A manifest that is not as the build writes it."""


@dataclass(frozen=True)
class Manifest:
    """A manifest: `files` maps a path below site-packages to (sha256 as hex, size in bytes)."""

    version: str
    upstream: str
    patches: tuple[str, ...]
    changed: frozenset[str]
    files: dict[str, tuple[str, int]]
    digest: str


def parse(data: bytes) -> Manifest:
    """Read a manifest's bytes, whose sha256 is its digest; raises ManifestError."""
    try:
        document = json.loads(data)
        if document["format"] != 1:
            raise ManifestError(f"{NAME}: expected format 1, found {document['format']!r}")
        files = {path: _entry(path, line) for path, line in document["files"].items()}
        names = [document["version"], document["upstream"]["version"], *document["changed"]]
        patches = tuple(patch["name"] for patch in document["patches"])
        if not all(isinstance(name, str) for name in (*names, *patches)):
            raise TypeError("a name that is no text")
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        return Manifest(names[0], names[1], patches, frozenset(names[2:]), files, digest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{NAME} is not as the build writes it: {error!r}") from None


def _entry(path: str, line: str) -> tuple[str, int]:
    digest, size = line.split(" ")
    if "\0" in path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"path {path!r}")
    return digest, int(size)


def read(site: Path) -> Manifest:
    """The manifest of a site-packages folder; raises FileNotFoundError or ManifestError."""
    return parse((site / NAME).read_bytes())
