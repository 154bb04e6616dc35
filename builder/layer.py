# SPDX-License-Identifier: Apache-2.0
"""Turns the stock vLLM of an image into the patched one, in place; runs inside the image, in a step of the Dockerfile.

Only what changes is written, so that the layer holds nothing else. What it finds is checked before: each file that the
patches replace by the pinned sha256, all others by the image's own RECORD, the generated ones by their version.
Needs Python 3.11 with its standard library alone.
"""

import argparse
import csv
import hashlib
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from builder import changeset, distinfo, lockfile, startup
from builder.distinfo import CHANGES, GENERATED, MANIFEST, SCRIPT_NAME, VERSION_MODULE, Build, Content, Rows
from builder.errors import BuildError, InputProblem
from builder.inputs import Project, check_series, read_inputs

DIGEST = Path("usr/share/vllm-ndt/manifest.digest")
STARTUP = Path("usr/share/vllm-ndt/startup")
NO_STATISTICS = Path("etc/vllm/do_not_track")
_OTHER_FLAVORS = ("ndt.", "cpu", "rocm", "xpu", "tpu")
_CODE = (".py", ".pyc", ".so", ".pyd")


@dataclass(frozen=True)
class Base:
    """The stock installation of an image: its site-packages folder, dist-info folder, and RECORD (hash, size)."""

    site: Path
    dist_info: str
    recorded: dict[str, tuple[str, int | None]]

    def read(self, name: str) -> bytes | None:
        """A file's bytes, or None if RECORD does not have it."""
        return (self.site / name).read_bytes() if name in self.recorded else None

    def text(self, name: str) -> str:
        """A file as text."""
        return (self.site / name).read_text("utf-8")


def read_base(site: Path) -> Base:
    """The vLLM below a site-packages folder; raises InputProblem unless its files are those of its RECORD."""
    found = sorted(path.name for path in site.glob("vllm-*.dist-info"))
    if len(found) != 1:
        raise _problem(site, "one installation of vllm", ", ".join(found) or "none")
    try:
        lines = list(csv.reader(io.StringIO((site / found[0] / "RECORD").read_text("utf-8"))))
        recorded = {name: (digest, int(size) if size else None) for name, digest, size in lines}
    except (OSError, ValueError, csv.Error) as error:
        raise _problem(site / found[0] / "RECORD", "rows of name, hash and size", str(error)) from None
    base = Base(site, found[0], recorded)
    if odd := sorted(_differences(base)):
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise _problem(site, "the files of its RECORD", f"{odd[0]}{more}")
    return base


def _differences(base: Base) -> Iterator[str]:
    """What differs from RECORD, or is code that it does not have."""
    for name, (digest, _) in base.recorded.items():
        path = base.site / name
        if not digest:
            continue
        if path.is_symlink() or not path.is_file():
            yield f"{name}: missing"
        elif distinfo.recorded_hash(path.read_bytes()) != digest:
            yield f"{name}: changed"
    for root, folders, names in os.walk(base.site / "vllm"):
        prefix = Path(root).relative_to(base.site).as_posix()
        yield from (f"{prefix}/{name}: a link" for name in folders if Path(root, name).is_symlink())
        for name in names if not prefix.endswith("/__pycache__") else ():
            if name.endswith(_CODE) and f"{prefix}/{name}" not in base.recorded:
                yield f"{prefix}/{name}: added"


def apply(base: Base, build: Build, content: Content, origin: dict[str, str]) -> str:
    """Write what changes, remove what it replaces; returns the manifest's sha256 (hex)."""
    new = {path: change.after for path, change in content.changes.items()}
    new |= distinfo.generated(base.text, base.dist_info, build, content)
    script = _script(base)
    new |= {script[0]: script[1]}
    rows = Rows()
    moved: list[tuple[str, str]] = []
    replaced = set(new) | {f"{base.dist_info}/{name}" for name in GENERATED}
    for name, (digest, size) in base.recorded.items():
        if name in replaced or _is_cache_of(name, new):
            continue
        kept = name
        if name.startswith(f"{base.dist_info}/"):
            kept = build.dist_info + name.removeprefix(base.dist_info)
            moved.append((name, kept))
        rows.files[kept] = (digest, "" if size is None else str(size))  # type: ignore[assignment]
    for name, data in new.items():
        rows.add(name, data)
    listed = Rows({name: row for name, row in rows.files.items() if row[0] and ".." not in name.split("/")})
    manifest = distinfo.manifest(build, content, listed, origin)
    rows.add(MANIFEST, manifest)
    new |= {MANIFEST: manifest, f"{build.dist_info}/RECORD": rows.record(f"{build.dist_info}/RECORD")}
    new |= {after: (base.site / before).read_bytes() for before, after in moved}
    for name, data in new.items():
        _write(base.site / name, data)
    (base.site / script[0]).chmod(0o755)
    shutil.rmtree(base.site / base.dist_info)
    return hashlib.sha256(manifest).hexdigest()


