# SPDX-License-Identifier: Apache-2.0
"""Usage statistics: off unless asked for, and nothing is sent, started or written while they are off."""

import http.server
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ASK = "VLLM_NDT_USAGE_STATS"
OPT_OUTS = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK")
CASES = json.loads(Path(__file__).with_name("data").joinpath("usage-stats.json").read_text())
# How long a message may take to arrive where statistics are on: upstream first asks for the processor's name.
PATIENCE = 60


class Collector(http.server.ThreadingHTTPServer):
    """A statistics server on loopback that keeps what it is sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages = []

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (ASK, *OPT_OUTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def usage_lib(monkeypatch, tmp_path):
    """Upstream's module as after a fresh import with an empty configuration folder that does not exist yet."""
    import vllm.usage.usage_lib as usage_lib

    _point_at(monkeypatch, usage_lib, tmp_path / "home" / ".config" / "vllm")
    return usage_lib


def _point_at(monkeypatch, usage_lib, root):
    """Give the module the configuration folder that VLLM_CONFIG_ROOT would have given it at import."""
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_JSON_PATH", str(root / "usage_stats.json"))
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_DO_NOT_TRACK_PATH", str(root / "do_not_track"))
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)


@pytest.fixture
def clock(monkeypatch, usage_lib):
    """Ten-minute waits pass at once, three times; then the thread ends."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) > 3:
            raise SystemExit

    monkeypatch.setattr(usage_lib, "time", SimpleNamespace(sleep=sleep))
    return waits


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return tiny_models.engine_config(tiny_models.write_text_model(tmp_path_factory.mktemp("model")))


def _threads_started_by(action):
    """The threads that `action` starts, after they have ended."""
    before = set(threading.enumerate())
    started = []
    start = threading.Thread.start

    def noticed(thread):
        started.append(thread)
        start(thread)

    with mock.patch.object(threading.Thread, "start", noticed):
        action()
        ours = [thread for thread in started if thread not in before and "_report_usage_worker" in thread.name]
    for thread in ours:
        thread.join(PATIENCE)
    return ours


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['env']}{' file' * case['file']}")
def test_case(monkeypatch, usage_lib, case):
    for name, value in case["env"].items():
        monkeypatch.setenv(name, value)
    if case["file"]:
        marker = Path(usage_lib._USAGE_STATS_DO_NOT_TRACK_PATH)
        marker.parent.mkdir(parents=True)
        marker.touch()
    right = case[os.environ.get("TREE", "patched")]
    if right == "error":
        with pytest.raises(Exception, match=f"{ASK}: expected 0 or 1, found 'maybe'"):
            usage_lib.is_usage_stats_enabled()
    else:
        assert usage_lib.is_usage_stats_enabled() is right


def test_nothing_is_sent_by_default(monkeypatch, usage_lib, clock, collector, config, tmp_path):
    from vllm.v1.utils import report_usage_stats

    monkeypatch.setattr(usage_lib, "_USAGE_STATS_SERVER", collector.address)
    threads = _threads_started_by(lambda: report_usage_stats(config))
    assert collector.messages == []
    assert threads == []
    assert clock == []
    assert list(tmp_path.iterdir()) == []


def test_a_direct_call_sends_nothing_either(monkeypatch, usage_lib, clock, collector, tmp_path):
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_SERVER", collector.address)
    message, context = usage_lib.UsageMessage(), usage_lib.UsageContext.UNKNOWN_CONTEXT
    threads = _threads_started_by(lambda: message.report_usage("Model", context))
    assert collector.messages == []
    assert threads == []
    assert list(tmp_path.iterdir()) == []


# the thread would wait and send for ever; the clock ends it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_statistics_that_were_asked_for_are_sent(monkeypatch, usage_lib, clock, collector, config, tmp_path):
    """The control of the tests above: the same call does send when it may."""
    from vllm.v1.utils import report_usage_stats

    monkeypatch.setenv(ASK, "1")
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_SERVER", collector.address)
    threads = _threads_started_by(lambda: report_usage_stats(config))
    assert len(threads) == 1
    assert clock == [600] * 4
    assert [message.get("model_architecture") for message in collector.messages] == ["Qwen2ForCausalLM"] + [None] * 3
    assert len(Path(usage_lib._USAGE_STATS_JSON_PATH).read_text().splitlines()) == 4


IN_A_NEW_PROCESS = """
import os, sys, threading, time
seen = []
def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect"):
        seen.append(repr(arguments[-1] if event == "socket.connect" else arguments))
