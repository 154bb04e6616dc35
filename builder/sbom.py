# SPDX-License-Identifier: Apache-2.0
"""The wheel's bill of materials (CycloneDX 1.6, JSON), without a clock or random ids, so that builds compare."""

import json
from collections.abc import Iterable
from typing import Any

PROPERTY = "vllm-ndt"


def bill_of_materials(
    *, version: str, upstream: str, upstream_sha256: str, patches: Iterable[tuple[str, str]], pins: Iterable[str]
) -> bytes:
    """A CycloneDX document: vllm, what upstream made it of with its patches, the locked closure."""
    hashes = {"hashes": [{"alg": "SHA-256", "content": upstream_sha256}]} if upstream_sha256 else {}
    pedigree = {
        "ancestors": [_component("vllm", upstream, **hashes)],
        "patches": [
            {"type": "unofficial", "diff": {"text": {"content": f"{name} sha256:{digest}"}}} for name, digest in patches
        ],
    }
    licenses = [{"license": {"id": "Apache-2.0"}}]
    return _document(_component("vllm", version, pedigree=pedigree, licenses=licenses), [_pinned(pin) for pin in pins])


def bill_of_image(
    *,
    name: str,
    digest: str,
    version: str,
    base: str,
    base_digest: str,
    upstream: str,
    patches: Iterable[tuple[str, str]],
    pins: Iterable[str],
    py_spy: str,
) -> bytes:
    """A CycloneDX document of an image: what its layers add, the closure of vLLM, and its base by digest.

    What else the base has is the base's to say.
    """
    container = {"type": "container", "name": name, "version": digest, "bom-ref": f"{name}@{digest}"}
    ancestor = {"type": "container", "name": base, "version": base_digest, "bom-ref": f"{base}@{base_digest}"}
    vllm = json.loads(
        bill_of_materials(version=version, upstream=upstream, upstream_sha256="", patches=patches, pins=pins)
    )
    own = [vllm["metadata"]["component"], _component("py-spy", py_spy)]
    return _document(container | {"pedigree": {"ancestors": [ancestor]}}, [*own, *vllm["components"]])


def _document(subject: dict[str, Any], components: list[dict[str, Any]]) -> bytes:
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
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
