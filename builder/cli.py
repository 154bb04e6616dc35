# SPDX-License-Identifier: Apache-2.0
"""The command line of build.py: the only place that prints and exits. It needs the standard library alone to start."""

import argparse
import io
import json
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from builder import bootstrap
from builder.builders import BUILDERS, find_builder
from builder.errors import BuildError, ImageProblem

DIFFERENCE = 6
COULD_NOT_CHECK = 3
EPILOG = """\
exit statuses:
  0 done                                4 a patch does not apply or lacks something
  1 anything else (a failed test,       5 no image could be built
    a full disk, an unwritable output)  6 verify found a difference in a wheel
  2 wrong usage                         verify --site and --image: 0 patched,
  3 an input is missing or not pinned     1 edited or incomplete, 2 rolled back,
                                          3 could not check
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands; options that all have may stand before or after the sub-command's name."""
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--vllm", metavar="RELEASE", help="upstream release (default: the last in VERSIONS.lock)")
    common.add_argument(
        "--cache",
        metavar="DIR",
        type=Path,
        help="downloads and environments (default: vllm-ndt in $XDG_CACHE_HOME or ~/.cache)",
    )
    common.add_argument("--json", action="store_true", help="print the result as one JSON object")
    offline = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    offline.add_argument("--offline", action="store_true", help="use the cache only")
    parents = [common, offline]

    top = argparse.ArgumentParser(
        prog="build.py",
        description="Build vLLM with this project's patches: without a sub-command, the wheel and the files beside it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=parents,
        allow_abbrev=False,
    )
    top.add_argument("--flavor", choices=("cuda", "cpu"), default="cuda", help="cuda, or cpu for tests (default: cuda)")
    top.add_argument(
        "--arch", choices=("x86_64", "aarch64"), default=_machine(), help="default: this machine's (%(default)s)"
    )
    top.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("dist"), help="where the wheel goes (default: dist)"
    )
    top.add_argument(
        "--image",
        choices=("auto", "yes", "no"),
        default="auto",
        help="build an image too: auto where a builder is found (default), yes: or fail",
    )
    top.add_argument("--builder", choices=BUILDERS, help="default: the first that can build")
    top.add_argument("--base", metavar="IMAGE", help="the image to build on (default: upstream's, of VERSIONS.lock)")
    top.add_argument("--full", action="store_true", help="install the wheel and all it needs on a plain Python image")
    commands = top.add_subparsers(dest="command", metavar="{test,verify,push,index,lock}")
    test = commands.add_parser("test", parents=parents, help="set up what the tests need, and run them")
    test.add_argument("--quick", action="store_true", help="only those that need no engine")
    test.add_argument("pytest", nargs="*", metavar="ARG", help="arguments for pytest, after --")
    verify = commands.add_parser(
        "verify", parents=[common], allow_abbrev=False, help="say whether a wheel or an environment is patched"
    )
    what = verify.add_mutually_exclusive_group(required=True)
    what.add_argument("wheel", nargs="?", type=Path, metavar="WHEEL", help="a wheel file")
    what.add_argument("--site", type=Path, metavar="DIR", help="an environment, or its site-packages folder")
    what.add_argument("--image", metavar="NAME", help="an image that lies here; no container is started")
    verify.add_argument("--builder", choices=BUILDERS, default=argparse.SUPPRESS, help="with --image: who has it")
    verify.add_argument("--deep", action="store_true", help="with --site: hash every file, not only Python's")
    verify.add_argument("--expect", metavar="DIGEST", help="the manifest digest that it must have")
    push = commands.add_parser(
        "push", parents=[common], help="push the image that was built, and put it into dist/deploy"
    )
    push.add_argument("target", metavar="REGISTRY/NAME", help="where to, without a tag")
    _add_out(push, "where the build wrote")
    push.add_argument("--insecure", action="store_true", help="the registry has no TLS; for one on this machine")
    index = commands.add_parser("index", parents=[common], help="make a simple index of the wheels that were built")
    index.add_argument("folder", metavar="DIR", type=Path, help="the folder to serve: DIR/vllm/ is made in it")
    _add_out(index, "where the wheels lie")
    lock = commands.add_parser("lock", parents=[common], help="pin everything anew in VERSIONS.lock")
    lock.add_argument("--label", help="the wheels' new label, such as ndt.2")
    return top