def drop_bytecode(base: Base, replaced: set[str]) -> list[str]:
    """Remove the bytecode of the files to replace, and any that is not its source's; returns the latter's names."""
    from vllm_ndt import bytecode

    dropped = []
    for folder in sorted((base.site / "vllm").rglob("__pycache__")):
        names = os.listdir(folder)
        for source in sorted(folder.parent.glob("*.py")):
            name = source.relative_to(base.site).as_posix()
            data = source.read_bytes()
            for cache in bytecode.caches_of(source, names):
                if name in replaced:
                    cache.unlink()
                elif bytecode.runs_unchecked(cache) or bytecode.is_of(cache, source, data) is False:
                    cache.unlink()
                    dropped.append(cache.relative_to(base.site).as_posix())
        if not any(folder.iterdir()):
            folder.rmdir()
    return dropped


def _is_cache_of(name: str, new: dict[str, bytes]) -> bool:
    folder, _, file = name.rpartition("/__pycache__/")
    return bool(folder) and f"{folder}/{file.partition('.')[0]}.py" in new


def _script(base: Base) -> tuple[str, bytes]:
    """The path below site-packages and the text of the command vllm-ndt, beside and like the command vllm."""
    rows = [name for name in base.recorded if name.startswith("../") and name.endswith("/vllm")]
    if len(rows) != 1:
        raise _problem(base.site, "one command vllm in RECORD", f"{rows}")
    interpreter = base.text(rows[0]).split("\n", 1)[0]
    code = f"{interpreter}\nimport sys\n\nfrom vllm_ndt.cli import main\n\nsys.exit(main())\n"
    return rows[0].rpartition("/")[0] + f"/{SCRIPT_NAME}", code.encode()


def _write(path: Path, data: bytes) -> None:
    """Write a file with the mode of the one in its place; by another name first, so that a link is not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.is_file() else 0o644
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.chmod(mode)
    part.replace(path)


def list_startup() -> str:
    """What Python runs by itself in this image, beside vllm."""
    root = Path("/")
    return startup.write(startup.files(root, startup.python_folders(root)))


def leave(digest: str, listed: str) -> None:
    """Write what an image has beside vllm: the manifest's digest, the list of what Python runs by itself, and the file
    that turns usage statistics off."""
    for path, text in ((DIGEST, f"sha256:{digest}\n"), (STARTUP, listed), (NO_STATISTICS, "")):
        _write(Path("/", path), text.encode())


def _problem(where: Path, expected: str, found: str) -> InputProblem:
    return InputProblem(str(where), expected=expected, found=found, do="use upstream's image of this release as base")


def check_version(base: Base, release: str, flavor: str) -> None:
    """Raise InputProblem unless the base is stock vLLM of the release and the flavor.

    Upstream's image for CUDA is built apart from its wheel, and what stands after the `+` may be anything of its own.
    """
    found = base.dist_info.removeprefix("vllm-").removesuffix(".dist-info")
    module = next((line for line in base.text(VERSION_MODULE).split("\n") if line.startswith("__version__ =")), "")
    local = found.partition("+")[2]
    fits = local == "cpu" if flavor == "cpu" else not local.startswith(_OTHER_FLAVORS)
    if found.partition("+")[0] != release or not fits or f"'{found}'" not in module.replace('"', "'"):
        raise _problem(
            base.site, f"stock vllm {release} for {flavor}", f"{found} ({VERSION_MODULE}: {module or 'no version'})"
        )


def main(arguments: list[str]) -> int:
    """Patch the vLLM that this Python would import; prints the manifest's digest."""
    parser = argparse.ArgumentParser(prog="builder.layer")
    for name in ("release", "flavor", "arch", "origin"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root / "overlay"))
    project = Project(root)
    try:
        release = lockfile.release(lockfile.read(project.versions), options.release)
        inputs = read_inputs(project, release.version)
        check_series(inputs.entries, release)
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise _problem(Path(sys.prefix), f"vllm {release.version} in the image", "none")
        base = read_base(Path(spec.origin).parents[1])
        check_version(base, release.version, options.flavor)
        changes = inputs.changes(set(base.recorded), base.read)
        changeset.check(changes, release.changed)
        pins = tuple((root / "pins.txt").read_text("utf-8").splitlines())
        build = Build(release.version, release.label, options.flavor, options.arch, release.source_date_epoch, release.commit, "")  # noqa: E501  # fmt: skip
        dropped = drop_bytecode(base, {*changes, VERSION_MODULE})
        listed = list_startup()
        origin = {"image": options.origin, "startup": hashlib.sha256(listed.encode()).hexdigest()}
        digest = apply(base, build, inputs.content(changes, pins), origin)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    leave(digest, listed)
    if dropped:
        print(f"removed bytecode that was not its source's: {', '.join(dropped)}")
    print(f"vllm {build.version}, manifest sha256:{digest}, {CHANGES} names what changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
