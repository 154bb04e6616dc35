# SPDX-License-Identifier: Apache-2.0
"""What is pulled of the image's layers, beside an image in which the wheel was installed again.

    python benchmarks/image_size.py --base IMAGE --image IMAGE --wheel WHEEL

Needs buildah, the base and the project's image on it in buildah's store, and the patched wheel of the same flavor. The
other image is made here: the base, and a step in which pip installs the wheel over the stock one.

Prints for each image the bytes that it adds to the base, compressed with gzip as a registry serves them, then their
ratio. Exit status: 0 measured, 2 bad usage or a step that failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONTAINERFILE = """\
FROM {base}
RUN --mount=type=bind,target=/src python3 -m pip install --no-index --no-deps --no-cache-dir --force-reinstall \\
    --break-system-packages --root-user-action=ignore /src/{wheel}
"""


def buildah(*words: str) -> None:
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"buildah {words[0]}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        raise SystemExit(2)


def layers(image: str) -> list[int]:
    """Bytes of an image's layers, compressed."""
    with tempfile.TemporaryDirectory() as scratch:
        buildah("push", "--quiet", "--compression-format", "gzip", image, f"dir:{scratch}")
        document = json.loads(Path(scratch, "manifest.json").read_text())
        return [layer["size"] for layer in document["layers"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="IMAGE")
    parser.add_argument("--image", required=True, metavar="IMAGE")
    parser.add_argument("--wheel", required=True, type=Path)
    options = parser.parse_args()
    again = "localhost/image-size:reinstalled"
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, options.wheel.name).write_bytes(options.wheel.read_bytes())
        Path(scratch, "Containerfile").write_text(CONTAINERFILE.format(base=options.base, wheel=options.wheel.name))
        buildah("bud", "--layers=false", "--network", "none", "--tag", again, scratch)
    below = len(layers(options.base))
    ours, other = (sum(layers(image)[below:]) for image in (options.image, again))
    buildah("rmi", again)
    print(f"image                  {ours:13,} bytes")
    print(f"wheel installed again  {other:13,} bytes, {other / ours:.1f} times as many")
    return 0


if __name__ == "__main__":
    sys.exit(main())
