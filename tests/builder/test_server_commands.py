# SPDX-License-Identifier: Apache-2.0
"""`vllm-ndt health` finds and asks a server wherever its arguments put it; what watches a server ends one that hangs."""

import contextlib
import http.server
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_ndt import health, launch, serve, verify
from vllm_ndt.verify import Report

from tests.builder.test_deploy import need_namespaces

ADDRESSES = {
    "": "http://127.0.0.1:8000/health",
    "--port 81": "http://127.0.0.1:81/health",
    "m --port=81 --host 0.0.0.0 -tp 2": "http://127.0.0.1:81/health",
    "--host ::": "http://[::1]:8000/health",
    "--host 192.0.2.7": "http://192.0.2.7:8000/health",
    "--host one.example.com --root-path /api --api-key x": "http://one.example.com:8000/health",
    "--uds /run/v.sock": "unix:/run/v.sock",
    "--ssl-keyfile k --ssl-certfile c": "https://127.0.0.1:8000/health",
    "--ssl_keyfile=a_k --ssl_certfile=c": "https://127.0.0.1:8000/health",
    "--ssl-certfile c": "https://127.0.0.1:8000/health",
    "--por 81 --hos 192.0.2.7 --ssl-certf c": "https://192.0.2.7:81/health",
    "--config=/nowhere.yaml --conf /nowhere.yaml --port 81": "http://127.0.0.1:81/health",
    "--host None --uds None": "http://127.0.0.1:8000/health",
    "-dp 2": "http://127.0.0.1:8000/health",
    "-dpm": "http://127.0.0.1:9256/health",
    "--data-parallel-multi-port-external-lb": "http://127.0.0.1:9256/health",
    "--data-parallel-multi-port-external-lb --data-parallel-supervisor-port 77 --port 8": "http://127.0.0.1:77/health",
    '--limit-mm-per-prompt {"image":4} --served-model-name port': "http://127.0.0.1:8000/health",
}


@pytest.mark.parametrize("arguments", ADDRESSES)
def test_address_follows_the_arguments(arguments: str) -> None:
    assert str(health.address(arguments.split())) == ADDRESSES[arguments]


NO_ADDRESSES = (
    "--headless",
    "--head",
    "--grpc",
    "--port",
    "--port x",
    "--port 0",
    "--h x",
    "--config /nowhere.yaml",
    "m --config",
    "--config a.yaml --config b.yaml",
)


@pytest.mark.parametrize("arguments", NO_ADDRESSES)
def test_a_server_without_http_is_said(arguments: str) -> None:
    with pytest.raises(health.NoServer, match="expected"):
        health.address(arguments.split())


def test_the_command_line_wins_over_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "port: 81\nhost: 192.0.2.7\nheadless: false\nuds: null\nmiddleware: [a, b]\nx: {y: 3}\n"
    )
    where = health.address(["m", "--config", f"{tmp_path}/c.yaml", "--port", "82"])
    assert str(where) == "http://192.0.2.7:82/health"
    (tmp_path / "c.yaml").write_text("ssl_certfile: c\ndata-parallel-multi-port-external-lb: true\n")
    assert str(health.address(["--config", f"{tmp_path}/c.yaml"])) == "https://127.0.0.1:9256/health"


@pytest.mark.parametrize("text", ["- port: 81", "", "81: port", "port: {", "\x00"])
def test_a_config_file_that_is_none_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(health.NoServer, match=r"the server's --config .*c\.yaml, found [^\n]+$"):
        health.address(["--config", f"{tmp_path}/c.yaml"])


