# SPDX-License-Identifier: Apache-2.0
"""The wheel's bill of materials (CycloneDX 1.6, JSON), without a clock or random ids, so that builds compare."""

import json
from collections.abc import Iterable
from typing import Any

PROPERTY = "vllm-ndt"


def bill_of_materials(
    *, version: str, upstream: str, upstream_sha256: str, patches: Iterable[tuple[str, str]], pins: Iterable[str]
) -> bytes:
    """A CycloneDX document: the wheel, the upstream wheel that it came from with its patches, the locked closure."""
    pedigree = {
        "ancestors": [_component("vllm", upstream, hashes=[{"alg": "SHA-256", "content": upstream_sha256}])],
        "patches": [
            {"type": "unofficial", "diff": {"text": {"content": f"{name} sha256:{digest}"}}} for name, digest in patches
        ],
    }
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": _component("vllm", version, pedigree=pedigree, licenses=[{"license": {"id": "Apache-2.0"}}])
        },
        "components": [_pinned(pin) for pin in pins],
    }
    return (json.dumps(document, separators=(",\n", ": ")) + "\n").encode()


def _pinned(pin: str) -> dict[str, Any]:
    """The component of a line that `closure.read_pins` gave."""
    requirement, _, marker = pin.partition(";")
    name, _, version = requirement.strip().partition("==")
    if not marker:
        return _component(name, version)
    return _component(name, version, properties=[{"name": f"{PROPERTY}:marker", "value": marker.strip()}])


def _component(name: str, version: str, **more: Any) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}".replace("+", "%2B")
    ref = purl + (f"#{more['properties'][0]['value']}" if "properties" in more else "")
    return {"type": "library", "bom-ref": ref, "name": name, "version": version, "purl": purl} | more