def _add_out(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--out", metavar="DIR", type=Path, default=argparse.SUPPRESS, help=f"{what} (default: dist)")


def main(arguments: Sequence[str], root: Path | None = None) -> int:
    """Run build.py; returns its exit status."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as stop:  # with --site and --image, 2 says that the patches are gone
        site = "verify" in arguments and any(word.partition("=")[0] in ("--site", "--image") for word in arguments)
        return COULD_NOT_CHECK if stop.code == 2 and site else int(stop.code or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the terminal cannot show
    signal.signal(signal.SIGTERM, _terminated)  # so that temporary files go with us
    try:
        return _run(options, root or Path(__file__).resolve().parents[1])
    except BuildError as error:
        return _fail(options, str(error), error.status if error.status != 1 else _otherwise(options))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        message = (
            f"{place}expected to be able to use it, found: {error.strerror or error}; make room or give another place"
        )
        return _fail(options, message, _otherwise(options))
    except KeyboardInterrupt:
        return _fail(options, "stopped", _otherwise(options))
    except Exception as error:
        message = f"{type(error).__name__}: {error}; this is a defect of build.py, please report it"
        return _fail(options, message, _otherwise(options))


def _otherwise(options: argparse.Namespace) -> int:
    """The exit status of what has none of its own; with --site and --image, 1 says that files were changed."""
    return COULD_NOT_CHECK if options.command == "verify" and (options.site or options.image) else 1


def _run(options: argparse.Namespace, root: Path) -> int:
    if options.command == "verify" and options.site:
        return _verify_site(options, root)
    cache = (options.cache if "cache" in options else bootstrap.default_cache()).absolute()
    offline = "offline" in options
    tools = "dev" if options.command in ("test", "lock") else "tools"
    packages = bootstrap.ensure(root / "locks" / f"{tools}.txt", cache, offline=offline)
    sys.path.insert(0, str(packages))
    commands = {None: _build, "test": _test, "verify": _verify, "push": _push, "index": _index, "lock": _lock}
    return commands[options.command](options, root, cache, packages)


def _build(options: argparse.Namespace, root: Path, cache: Path, _: Path) -> int:
    from builder import pipeline
    from builder.fetch import cached

    pipeline.check_epoch()
    project, release = _release(options, root)
    builder, why = _find_builder(options)
    artefact = release.wheel_artefact(options.flavor, options.arch)
    if not cached(artefact, cache).is_file() and "offline" not in options:
        print(f"fetching {artefact.file} ({artefact.size / 1e6:.0f} MB)", file=sys.stderr)
    written = pipeline.build(
        project, release, options.flavor, options.arch, options.out, cache, offline="offline" in options
    )
    result = {"wheel": str(written.path), "sha256": written.sha256, "manifest": f"sha256:{written.manifest}"}
    lines = [f"{key:<9} {value}" for key, value in result.items()]
    if builder is None:
        return _print(options, result | {"image": None}, [*lines, f"image     none: {why}"])
    if "json" not in options:  # it stays, whatever comes of the image
        print("\n".join(lines), flush=True)
        lines = []
    from builder import imagefiles

    made = imagefiles.build(
        project,
        release,
        options.flavor,
        options.arch,
        options.base,
        builder,
        options.out,
        cache,
        wheel=written.path if options.full else None,
        offline="offline" in options,
    )
    lines.append(
        f"base      {made.base}" + ("" if made.pinned else " (as its tag has it now: VERSIONS.lock pins no digest)")
    )
    lines += [
        f"image     {made.image.name}",
        f"digest    {made.image.digest}",
        f"contains  manifest {made.image.manifest}",
    ]
    return _print(options, result | {"image": made.as_dict()}, lines)


def _find_builder(options: argparse.Namespace) -> tuple[str | None, str]:
    """Who will build the image, or None and why there will be none; raises ImageProblem where there must be one."""
    from builder import image

    if options.base is not None:
        image.check_base(options.base)
    if options.image == "no":
        return None, "--image no"
    try:
        if options.arch != _machine():
            raise ImageProblem(
                "--image",
                expected=f"a machine of {options.arch}",
                found=_machine(),
                do="build it there, or use --image no",
            )
        if options.flavor == "cpu" and options.base is None and not options.full:
            raise ImageProblem(
                "--image",
                expected="--base IMAGE with stock vLLM for the CPU",
                found="none",
                do="give one, or use --image no",
            )
        return find_builder(options.builder), ""
    except ImageProblem as problem:
        if options.image == "yes" or options.builder or options.base or options.full:
            raise
        return None, str(problem)


def _push(options: argparse.Namespace, root: Path, _: Path, __: Path) -> int:
    from builder import imagefiles

    reference = imagefiles.push(_release(options, root)[0], options.out, options.target, insecure=options.insecure)
    return _print(options, {"image": reference}, [f"image     {reference}", f"specs     {options.out / 'deploy'}"])


def _index(options: argparse.Namespace, root: Path, _: Path, __: Path) -> int:
    from builder import simpleindex

    wheels = simpleindex.write(options.out, options.folder)
    return _print(
        options, {"wheels": wheels}, [f"index     {options.folder}", *(f"wheel     {name}" for name in wheels)]
    )


def _test(options: argparse.Namespace, root: Path, cache: Path, packages: Path) -> int:
    from builder import testing

    uv = packages / "bin" / "uv"
    project, release = _release(options, root)
    trees = None
    if not options.quick:
        trees = testing.make_trees(project, release, _machine(), cache, uv, offline="offline" in options)
    return 0 if testing.run_pytest(project, release, packages, uv, trees, cache, options.pytest) else 1


def _verify_site(options: argparse.Namespace, root: Path) -> int:
    """Needs no environment of our own: its failures must not look like a verdict."""
    sys.path.insert(0, str(root / "overlay"))
    from vllm_ndt import verify

    report = verify.check_site(verify.find_site(options.site), deep=options.deep, expect=options.expect)
    return _print(options, report.as_dict(), report.lines()) or report.status


def _verify(options: argparse.Namespace, root: Path, _: Path, __: Path) -> int:
    sys.path.insert(0, str(root / "overlay"))
    if options.image:
        from builder import verifyimage

        verdict = verifyimage.check_image(options.image, options.builder, deep=options.deep, expect=options.expect)
        return _print(options, verdict.as_dict(), verdict.lines()) or verdict.status
    from builder import verifywheel

    report = verifywheel.check_wheel(options.wheel, _releases(root), options.expect)
    return _print(options, report.as_dict(), report.lines()) or (
        DIFFERENCE if report.status in (1, 2) else report.status
    )


def _lock(options: argparse.Namespace, root: Path, cache: Path, packages: Path) -> int:
    from builder import lockfile, relock
    from builder.atomic import replacing

    project, release = _release(options, root)
    releases = lockfile.read(project.versions)
    releases[release.version] = relock.relock(project, release, options.label, cache, packages / "bin" / "uv")
    with replacing(project.versions) as file:
        file.write(lockfile.dump(releases).encode())
    rows = releases[release.version].wheel
    return _print(options, {row.file: row.sha256 for row in rows}, [f"{row.sha256}  {row.file}" for row in rows])


def _release(options: argparse.Namespace, root: Path) -> tuple[Any, Any]:
    from builder import lockfile
    from builder.inputs import Project

    releases = _releases(root)
    return Project(root), lockfile.release(releases, options.vllm if "vllm" in options else list(releases)[-1])


def _releases(root: Path) -> Any:
    from builder import lockfile

    return lockfile.read(root / "VERSIONS.lock")


def _print(options: argparse.Namespace, result: dict[str, Any], lines: list[str]) -> int:
    print(json.dumps(result) if "json" in options else "\n".join(lines))
    return 0


def _fail(options: argparse.Namespace, message: str, status: int) -> int:
    message = " ".join(message.split())
    print(f"error: {message}", file=sys.stderr)
    if "json" in options:
        print(json.dumps({"error": message, "status": status}))
    return status


def _machine() -> str:
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def _terminated(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