sys.addaudithook(watch)
import tiny_models
from pathlib import Path
from vllm.v1.utils import report_usage_stats
config = tiny_models.engine_config(Path(sys.argv[1]))
report_usage_stats(config)
threads = [thread.name for thread in threading.enumerate() if "usage" in thread.name]
for thread in threading.enumerate():
    if "usage" in thread.name:
        thread.join(20)
print([threads, [call for call in seen if sys.argv[2] in call]], file=sys.__stderr__)
"""


def test_a_new_process_leaves_an_empty_home_empty(collector, tmp_path):
    """From import on: no configuration folder, no thread, no look-up of or connection to the server's address."""
    model, home = tiny_models.write_text_model(tmp_path / "model"), tmp_path / "home"
    home.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "XDG_"))}
    environ |= {
        "HOME": str(home),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "VLLM_USAGE_STATS_SERVER": collector.address,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, str(model), str(collector.server_port)]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert collector.messages == []
    assert done.stderr.splitlines()[-1] == "[[], []]"
    assert "Traceback" not in done.stderr
    assert not (home / ".config").exists()


@pytest.mark.parametrize("kind", ["file", "empty folder", "dangling link", "mode 0000", "full folder", "link to root"])
def test_any_kind_of_marker_keeps_statistics_off(monkeypatch, usage_lib, kind):
    monkeypatch.setenv(ASK, "1")
    marker = Path(usage_lib._USAGE_STATS_DO_NOT_TRACK_PATH)
    marker.parent.mkdir(parents=True)
    if kind == "dangling link":
        marker.symlink_to("nowhere")
    elif kind == "link to root":
        marker.symlink_to("/")
    elif "folder" in kind:
        marker.mkdir()
        if kind == "full folder":
            (marker / "file").touch()
    else:
        marker.touch(mode=0 if kind == "mode 0000" else 0o644)
    assert usage_lib.is_usage_stats_enabled() is False


def test_no_marker_lets_them_on(monkeypatch, usage_lib):
    """With and without the folder that would hold it."""
    monkeypatch.setenv(ASK, "1")
    assert usage_lib.is_usage_stats_enabled() is True
    Path(usage_lib._USAGE_STATS_DO_NOT_TRACK_PATH).parent.mkdir(parents=True)
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    assert usage_lib.is_usage_stats_enabled() is True


@pytest.mark.parametrize("kind", ["the folder is a file", "links in a circle", "name too long"])
def test_a_place_that_cannot_be_looked_at_keeps_them_off(monkeypatch, usage_lib, tmp_path, kind):
    root = tmp_path / "root"
    if kind == "the folder is a file":
        root.touch()
    elif kind == "links in a circle":
        root.symlink_to(root)
    else:
        root = tmp_path / ("x" * 5000)
    monkeypatch.setenv(ASK, "1")
    _point_at(monkeypatch, usage_lib, root)
    assert usage_lib.is_usage_stats_enabled() is False


@pytest.fixture
def shared_folder():
    """A folder that every user can search, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    if not _as_another_user(lambda: os.access(folder, os.X_OK)):
        shutil.rmtree(folder)
        pytest.skip(f"{folder} is below a folder that other users may not search: set TMPDIR to one that they may")
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def _as_another_user(answer):
    """What `answer` returns in a child without root's rights; the same process's copy, since it has vllm loaded."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_drop_rights_and_answer, args=(answer, results))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    return results.get()


def _drop_rights_and_answer(answer, results):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    results.put(answer())


def test_a_folder_that_may_not_be_searched_keeps_them_off(monkeypatch, usage_lib, shared_folder):
    """A configuration folder of mode 0700 that belongs to another user (mode 0000 where the tests are not root)."""
    monkeypatch.setenv(ASK, "1")
    usage_lib.is_usage_stats_enabled()  # whatever it imports is loaded before the rights are dropped
    root = shared_folder / "vllm"
    root.mkdir(mode=0o755)
    _point_at(monkeypatch, usage_lib, root)
    assert _as_another_user(usage_lib.is_usage_stats_enabled) is True
    root.chmod(0o700 if os.geteuid() == 0 else 0)
    assert _as_another_user(usage_lib.is_usage_stats_enabled) is False


