# SPDX-License-Identifier: Apache-2.0
"""Asks the server of this machine or container for its health, wherever its own arguments put it.

`serve` leaves its arguments in an anonymous file (a memfd) that the server inherits: nothing is written to a disk, and
it is gone when the server is. What the server renames itself to does not matter, nor whether a file system is
read-only. Only processes of the same user, or root, can read it.
"""

import argparse
import http.client
import json
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "vllm-ndt-serve"
TIMEOUT = 5  # seconds that an answer may take
_LINK = f"/memfd:{NAME} (deleted)"


class NoServer(Exception):
    """There is no server whose health could be asked for, and why."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: a host and port, or the path of a Unix socket; and its certificate, if it has one."""

    host: str
    port: int
    uds: str | None = None
    certificate: tuple[str, str] | None = None  # certificate and key

    def __str__(self) -> str:
        if self.uds:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certificate else ''}://{host}:{self.port}/health"


def announce(arguments: Sequence[str]) -> None:
    """Leave a server's arguments where `find` looks, for as long as this process and what it becomes lives."""
    file = os.memfd_create(NAME, 0)  # without MFD_CLOEXEC: it is there after exec
    os.write(file, json.dumps(list(arguments)).encode())


def find() -> list[str]:
    """The arguments of the server that runs here; raises NoServer unless there is one that may be looked at.

    Servers of containers are not here for those outside.
    """
    found: dict[str, list[int]] = {}
    here = os.readlink("/proc/self/ns/pid")
    for process in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        folder = Path("/proc", str(process))
        try:
            if os.readlink(folder / "ns" / "pid") != here:
                continue
            links = [link for link in (folder / "fd").iterdir() if os.readlink(link) == _LINK]
            for text in {link.read_text("utf-8") for link in links}:
                found.setdefault(text, []).append(process)
        except OSError:  # it ended meanwhile, or is another user's
            continue
    if len(found) != 1:
        raise NoServer(
            f"expected one `vllm-ndt serve` of this user here, found {len(found)}"
            + (f" (processes {', '.join(str(owners[0]) for owners in found.values())})" if found else "")
        )
    return [str(argument) for argument in json.loads(next(iter(found)))]


def address(arguments: Sequence[str]) -> Address:
    """Where a server with these arguments of `vllm serve` answers; raises NoServer if it serves no HTTP."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("host", "port", "uds", "ssl-keyfile", "ssl-certfile", "data-parallel-supervisor-port", "config"):
        parser.add_argument(f"--{name}")
    for name in ("headless", "grpc", "data-parallel-multi-port-external-lb"):
        parser.add_argument(f"--{name}", action="store_true")
    given = _parse(parser, arguments)
    if given.config:
        given = _parse(parser, [*_from_file(given.config), *arguments])  # the command line wins
    if given.headless or given.grpc:
        raise NoServer(f"expected a server with HTTP, found {'--headless' if given.headless else '--grpc'}")
    port = given.data_parallel_supervisor_port or 9256 if given.data_parallel_multi_port_external_lb else given.port
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(given.host or "", given.host)  # noqa: S104
    pair = (given.ssl_certfile, given.ssl_keyfile)
    return Address(host, int(port or 8000), given.uds, pair if all(pair) else None)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    # upstream's parser takes --ssl_keyfile for --ssl-keyfile
    words = [word.replace("_", "-", word.partition("=")[0].count("_")) if word[:2] == "--" else word for word in arguments]  # noqa: E501  # fmt: skip
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise NoServer(f"expected arguments of `vllm serve`, found {error}") from None


def _from_file(path: str) -> list[str]:
    import yaml

    try:
        table = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise NoServer(f"expected the server's --config {path}, found {error}") from None
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in table.items() if not isinstance(value, dict) and value is not False]  # noqa: E501  # fmt: skip


def ask(where: Address, timeout: float = TIMEOUT) -> str | None:
    """None if a server says that it is well, or else what it said; raises nothing."""
    connection = _Connection(where, timeout)
    try:
        connection.request("GET", "/health", headers={"Connection": "close"})
        status = connection.getresponse().status
        return None if status == 200 else f"{where} answered {status}"
    except (OSError, http.client.HTTPException) as error:
        return f"{where}: {error or type(error).__name__}"
    finally:
        connection.close()


class _Connection(http.client.HTTPConnection):
    """A connection to an Address; who is at the other end is known, so its certificate is not looked at."""

    def __init__(self, where: Address, timeout: float) -> None:
        super().__init__(where.host, where.port, timeout=timeout)
        self._where = where

    def connect(self) -> None:
        if self._where.uds:
            self.sock: Any = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._where.uds)
        else:
            self.sock = socket.create_connection((self.host, self.port), self.timeout)
        if self._where.certificate:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.load_cert_chain(*self._where.certificate)  # where the server asks clients for one
            self.sock = context.wrap_socket(self.sock)
