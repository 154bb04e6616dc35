# SPDX-License-Identifier: Apache-2.0
"""Says from outside whether an image has the patched vLLM: its files are read, nothing of it is run."""

from dataclasses import replace
from pathlib import Path

from vllm_ndt import verify
from vllm_ndt.verify import EDITED, PATCHED, UNKNOWN, Report

from builder import image
from builder.errors import BuildError

_LABEL = image.LABELS["MANIFEST"]
_PLACES = ("usr/lib", "usr/local/lib", "opt/*/lib", "opt/lib", "*/lib", "root/*/lib", "home/*/*/lib")


def check_image(name: str, builder: str | None, *, deep: bool, expect: str | None) -> Report:
    """Judge an image that lies here; without `expect` its label must name the manifest that is in it.

    Its Python is not run, so bytecode of files that stay is not compared; `vllm-ndt verify --deep` in it does that.
    """
    try:
        builder = image.find_builder(builder)
        labels, entrypoint = image.configuration(builder, name)
        with image.files(builder, name) as root:
            sites = _sites(root)
            if len(sites) != 1:
                places = ", ".join(f"/{site.relative_to(root)}" for site in sites) or "none"
                return Report(name, UNKNOWN, findings=[f"expected one vllm in it, found {places}"])
            report = verify.check_site(sites[0], deep=deep, expect=expect or labels.get(_LABEL), same_python=False)
            report = replace(report, findings=[line.replace(str(root), "") for line in report.findings])
    except (BuildError, OSError) as error:
        return Report(name, UNKNOWN, findings=[str(error)])
    findings = list(report.findings)
    if report.verdict == PATCHED and entrypoint[:2] != ["vllm-ndt", "serve"]:
        findings.append(f"its entrypoint: expected vllm-ndt serve, found {' '.join(entrypoint) or 'none'}")
    if report.verdict == PATCHED and _LABEL not in labels and expect is None:
        findings.append(f"its label {_LABEL}: expected the manifest's digest, found none")
    verdict = EDITED if findings and report.verdict == PATCHED else report.verdict
    return replace(report, where=name, verdict=verdict, findings=findings)


def _sites(root: Path) -> list[Path]:
    """The folders of a file system from which Python could import vllm."""
    found = [
        site for place in _PLACES for site in root.glob(f"{place}/python3*/*-packages") if (site / "vllm").is_dir()
    ]
    # a link that is absolute leads to this machine's files
    return sorted({site.resolve() for site in found if site.resolve().is_relative_to(root.resolve())})
