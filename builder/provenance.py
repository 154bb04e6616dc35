# SPDX-License-Identifier: Apache-2.0
"""Says in in-toto's form (Statement v1, SLSA provenance v1) what an image was made of; without a clock, unsigned."""

import json
from pathlib import Path
from typing import Any

from builder.hashing import sha256_of
from builder.image import Base, Image
from builder.lockfile import Release

_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "vllm-ndt/image/v1"


def statement(
    image: Image,
    base: Base,
    release: Release,
    flavor: str,
    arch: str,
    inputs: str,
    builder: str,
    wheel: Path | None,
) -> bytes:
    """The statement about an image; `inputs` is the sha256 of the folder that it was built in, `wheel` what was
    installed on a plain Python, if it was."""
    materials: list[dict[str, Any]] = [
        {"uri": f"oci:{base.name.partition('@')[0]}", "digest": _digest(image.base)},
        {"name": "build folder", "digest": {"sha256": inputs}},
        *({"name": f"patches/{release.version}/{row.file}", "digest": {"sha256": row.sha256}} for row in release.patch),
    ]
    if wheel:
        materials.append({"name": wheel.name, "digest": {"sha256": sha256_of(wheel)}})
    tool = release.tool_artefact(arch)
    materials.append({"uri": f"pkg:pypi/{tool.project}", "name": tool.file, "digest": {"sha256": tool.sha256}})
    document = {
        "_type": _STATEMENT,
        "subject": [{"name": image.name.rpartition(":")[0], "digest": _digest(image.digest)}],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "vllm": release.version,
                    "label": release.label,
                    "flavor": flavor,
                    "arch": arch,
                    "base": base.name,
                    "full": wheel is not None,
                },
                "internalParameters": {"SOURCE_DATE_EPOCH": release.source_date_epoch, "manifest": image.manifest},
                "resolvedDependencies": materials,
            },
            "runDetails": {"builder": {"id": f"vllm-ndt/build.py+{builder}"}},
        },
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def renamed(data: bytes, name: str, digest: str) -> bytes:
    """The statement with the image by the name and digest that it got in a registry."""
    document = json.loads(data)
    document["subject"] = [{"name": name, "digest": _digest(digest)}]
    return (json.dumps(document, indent=1) + "\n").encode()


def _digest(text: str) -> dict[str, str]:
    kind, _, value = text.partition(":")
    return {kind: value}
