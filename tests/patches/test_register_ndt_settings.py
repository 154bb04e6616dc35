# SPDX-License-Identifier: Apache-2.0
"""Upstream knows the VLLM_NDT_* variables, checks them when an engine is configured, and says what runs."""

import hashlib
import importlib.util
import itertools
import json
import logging
import multiprocessing
import os
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

VARIABLES = {
    "VLLM_NDT_ENCODER_CACHE_TOKENS": "32768",
    "VLLM_NDT_NAN_GUARD": "report",
    "VLLM_NDT_USAGE_STATS": "0",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No VLLM_* variable of the outside reaches a test."""
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("VLLM_NDT_USAGE_STATS", "maybe", "0 or 1"),
        ("VLLM_NDT_USAGE_STATS", "true", "0 or 1"),
        ("VLLM_NDT_NAN_GUARD", "sometimes", "off, report or abort"),
        ("VLLM_NDT_NAN_GUARD_LAYERS", "norm", "attention or attention,norm"),
        ("VLLM_NDT_NAN_INJECT", "layer=x", "layer=N,tensor=q|k|v|output,step=N (from 1),row=N (from 0),value=nan|inf"),
        (
            "VLLM_NDT_NAN_INJECT",
            "layer=2,tensor=output,step=5,row=0,value=nan",
            "nothing while VLLM_NDT_NAN_GUARD is off",
        ),
        ("VLLM_NDT_ENCODER_CACHE_TOKENS", "1e4", "a whole number of embeddings from 1 up"),
        ("VLLM_NDT_ENCODER_CACHE_TOKENS", "", "a whole number of embeddings from 1 up"),
    ],
)
def test_a_bad_value_stops_the_engines_configuration(monkeypatch, name, value, allowed):
    from vllm.config import VllmConfig

    monkeypatch.setenv(name, value)
    found = None
    try:
        VllmConfig()
    except Exception as error:
        found = error
    # Not wrapped by pydantic: this is the last line of what `vllm serve` prints.
    assert type(found).__name__ == "SettingError"
    assert str(found).startswith(f"{name}: expected {allowed}")
    remedy = "correct the variable or unset it"
    if allowed.startswith("nothing"):
        remedy = f"set VLLM_NDT_NAN_GUARD to report or abort, or unset {name}"
    assert str(found).endswith(f"found {value!r}; {remedy}")


@pytest.mark.parametrize("values", [{}, VARIABLES, {"VLLM_NDT_USAGE_STATS": " ", "VLLM_NDT_NAN_GUARD": " Report "}])
def test_good_values_start(monkeypatch, values):
    from vllm.config import VllmConfig

    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert VllmConfig().instance_id


def test_the_parts_of_a_fault_stand_in_any_order_and_each_once():
    from vllm_ndt.settings import Injection, SettingError, nan_inject

    def read(value):
        return nan_inject({"VLLM_NDT_NAN_GUARD": "report", "VLLM_NDT_NAN_INJECT": value})

    expected = Injection(2, "output", 5, 0, float("inf"))
    parts = ["layer=2", "tensor=output", "step=5", "row=0", "value=inf"]
    assert {read(",".join(order)) for order in itertools.permutations(parts)} == {expected}
    assert read(" VALUE = inf, row=0, Step=5, tensor=Output, layer=2") == expected
    bad = [
        [*parts, "row=0"],
        [*parts[1:], "row=0"],
        parts[1:],
        [*parts, ""],
        [*parts[:-1], "value=1"],
        [*parts[:-1], "x=1"],
    ]
    for given_parts in bad:
        with pytest.raises(SettingError, match="each once, found"):
            read(",".join(given_parts))


def test_no_variable_is_unknown(monkeypatch):
    import vllm.envs as envs

    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert {name: envs.environment_variables.get(name, str)() for name in VARIABLES} == VARIABLES
    # with fail_on_environ_validation an unknown variable ends the start here
    envs.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_NDT_NO_SUCH_THING", "1")
    with pytest.raises(ValueError, match="VLLM_NDT_NO_SUCH_THING"):
        envs.validate_environ(hard_fail=True)


def test_unset_variables_read_as_none():
    import vllm.envs as envs

    assert [getattr(envs, name) for name in VARIABLES] == [None] * len(VARIABLES)


def test_only_the_guard_enters_the_compile_caches_key(monkeypatch):
    import vllm.envs as envs

    plain = envs.compile_factors()
    changed = {}
    for name, value in VARIABLES.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            changed[name] = envs.compile_factors() != plain
    assert changed == {name: name == "VLLM_NDT_NAN_GUARD" for name in VARIABLES}


def test_envs_loads_without_the_overlay(monkeypatch):
    """Upstream's setup.py loads envs.py on its own, in a place that has neither vllm nor vllm_ndt."""
    import vllm.envs as envs

    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_ndt")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("vllm", "vllm_ndt"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("VLLM_NDT_USAGE_STATS", "anything")
    spec = importlib.util.spec_from_file_location("envs_alone", envs.__file__)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    assert alone.VLLM_NDT_USAGE_STATS == "anything"


class Recorder(logging.Handler):
    """Keeps the lines of one logger."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """A recorder for the start line; the manifest is one of the test's own and nothing was announced yet."""
    from vllm_ndt import start

    manifest = tmp_path / "manifest.json"
    facts = {"format": 1, "version": "9.9.9+ndt.1", "upstream": {"version": "9.9.9"}, "changed": [], "files": {}}
    manifest.write_text(json.dumps(facts | {"patches": [{"name": "one"}, {"name": "two"}]}))
    monkeypatch.setattr(start, "MANIFEST", manifest)
    monkeypatch.setattr(start, "_announced", False)
    logger, recorder = logging.getLogger("vllm.ndt"), Recorder()
    logger.addHandler(recorder)
    yield recorder
    logger.removeHandler(recorder)


def test_one_line_in_a_process_says_what_runs(recorder, tmp_path):
    from vllm.config import VllmConfig

    VllmConfig()
    VllmConfig()
    digest = hashlib.sha256((tmp_path / "manifest.json").read_bytes()).hexdigest()
    assert recorder.lines == [("INFO", f"vLLM 9.9.9+ndt.1, patched: one, two; manifest sha256:{digest}")]


def test_the_line_reaches_the_log(recorder):
    """Only "vllm" and what is below it has a handler in upstream's logging configuration."""
    from vllm.config import VllmConfig

    heard = Recorder()
    logging.getLogger("vllm").addHandler(heard)
    try:
        VllmConfig()
    finally:
        logging.getLogger("vllm").removeHandler(heard)
    assert [line for _, line in heard.lines if "9.9.9+ndt.1" in line]


def test_child_processes_check_but_do_not_repeat_the_line(recorder):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_configure_in_child, args=(recorder, results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == ([], True)


def _configure_in_child(recorder, results):
    from vllm.config import VllmConfig

    VllmConfig()
    os.environ["VLLM_NDT_USAGE_STATS"] = "maybe"
    refused = False
    try:
        VllmConfig()
    except Exception as error:
        refused = type(error).__name__ == "SettingError"
    results.put((recorder.lines, refused))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "missing"),
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b'{"version": "1"}', "damaged"),
        (b'{"version": "1", "patches": [{"subject": "x"}]}', "damaged"),
        (b'{"version": "1", "patches": [{"name": 1}]}', "damaged"),
        ("folder", "unreadable"),
    ],
)
def test_a_bad_manifest_is_named_and_stops_nothing(tmp_path, content, word):
    from vllm_ndt import start

    manifest = tmp_path / "manifest.json"
    if content == "folder":
        manifest.mkdir()
    elif content is not None:
        manifest.write_bytes(content)
    line = start.start_line(manifest)
    assert f"manifest {word}" in line and line.endswith("run `vllm-ndt verify`") and "\n" not in line


def test_the_installed_manifest_fits_the_installed_version():
    import vllm
    from vllm_ndt import start

    line = start.start_line(start.MANIFEST)
    assert line.startswith(f"vLLM {vllm.__version__}, patched: register-ndt-settings, ")


SPACES = st.sampled_from(["", " ", "\t", " \n"])
NUMBERS = st.tuples(SPACES, st.text("0123456789", min_size=1, max_size=20), SPACES).map("".join)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(VARIABLES)), st.one_of(st.text(max_size=20), NUMBERS))
def test_any_value_is_taken_or_refused_by_name(name, value):
    from vllm_ndt import settings as ndt

    environ = {name: value}
    try:
        ndt.check(environ)
    except ndt.SettingError as error:
        assert str(error).startswith(f"{name}: expected ")
        assert repr(value) in str(error)
    else:
        tokens = ndt.encoder_cache_tokens(environ)
        assert tokens is None or tokens == int(value) >= 1