class _Handler(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def listening(family: int, address: Any, certificate: Path | None = None, status: int = 200) -> Iterator[Any]:
    """An HTTP server that answers /health; gives where it listens."""

    class Server(http.server.ThreadingHTTPServer):
        address_family = family

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()

    handler = type("Handler", (_Handler,), {"status": status, "address_string": lambda _: ""})
    server = Server(address, handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "c.pem", certificate / "k.pem")
        context.load_verify_locations(certificate / "c.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=other.example.com",
        "-days",
        "2",
    ]
    subprocess.run([*command, "-keyout", folder / "k.pem", "-out", folder / "c.pem"], check=True, capture_output=True)
    return folder


def test_ask_over_each_kind_of_socket(tmp_path: Path, certificate: Path) -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as (host, port):
        assert health.ask(health.address(["--host", host, "--port", str(port)])) is None
    with listening(socket.AF_INET6, ("::1", 0)) as (_, port, *_rest):
        assert health.ask(health.address(["--host", "::", "--port", str(port)])) is None
    with listening(socket.AF_UNIX, str(tmp_path / "s")):
        assert health.ask(health.address(["--uds", str(tmp_path / "s")])) is None
    with listening(socket.AF_INET, ("127.0.0.1", 0), certificate) as (_, port):
        flags = ["--port", str(port), "--ssl-keyfile", f"{certificate}/k.pem", "--ssl-certfile", f"{certificate}/c.pem"]
        assert health.ask(health.address(flags)) is None


def test_ask_says_what_is_wrong(tmp_path: Path) -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0), status=503) as (_, port):
        where = health.address(["--port", str(port)])
        assert health.ask(where) == f"http://127.0.0.1:{port}/health answered 503"
    assert "Connection refused" in str(health.ask(where))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in str(health.ask(health.address(["--port", str(silent.getsockname()[1])]), timeout=0.2))


def command(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_ndt.cli", *words], capture_output=True, text=True, check=False, **more
    )


SERVER = """
import os, sys, time
from vllm_ndt import health
health.announce(sys.argv[1:])
os.execv(sys.executable, [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
"""


