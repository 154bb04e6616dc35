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
from typing import Any, NoReturn

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
    certificate: tuple[str, str | None] | None = None  # certificate, and its key where that is another file

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


class _Parser(argparse.ArgumentParser):
    """Upstream's parser, as far as an address needs it; it takes the beginning of a name for the name, too."""

    def error(self, message: str) -> NoReturn:
        raise NoServer(f"expected arguments of `vllm serve`, found {message}")


def address(arguments: Sequence[str]) -> Address:
    """Where a server with these arguments of `vllm serve` answers; raises NoServer if it serves no HTTP."""
    parser = _Parser(add_help=False)
    for name in ("host", "uds", "ssl-keyfile", "ssl-certfile"):
        parser.add_argument(f"--{name}", type=_optional)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--data-parallel-supervisor-port", type=int, default=9256)
    parser.add_argument("--config")  # which upstream reads only where it is two words
    parser.add_argument("-dp")  # not short for -dpm
    parser.add_argument("--data-parallel-multi-port-external-lb", "-dpm", action="store_true")
    for name in ("headless", "grpc"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_known_args(dashed(_with_config(arguments)))[0]
    if given.headless or given.grpc:
        raise NoServer(f"expected a server with HTTP, found {'--headless' if given.headless else '--grpc'}")
    port = given.data_parallel_supervisor_port if given.data_parallel_multi_port_external_lb else given.port
    if not port:
        raise NoServer("expected a port that is known, found 0")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(given.host or "", given.host)  # noqa: S104
    return Address(host, port, given.uds, (given.ssl_certfile, given.ssl_keyfile) if given.ssl_certfile else None)


def dashed(arguments: Sequence[str]) -> list[str]:
    """Arguments as upstream's parser reads them: --ssl_keyfile is --ssl-keyfile."""
    return [
        word.replace("_", "-", word.partition("=")[0].count("_")) if word.startswith("--") else word
        for word in arguments
    ]


def _optional(text: str) -> str | None:
    """As upstream reads it: `None` is no value."""
    return None if text == "None" else text or None


def _with_config(arguments: Sequence[str]) -> list[str]:
    """The arguments with those of a --config file before them, so that the command line wins."""
    if "--config" not in arguments:
        return list(arguments)
    place = arguments.index("--config")
    if place + 1 == len(arguments) or "--config" in arguments[place + 1 :]:
        raise NoServer("expected arguments of `vllm serve`, found --config without a file, or twice")
    return [*_from_file(arguments[place + 1]), *arguments[:place], *arguments[place + 2 :]]


def _from_file(path: str) -> list[str]:
    import yaml

    try:
        table = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NoServer(f"expected the server's --config {path}, found {' '.join(str(error).split())}") from None
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise NoServer(f"expected options and their values in the server's --config {path}, found something else")
    words: list[str] = []
    for key, value in table.items():
        if isinstance(value, bool | list) and not value:
            continue
        words.append(f"--{key}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(json.dumps(value, default=str) if isinstance(value, dict) else str(value))
    return words


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
