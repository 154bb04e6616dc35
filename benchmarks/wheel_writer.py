# SPDX-License-Identifier: Apache-2.0
"""The wheel writer against a copy, and against unpacking and packing: ratios of CPU time from one run.

    python build.py --vllm 0.27.1                      # fills the cache
    python benchmarks/wheel_writer.py [--cache DIR]

It prints one line a comparison and exits with 1 if a goal is missed: at most 1.2 times `cp` with sha256 of input and
output, at most 1/30 of `wheel unpack` with `wheel pack`, peak memory below 150 MB. Copy and writer run in turns in one
process, and the medians of their CPU seconds (children's included) are compared.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from builder import bootstrap  # noqa: E402

ROUNDS = 9
COPY_GOAL, PACK_GOAL, MEMORY_GOAL = 1.2, 30, 150e6


def main() -> int:
    arguments = argparse.ArgumentParser(description="Compare the wheel writer with cp and with wheel pack.")
    arguments.add_argument("--cache", type=Path, default=bootstrap.default_cache())
    cache = arguments.parse_args().cache.absolute()
    tools = bootstrap.ensure(ROOT / "locks" / "dev.txt", cache, offline=False)
    sys.path.insert(0, str(tools))
    copy, write, pack, memory = measure(cache, tools)
    results = [
        ("writer / (cp + sha256 of input and output)", write / copy, f"at most {COPY_GOAL}", write / copy <= COPY_GOAL),
        ("(wheel unpack + wheel pack) / writer", pack / write, f"at least {PACK_GOAL}", pack / write >= PACK_GOAL),
        ("writer's peak memory, MB", memory / 1e6, f"below {MEMORY_GOAL / 1e6:.0f}", memory < MEMORY_GOAL),
    ]
    for name, value, goal, reached in results:
        print(f"{name:<45} {value:8.2f}  goal {goal}: {'reached' if reached else 'MISSED'}")
    return 0 if all(reached for *_, reached in results) else 1


def measure(cache: Path, tools: Path) -> tuple[float, float, float, float]:
    """CPU seconds of copying, of writing, and of unpacking and packing; and this process's peak memory in bytes."""
    from builder import lockfile, pipeline, wheel
    from builder.hashing import sha256_of

    project = pipeline.Project(ROOT)
    release = list(lockfile.read(project.versions).values())[-1]
    artefact = release.wheel_artefact("cuda", "x86_64")
    source = cache / "sha256" / artefact.sha256 / artefact.file
    inputs = pipeline.read_inputs(project, release.version)
    pins = pipeline.read_closure(project, release, "cuda")

    def copy(target: Path) -> None:
        subprocess.run(["cp", "--reflink=never", str(source), str(target / source.name)], check=True)
        assert sha256_of(source) == sha256_of(target / source.name)

    def write(target: Path) -> None:
        assert sha256_of(source) == artefact.sha256
        with source.open("rb") as file:
            upstream = wheel.UpstreamWheel(file)
            content = inputs.content(inputs.changes(upstream), pins)
            wheel.write(upstream, pipeline.describe(release, artefact), content, target)

    def pack(target: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(tools)}
        for command in (["unpack", "--dest", str(target), str(source)], ["pack", "--dest-dir", str(target)]):
            unpacked = [str(path) for path in target.iterdir() if command[0] == "pack"]
            line = [sys.executable, "-m", "wheel", *command, *unpacked]
            subprocess.run(line, env=environment, check=True, capture_output=True)

    def seconds(work: Callable[[Path], None]) -> float:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            before = sum(os.times()[:4])
            work(Path(scratch))
            return sum(os.times()[:4]) - before

    rounds = [(seconds(copy), seconds(write)) for _ in range(ROUNDS)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    copies, writes = zip(*rounds, strict=True)
    return statistics.median(copies), statistics.median(writes), seconds(pack), memory


if __name__ == "__main__":
    sys.exit(main())
