# SPDX-License-Identifier: Apache-2.0
"""Looks up and fetches a release's files from pip's configured index where pip itself would build them."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
from unearth import Link, PackageFinder, UnpackError

from builder.errors import InputProblem
from builder.pipconfig import index_settings


def file_names(project: str, version: str) -> list[str]:
    """The names of a release's files on pip's configured index."""
    return sorted(_links(project, version))


def download_sdist(project: str, version: str, file: str, folder: Path) -> Path:
    """Fetch a release's sdist from pip's configured index into `folder`, without building it."""
    with _reporting(file):
        links = _links(project, version)
        if file not in links:
            raise InputProblem(
                file,
                expected="pip's configured index to have it",
                found="no such file there",
                do="check `pip config list`",
            )
        found = _finder().download(links[file], folder)
    # A file of the user's own folder is given as it lies there, and must stay.
    return found if found.parent == folder else Path(shutil.copy(found, folder))


def _links(project: str, version: str) -> dict[str, Link]:
    with _reporting(f"{project} {version}"):
        packages = _finder().find_all_packages(project, allow_yanked=True)
        return {package.link.filename: package.link for package in packages if package.version == version}


def _finder() -> PackageFinder:
    index, find_links = index_settings()
    if not index and not find_links:  # unearth would take the public index
        raise InputProblem(
            "pip's configuration", expected="an index or find-links", found="neither", do="check `pip config list`"
        )
    return PackageFinder(index_urls=index, find_links=find_links, ignore_compatibility=True)


@contextlib.contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Turn a failure of the network into an InputProblem."""
    try:
        yield
    except (httpx2.HTTPError, UnpackError) as error:
        raise InputProblem(
            what,
            expected="pip's configured index to serve it",
            found=repr(error),
            do="check the network and `pip config list`, then run again",
        ) from None