@contextlib.contextmanager
def announced(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        assert run.stdout.readline() == "up\n"
        try:
            yield run
        finally:
            run.kill()


def test_health_finds_the_server_that_exec_made() -> None:
    assert command("health").returncode == 1
    assert "found 0" in command("health").stdout
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as (_, port), announced("m", "--port", str(port)):
        done = command("health")
        assert (done.returncode, done.stdout) == (0, "healthy\n")
        with announced("n", "--port", "1"):
            done = command("health")
            assert done.returncode == 1
            assert "found 2 (processes " in done.stdout
    assert command("health").returncode == 1


WATCHED = """
import sys, time
from vllm_ndt import health, watch
watch.PERIOD, watch.GRACE, watch.START = 0.1, 0.5, float(sys.argv[2])
watch.watch_beside(health.address(["--port", sys.argv[1]]))
if "deaf" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, lambda *_: None)
print("up", flush=True)
for _ in range(600):
    time.sleep(0.1)
"""


def watched(port: int, start: float, *words: str) -> "subprocess.Popen[str]":
    run = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(port), str(start), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout
    assert run.stdout.readline() == "up\n"
    return run


@pytest.mark.parametrize("words", [[], ["deaf"]])
def test_a_server_that_was_well_and_is_not_is_ended(words: list[str]) -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as (_, port):
        run = watched(port, 1800, *words)
        time.sleep(1)
        assert run.poll() is None
    assert run.wait(20) == (-signal.SIGKILL if words else -signal.SIGTERM)
    assert run.stderr
    text = run.stderr.read()
    assert "not healthy, 3 times in a row (http://127.0.0.1:" in text
    assert len(text.splitlines()) == 1


def test_a_server_that_is_never_well_is_ended_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = watched(port, 2)
    time.sleep(1)
    assert run.poll() is None
    assert run.wait(20) == -signal.SIGTERM
    assert run.stderr
    assert "not healthy, not once in 2 s" in run.stderr.read()


def test_it_is_ended_though_nobody_reads_the_log() -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as (_, port):
        run = watched(port, 1800)
        assert run.stderr
        run.stderr.close()
        time.sleep(1)
    assert run.wait(20) == -signal.SIGTERM


def test_what_watches_ends_with_the_server() -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as (_, port):
        run = watched(port, 1800)
        run.kill()
        assert run.stderr
        assert run.stderr.read() == ""  # ends when the last process that has it is gone


# ---- serve ----


def fake_installation(folder: Path) -> dict[str, str]:
    """An environment in which vllm is a command that prints what it was given, and verify is content with it."""
    package = folder / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for part in (folder / "vllm", folder / "vllm" / "entrypoints", package):
        (part / "__init__.py").touch()
    (package / "main.py").write_text(
        textwrap.dedent("""
        import json, os, sys
        def main():
            print(json.dumps([sys.argv, os.getpid(), os.environ["HOME"], sys.path[0]]), flush=True)
    """)
    )
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import os
        if os.environ.get("CONTENT"):
            from vllm_ndt import manifest, verify
            found = manifest.Manifest("0.27.1+ndt.1", "0.27.1", ("a", "b"), frozenset(), {}, "sha256:" + "1" * 64)
            verify.check_running = lambda *, expect=None: verify.Report("here", verify.PATCHED, found)
    """)
    )
    return os.environ | {"PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}", "CONTENT": "1"}


def test_serve_becomes_upstreams_command_in_the_same_process(tmp_path: Path) -> None:
    environment = fake_installation(tmp_path)
    words = [
        sys.executable,
        "-m",
        "vllm_ndt.cli",
        "serve",
        "m",
        "--require",
        "0.27.1+ndt.1",
        "-tp",
        "2",
        '--x={"a": 1}',
        "--port",
        "1",
    ]
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as run:
        out, err = run.communicate(timeout=60)
        arguments, process, _, first = json.loads(out)
    assert arguments == ["vllm", "serve", "m", "-tp", "2", '--x={"a": 1}', "--port", "1"]
    assert process == run.pid
    assert not first.endswith("vllm_ndt")
    assert err == f"vllm 0.27.1+ndt.1, verified: manifest sha256:{'1' * 64}, patches: a, b\n"


def test_serve_gives_a_home_to_a_user_without_one(tmp_path: Path) -> None:
    environment = fake_installation(tmp_path) | {"TMPDIR": str(tmp_path)}
    for home in ("/proc/nowhere", ""):
        done = command("serve", "m", env=environment | {"HOME": home})
        assert json.loads(done.stdout)[2] == f"{tmp_path}/vllm-ndt-{os.getuid()}"
    assert (tmp_path / f"vllm-ndt-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    done = command("serve", "m", env=environment | {"HOME": str(tmp_path)})
    assert json.loads(done.stdout)[2] == str(tmp_path)


def test_a_home_that_somebody_else_put_there_is_not_taken(tmp_path: Path) -> None:
    environment = {"HOME": "/proc/nowhere"}
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"vllm-ndt-{os.getuid()}").symlink_to(tmp_path / "theirs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        serve.make_home(environment)
    assert Path(environment["HOME"]).parent == tmp_path
    assert "vllm-ndt-" in environment["HOME"]
    assert not Path(environment["HOME"]).is_symlink()


REFUSED = {
    verify.EDITED: (1, "vllm/x.py: changed"),
    verify.INCOMPLETE: (1, "vllm/x.py: changed"),
    verify.ROLLED_BACK: (2, "vllm/x.py: changed"),
    verify.UNKNOWN: (3, "vllm/x.py: changed"),
}


@pytest.mark.parametrize("verdict", REFUSED)
def test_what_is_not_the_build_is_not_started(verdict: str) -> None:
    refused = serve.refusal(Report("/site", verdict, findings=["vllm/x.py: changed"]), None)
    assert refused
    assert refused[0] == REFUSED[verdict][0]
    assert refused[1][0].startswith("not started")
    assert ("could not be checked" in refused[1][0]) == (verdict == verify.UNKNOWN)
    assert refused[1][-1] == "  vllm/x.py: changed"


def test_another_version_is_refused(tmp_path: Path) -> None:
    done = command("serve", "m", "--require=0.27.1+ndt.2", env=fake_installation(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "not started: expected vllm 0.27.1+ndt.2 (--require), found 0.27.1+ndt.1; use that image or wheel\n"
    )


def test_wrong_usage_of_serve_is_no_verdict() -> None:
    done = command("serve", "--require")
    assert done.returncode == 3
    assert done.stderr.startswith("error: argument --require: expected one argument")


# a module that catches everything, as some of those that upstream imports do
CATCHES_ALL = """
import time
try:
    print("importing", flush=True)
    time.sleep(60)
except BaseException:
    pass
main = print
"""


def test_sigterm_to_a_containers_first_process_is_not_lost_in_an_import(tmp_path: Path) -> None:
    need_namespaces()
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(CATCHES_ALL)
    run = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, launch.__file__, "serve"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(launch.__file__).parents[1])])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout
    assert run.stdout.readline() == "importing\n"
    (first,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    assert run.wait(30) == 128 + signal.SIGTERM
    assert run.stdout.read() == ""