def test_a_home_that_may_not_be_written_gives_no_traceback(monkeypatch, usage_lib, clock, config, shared_folder):
    from vllm.v1.utils import report_usage_stats

    usage_lib.is_usage_stats_enabled()
    root = shared_folder / "home" / ".config" / "vllm"
    _point_at(monkeypatch, usage_lib, root)
    shared_folder.chmod(0o555)

    def report():
        failed = []
        threading.excepthook = lambda failure: failed.append(repr(failure.exc_value))
        threads = _threads_started_by(lambda: report_usage_stats(config))
        return len(threads), failed, os.access(shared_folder, os.W_OK)

    assert _as_another_user(report) == (0, [], False)


SPACES = st.sampled_from(["", " ", "\t", "  \n"])


def _spellings(words):
    """The words in any case with spaces around."""
    cased = words.flatmap(lambda word: st.tuples(*[st.sampled_from([c.lower(), c.upper()]) for c in word]).map("".join))
    return st.tuples(SPACES, cased, SPACES).map("".join)


NO_OPT_OUT = _spellings(st.sampled_from(["", "0", "false", "no", "off"]))
# what an environment can hold: any character but NUL and lone surrogates
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
ANY_OPT_OUT = st.one_of(
    _spellings(st.sampled_from(["1", "true", "yes", "on", "y", "t", "2", "enabled"])),
    TEXT.filter(lambda text: text.strip().lower() not in ("", "0", "false", "no", "off")),
)
QUIET = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=200
)


def _enabled(usage_lib, environ):
    usage_lib._USAGE_STATS_ENABLED = None
    with mock.patch.dict(os.environ, environ):
        return usage_lib.is_usage_stats_enabled()


@QUIET
@given(st.sampled_from(OPT_OUTS), ANY_OPT_OUT, st.dictionaries(st.sampled_from(OPT_OUTS), NO_OPT_OUT))
def test_one_opt_out_in_any_spelling_wins_over_the_others(usage_lib, name, value, others):
    assert _enabled(usage_lib, {ASK: "1"} | others | {name: value}) is False


@QUIET
@given(_spellings(st.just("1")), st.dictionaries(st.sampled_from(OPT_OUTS), NO_OPT_OUT))
def test_a_no_in_any_spelling_is_no_opt_out(usage_lib, ask, environ):
    assert _enabled(usage_lib, {ASK: ask} | environ) is True


@QUIET
@given(_spellings(st.sampled_from(["", "0"])), st.dictionaries(st.sampled_from(OPT_OUTS), NO_OPT_OUT))
def test_nothing_but_the_one_switch_lets_them_on(usage_lib, ask, environ):
    assert _enabled(usage_lib, environ) is False
    assert _enabled(usage_lib, {ASK: ask} | environ) is False


@pytest.mark.parametrize(
    ("environ", "marked", "reason"),
    [
        ({}, False, f"{ASK} is not 1"),
        ({ASK: "1", "DO_NOT_TRACK": "true"}, False, "DO_NOT_TRACK='true'"),
        ({ASK: "1", "VLLM_DO_NOT_TRACK": "0", "VLLM_NO_USAGE_STATS": "x"}, False, "VLLM_NO_USAGE_STATS='x'"),
        ({ASK: "1"}, True, "{marker} exists"),
        ({ASK: "1"}, None, "{marker} cannot be looked at (Not a directory)"),
        ({ASK: "1"}, False, f"{ASK}=1 and no opt-out"),
    ],
)
def test_the_reason_names_the_switch_that_decided(tmp_path, environ, marked, reason):
    from vllm_ndt.usage import decide

    root = tmp_path / "root"
    if marked is None:
        root.touch()
    else:
        root.mkdir()
        if marked:
            (root / "do_not_track").touch()
    marker = str(root / "do_not_track")
    decision = decide(environ, marker)
    assert decision.reason == reason.format(marker=marker)
    assert decision.enabled is reason.endswith("no opt-out")
