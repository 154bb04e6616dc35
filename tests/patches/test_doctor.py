# SPDX-License-Identifier: Apache-2.0
"""`vllm-ndt doctor`: what each check says of recorded inputs of good and bad machines, and one run on this one."""

import argparse
import dataclasses
import io
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_ndt import (
    child,
    doctor,
    doctor_cli,
    doctor_flags,
    doctor_gpu,
    doctor_host,
    doctor_install,
    doctor_network,
    doctor_serving,
    doctor_v100,
    manifest,
    nvml,
    verify,
)
from vllm_ndt.doctor_findings import FAULT, GOOD, UNCHECKED, WARNING, Finding
from vllm_ndt.doctor_flags import FlagError, Model, Serving
from vllm_ndt.doctor_gpu import Library, Log
from vllm_ndt.doctor_host import Memory, Tracing
from vllm_ndt.doctor_network import Encodings
from vllm_ndt.doctor_serving import Budget
from vllm_ndt.doctor_v100 import FlashAttention
from vllm_ndt.fatbin import CUBIN, PTX, Arch
from vllm_ndt.nvml import Answer, Gpu

DATA = Path(__file__).parent / "data" / "doctor"
GIB, MIB = 2**30, 2**20
DIGEST = "a" * 64


def gpu(name: str, gib: float, capability: tuple[int, int], index: int = 0) -> Gpu:
    return Gpu(index, name, int(gib * GIB), capability)


H200 = gpu("NVIDIA H200", 139.7, (9, 0))
V100 = gpu("Tesla V100-SXM2-32GB", 32, (7, 0))
BIG_4090 = gpu("NVIDIA GeForce RTX 4090", 47.99, (8, 9))
USUAL_4090 = gpu("NVIDIA GeForce RTX 4090", 23.99, (8, 9))


def serving(model: Model | None = None, **changes: Any) -> Serving:
    return dataclasses.replace(
        Serving(("--model", "/m"), model or Model("/m", True, {"model_type": "qwen3"})), **changes
    )


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def only(findings: list[Finding], level: str, *said: str) -> Finding:
    """The only finding, which has this level and says this in its line or its remedy."""
    assert levels(findings) == [level], findings
    [finding] = findings
    for text in said:
        assert text in f"{finding.found}; {finding.remedy}", finding
    if level in (WARNING, FAULT):
        assert finding.reason
        assert finding.remedy
    return finding


# ---- the installation ----

MANIFEST = manifest.Manifest("0.27.1+ndt.1", "0.27.1", ("a-patch",), frozenset(), {}, f"sha256:{DIGEST}")


@pytest.mark.parametrize(
    ("verdict", "findings", "level", "said"),
    [
        (verify.PATCHED, [], GOOD, "0.27.1+ndt.1"),
        (verify.EDITED, ["vllm/envs.py: changed"], FAULT, "pip install --force-reinstall --no-deps WHEEL"),
        (verify.INCOMPLETE, ["vllm/envs.py: missing"], FAULT, "vllm/envs.py: missing"),
        (verify.ROLLED_BACK, ["vllm 0.27.1 without this project's manifest"], FAULT, "--force-reinstall"),
        (verify.ROLLED_BACK, ["another vllm comes first on the path: /x"], FAULT, "the path entry that leads there"),
        (verify.UNKNOWN, ["vllm/envs.py: expected to read it"], WARNING, "as a user who can read"),
    ],
)
def test_own_files(verdict: str, findings: list[str], level: str, said: str) -> None:
    only(doctor_install.files(verify.Report("/site", verdict, MANIFEST, findings)), level, said)


def test_many_edited_files_are_counted() -> None:
    report = verify.Report("/site", verify.EDITED, MANIFEST, [f"vllm/{n}.py: changed" for n in range(50)])
    only(doctor_install.files(report), FAULT, "and 47 more")


@pytest.mark.parametrize(
    ("found", "expect", "level", "said"),
    [
        (MANIFEST, DIGEST, GOOD, DIGEST),
        (MANIFEST, f"sha256:{DIGEST}", GOOD, DIGEST),
        (MANIFEST, "b" * 64, FAULT, f"install the wheel or image of manifest sha256:{'b' * 64}"),
        (None, DIGEST, FAULT, "no manifest"),
        (MANIFEST, None, UNCHECKED, "--expect DIGEST"),
    ],
)
def test_expected_build(found: manifest.Manifest | None, expect: str | None, level: str, said: str) -> None:
    only(doctor_install.build(found, expect), level, said)


def test_locked_versions() -> None:
    locked = {"torch": "2.13.0", "transformers": "5.15.0"}
    good = doctor_install.Versions(locked, {"torch": "2.13.0+cu130", "transformers": "5.15.0"})
    only(doctor_install.versions(good), GOOD, "all 2")
    other = doctor_install.Versions(locked, {"torch": None, "transformers": "5.24.0"})
    said = ("torch missing (locked 2.13.0)", "transformers 5.24.0 (locked 5.15.0)", "-c constraints.txt")
    only(doctor_install.versions(other), WARNING, *said)
    many = {f"p{n}": "1" for n in range(15)}
    only(doctor_install.versions(doctor_install.Versions(many, dict.fromkeys(many, "2"))), WARNING, "and 5 more")
    only(doctor_install.versions(doctor_install.Versions({}, {}, "no vllm is installed")), UNCHECKED, "no vllm")


def test_the_lock_is_what_the_extra_pins_for_this_machine() -> None:
    lines = (DATA / "requires-dist.txt").read_text().splitlines()
    assert doctor_install.locked_of(lines) == {
        "torch": "2.13.0",
        "transformers": "5.15.0",
        "typing-extensions": "4.15.0",
        "nvidia-nccl-cu13": "2.29.7",
    }


def test_settings() -> None:
    only(doctor_install.variables({}), GOOD, "no VLLM_NDT_ variable")
    only(doctor_install.variables({"VLLM_NDT_NAN_GUARD": "report"}), GOOD, "VLLM_NDT_NAN_GUARD")
    only(doctor_install.variables({"VLLM_NDT_NAN_GUARD": "on"}), FAULT, "unset VLLM_NDT_NAN_GUARD", "'on'")


# ---- what leaves the machine ----


def test_usage_statistics_and_the_switch_that_decides(tmp_path: Path) -> None:
    marker, on = tmp_path / "do_not_track", {"VLLM_NDT_USAGE_STATS": "1"}
    only(doctor_network.statistics({}, str(marker)), GOOD, "off: VLLM_NDT_USAGE_STATS is not 1")
    only(doctor_network.statistics(on, str(marker)), WARNING, "on:", "unset VLLM_NDT_USAGE_STATS")
    only(doctor_network.statistics(on | {"DO_NOT_TRACK": "true"}, str(marker)), GOOD, "off: DO_NOT_TRACK='true'")
    marker.symlink_to(tmp_path / "nothing")
    only(doctor_network.statistics(on, str(marker)), GOOD, f"off: {marker} exists")
    only(doctor_network.statistics({"VLLM_NDT_USAGE_STATS": "2"}, str(marker)), FAULT, "unset VLLM_NDT_USAGE_STATS")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"VLLM_CONFIG_ROOT": "/etc/vllm"}, "/etc/vllm/do_not_track"),
        ({"XDG_CONFIG_HOME": "/c"}, "/c/vllm/do_not_track"),
    ],
)
def test_where_the_marker_is(environ: dict[str, str], expected: str) -> None:
    assert doctor_network.marker_of(environ) == expected


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, WARNING),
        ({"HF_HUB_DISABLE_TELEMETRY": "0"}, WARNING),
        ({"HF_HUB_DISABLE_TELEMETRY": "1"}, GOOD),
        ({"DO_NOT_TRACK": "true"}, GOOD),
        ({"HF_HUB_OFFLINE": "yes"}, GOOD),
    ],
)
def test_hub_telemetry(environ: dict[str, str], level: str) -> None:
    only(doctor_network.telemetry(environ), level, "HF_HUB_DISABLE_TELEMETRY=1" if level == WARNING else "off")


def test_downloads_at_start() -> None:
    named = serving(Model("org/name", False))
    only(doctor_network.downloads({"HF_HUB_OFFLINE": "1"}, named), GOOD, "offline")
    only(doctor_network.downloads({"TRANSFORMERS_OFFLINE": "1"}, named), GOOD, "offline")
    only(doctor_network.downloads({}, serving()), GOOD, "the model is a folder")
    only(doctor_network.downloads({}, named), WARNING, "org/name", "export HF_HUB_OFFLINE=1")
    only(doctor_network.downloads({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, None), WARNING, "may be asked")


def test_kernels_of_flashinfer() -> None:
    b200 = gpu("NVIDIA B200", 179, (10, 0))
    assert doctor_network.kernels({}, [H200, V100], False) == []
    only(doctor_network.kernels({"HF_HUB_OFFLINE": "1"}, [b200], False), WARNING, "pip install flashinfer-cubin")
    only(doctor_network.kernels({}, [b200], True), GOOD, "flashinfer-cubin")
    only(doctor_network.kernels({"VLLM_HAS_FLASHINFER_CUBIN": "1"}, [b200], False), GOOD, "flashinfer-cubin")


NONE = Encodings("", False, False)
GPT_OSS = serving(Model("/m", True, {"model_type": "gpt_oss"}))
VISION = serving(Model("/m", True, {"model_type": "qwen3_vl", "vision_config": {}}))
ADAPTERS = {"VLLM_LORA_RESOLVER_HF_REPO_LIST": "org/a", "VLLM_PLUGINS": "lora_hf_hub_resolver"}


@pytest.mark.parametrize(
    ("environ", "flags", "encodings", "level", "said"),
    [
        ({}, None, NONE, GOOD, "with --model more is checked"),
        ({}, serving(), NONE, GOOD, "none known for this model"),
        # the hub's switch does not stop this one
        ({"HF_HUB_OFFLINE": "1"}, GPT_OSS, NONE, WARNING, "export TIKTOKEN_ENCODINGS_BASE=FOLDER"),
        ({}, GPT_OSS, Encodings("/e", False, False), FAULT, "/e has no o200k_base.tiktoken"),
        ({}, GPT_OSS, Encodings("/e", True, False), GOOD, "TIKTOKEN_ENCODINGS_BASE=/e"),
        ({}, VISION, NONE, WARNING, "--allowed-media-domains"),
        ({}, dataclasses.replace(VISION, any_media=False), NONE, GOOD, "none known"),
        (ADAPTERS, serving(), NONE, WARNING, "unset VLLM_LORA_RESOLVER_HF_REPO_LIST"),
        (ADAPTERS | {"HF_HUB_OFFLINE": "1"}, serving(), NONE, GOOD, "none known"),
        ({"VLLM_LORA_RESOLVER_HF_REPO_LIST": "org/a"}, serving(), NONE, GOOD, "none known"),
    ],
)
def test_downloads_at_requests(
    environ: dict[str, str], flags: Serving | None, encodings: Encodings, level: str, said: str
) -> None:
    only(doctor_network.late_downloads(environ, flags, encodings), level, said)


def test_where_the_encodings_are(tmp_path: Path) -> None:
    environ = {"TIKTOKEN_ENCODINGS_BASE": str(tmp_path), "TIKTOKEN_RS_CACHE_DIR": str(tmp_path)}
    assert doctor_network.read_encodings(environ) == Encodings(str(tmp_path), False, False)
    (tmp_path / "o200k_base.tiktoken").write_text("")
    assert doctor_network.read_encodings(environ) == Encodings(str(tmp_path), True, True)


# ---- cards and driver ----


@pytest.mark.parametrize(
    ("answer", "on_bus", "level", "said"),
    [
        (Answer(nvml.READ, "", "580.95.05", (H200,)), 1, GOOD, "0: NVIDIA H200, 140 GiB, sm_90"),
        (Answer(nvml.READ, "", "580.95.05"), 0, UNCHECKED, "knows no card"),
        (Answer(nvml.ABSENT, "NVML Shared Library Not Found"), 0, UNCHECKED, "NVML Shared Library Not Found"),
        (Answer(nvml.ABSENT, "NVML Shared Library Not Found"), 2, WARNING, "--gpus all"),
        (Answer(nvml.FAILED, "Driver/library version mismatch"), 1, FAULT, "reboot"),
        (Answer(nvml.HUNG, "no answer in 5 seconds"), 1, FAULT, "reboot"),
        (Answer(nvml.READ, "", "580.95.05", lost=("GPU 1: GPU is lost",)), 2, FAULT, "reboot"),
    ],
)
def test_cards(answer: Answer, on_bus: int, level: str, said: str) -> None:
    only(doctor_gpu.cards(answer, on_bus), level, said)


def test_a_lost_card_does_not_hide_the_others() -> None:
    answer = Answer(nvml.READ, "", "580.95.05", (H200,), ("GPU 1: GPU is lost",))
    assert levels(doctor_gpu.cards(answer, 2)) == [FAULT, GOOD]


@pytest.mark.parametrize(
    ("version", "gpus", "level", "said"),
    [
        ("580.95.05", [H200], GOOD, "580.95.05"),
        ("580.126.09", [BIG_4090], GOOD, "NVIDIA GeForce RTX 4090 with 48 GiB"),
        ("605.12.04", [BIG_4090], FAULT, "nvidia-driver.pref"),
        ("612.01", [H200, BIG_4090], FAULT, "reboot"),
        ("604.99", [BIG_4090], WARNING, "nvidia-driver.pref"),
        ("590.48.01", [BIG_4090], WARNING, "more than it was sold with"),
        ("605.12.04", [USUAL_4090], WARNING, "nvidia-driver.pref"),
        ("570.133.20", [H200], WARNING, "nvidia-driver.pref"),
        ("no number", [H200], WARNING, "not branch 580"),
        ("", [], UNCHECKED, "no driver"),
    ],
)
def test_driver(version: str, gpus: list[Gpu], level: str, said: str) -> None:
    only(doctor_gpu.driver(version, gpus), level, said)


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", 22, True),
        ("GeForce RTX 2080 Ti", 10.99, False),
        ("NVIDIA GeForce RTX 3080", 20, True),
        ("NVIDIA GeForce RTX 3080", 12, False),
        # a laptop's card is another one
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16, False),
        ("NVIDIA GeForce RTX 4060 Ti", 15.99, False),
        ("NVIDIA GeForce RTX 4090 D", 48, True),
        ("NVIDIA GeForce RTX 5090", 31.8, False),
        ("NVIDIA RTX 6000 Ada Generation", 48, False),
        ("NVIDIA GeForce RTX 9999", 96, False),
    ],
)
def test_memory_that_a_card_was_not_sold_with(name: str, gib: float, expected: bool) -> None:
    assert doctor_gpu.modified(gpu(name, gib, (8, 6))) is expected


def log_of(name: str) -> Log:
    return Log("dmesg", tuple((DATA / name).read_text().splitlines()))


def test_kernel_log_of_a_good_machine() -> None:
    only(doctor_gpu.kernel_log(log_of("kernel-good.txt"), 1), GOOD, "no Xid")


def test_kernel_log_of_a_lost_card() -> None:
    gsp, recovery, other = doctor_gpu.kernel_log(log_of("kernel-lost.txt"), 1)
    only([gsp], FAULT, "Xid 119 of 0000:41:00, 2 times: pid=91823", "reboot")
    only([recovery], FAULT, "Xid 154", "(Node Reboot Required)", "driver 580")
    only([other], WARNING, "Xid 31 of 0000:01:00 (1)", "journalctl -k")


def test_a_recovery_that_is_over_is_no_fault() -> None:
    lines = (
        "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    )
    only(doctor_gpu.kernel_log(Log("dmesg", lines), 1), WARNING, "Xid 154 of 0000:41:00 (2)")
    only(doctor_gpu.kernel_log(Log("dmesg", lines[::-1]), 1), FAULT, "reboot")


def test_a_kernel_log_that_may_not_be_read_is_not_checked() -> None:
    log = Log("", why_not="dmesg: not permitted, or empty; /dev/kmsg: Operation not permitted")
    only(doctor_gpu.kernel_log(log, 1), UNCHECKED, "on the host", "journalctl -k | grep 'NVRM: Xid'")


# as upstream's published wheel of 0.27.1 and PyTorch 2.13 have them
STABLE = Library(
    "vllm/_C_stable_libtorch.abi3.so",
    (*(Arch(CUBIN, sm) for sm in (75, 80, 86, 89, 90, 100, 120)), Arch(PTX, 80)),
    needed=True,
)
FA2 = Library("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", (Arch(CUBIN, 80), Arch(PTX, 80)))
FA3 = Library("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", (Arch(CUBIN, 90, "a"),))
TORCH = Library("torch/lib/libtorch_cuda.so", tuple(Arch(CUBIN, sm) for sm in (75, 80, 86, 90, 100, 120)), needed=True)
WHEEL = [STABLE, FA2, FA3, TORCH]


def test_code_for_the_cards() -> None:
    only(doctor_gpu.code([H200, H200], WHEEL), GOOD, "sm_90 is there")
    t4 = gpu("Tesla T4", 15, (7, 5))
    only(doctor_gpu.code([t4], WHEEL), GOOD, "sm_75 is there; not in vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so")
    v100 = only(doctor_gpu.code([V100], WHEEL), FAULT, "sm_70: none in vllm/_C_stable", "TRITON_ATTN", "source build")
    assert "CUDA 12.6" in v100.remedy
    p40 = gpu("Tesla P40", 24, (6, 1))
    only(doctor_gpu.code([p40], WHEEL), FAULT, "sm_61: none in", "build vLLM from source")
    assert levels(doctor_gpu.code([H200, V100], WHEEL)) == [FAULT, GOOD]
    # no machine code, but PTX that the driver translates
    only(doctor_gpu.code([gpu("a later card", 24, (13, 0))], [STABLE]), GOOD, "sm_130 is there")


def test_code_that_cannot_be_judged() -> None:
    only(doctor_gpu.code([], WHEEL), UNCHECKED, "no card to compare with; sm_75 sm_80")
    only(doctor_gpu.code([], [TORCH]), UNCHECKED, "no build for NVIDIA cards")
    only(doctor_gpu.code([H200], [TORCH]), WARNING, "install the CUDA wheel")
    broken = Library("vllm/_moe_C.abi3.so", problem="_moe_C.abi3.so: expected an ELF library, found b'<htm'")
    assert levels(doctor_gpu.code([H200], [broken, *WHEEL])) == [WARNING, GOOD]
    only(doctor_gpu.code([H200], [broken, *WHEEL])[:1], WARNING, "_moe_C.abi3.so", "vllm-ndt verify --deep")


def test_cards_on_the_bus(tmp_path: Path) -> None:
    for index, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        device = tmp_path / str(index)
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "empty").mkdir()
    assert doctor_gpu.read_bus(tmp_path) == 1
    assert doctor_gpu.read_bus(tmp_path / "nothing") == 0


def test_driver_without_nvml(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("605.12.04\n")
    assert doctor_gpu.read_driver(Answer(nvml.HUNG), tmp_path / "version") == "605.12.04"
    assert doctor_gpu.read_driver(Answer(nvml.READ, "", "580.1"), tmp_path / "version") == "580.1"
    assert doctor_gpu.read_driver(Answer(nvml.ABSENT), tmp_path / "nothing") == ""


# ---- NVML ----

FAKE = """
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
    def __str__(self):
        return {9: "Driver Not Loaded", 15: "GPU is lost", 18: "Driver/library version mismatch"}[self.value]
class Memory:
    total = 51526049792
def nvmlInit():
    print("a line that is no answer")
    INIT
def nvmlSystemGetDriverVersion():
    return b"605.12.04"
def nvmlDeviceGetCount():
    return 2
def nvmlDeviceGetHandleByIndex(index):
    if index:
        raise NVMLError(15)
    return index
def nvmlDeviceGetName(handle):
    return "NVIDIA GeForce RTX 4090"
def nvmlDeviceGetMemoryInfo(handle):
    return Memory
def nvmlDeviceGetCudaComputeCapability(handle):
    return 8, 9
"""


def nvml_of(folder: Path, init: str, limit: float = 60) -> Answer:
    path = folder / "fake_nvml.py"
    path.write_text(FAKE.replace("INIT", init))
    return nvml.read(limit, path)


def test_nvml_answers(tmp_path: Path) -> None:
    answer = nvml_of(tmp_path, "pass")
    expected = Gpu(0, "NVIDIA GeForce RTX 4090", 51526049792, (8, 9))
    assert answer == Answer(nvml.READ, "", "605.12.04", (expected,), ("GPU 1: GPU is lost",))
    assert doctor_gpu.modified(expected)


def test_nvml_that_hangs_is_given_up(tmp_path: Path) -> None:
    started = time.monotonic()
    answer = nvml_of(tmp_path, "import time; time.sleep(600)", limit=1)
    assert answer == Answer(nvml.HUNG, "no answer in 1 seconds")
    assert time.monotonic() - started < 300


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("raise NVMLError(9)", Answer(nvml.ABSENT, "Driver Not Loaded")),
        ("raise NVMLError(18)", Answer(nvml.FAILED, "Driver/library version mismatch")),
        ("raise ImportError", Answer(nvml.ABSENT, "no Python module for NVML (pynvml)")),
        ("import os; os._exit(1)", Answer(nvml.FAILED, "no answer that can be read (JSONDecodeError)")),
        ("import os; os.kill(os.getpid(), 11)", Answer(nvml.FAILED, "no answer that can be read (JSONDecodeError)")),
    ],
)
def test_nvml_that_fails(tmp_path: Path, init: str, expected: Answer) -> None:
    assert nvml_of(tmp_path, init) == expected


def test_a_process_that_is_given_up_takes_its_children_along(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    script = f"sleep 2; touch {path}"
    with pytest.raises(child.GaveUp):
        child.run(["sh", "-c", f"({script}) & wait"], 0.5)
    time.sleep(2.5)
    assert not path.exists()


# ---- V100 ----


def test_traps_need_a_v100_and_a_model() -> None:
    bfloat16 = serving(dtype="bfloat16")
    only(doctor_v100.traps([H200], bfloat16, {}), GOOD, "no such card")
    assert doctor_v100.traps([], bfloat16, {}) == []
    only(doctor_v100.traps([V100], None, {}), UNCHECKED, "--model MODEL")


def quantised(method: str, **more: Any) -> Serving:
    config = {"dtype": "float16", "quantization_config": {"quant_method": method, **more}}
    return serving(Model("/m", True, config))


W4A16 = {"config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}}
BF16 = Model("/m", True, {"text_config": {"dtype": "bfloat16"}})


@pytest.mark.parametrize(
    ("flags", "environ", "level", "said"),
    [
        (serving(dtype="float16"), {}, GOOD, "no trap"),
        (serving(dtype="bfloat16"), {}, FAULT, "--dtype float16"),
        (serving(BF16, dtype="float16"), {}, GOOD, "no trap"),
        (serving(BF16, dtype="half"), {}, GOOD, "no trap"),
        (serving(BF16), {}, WARNING, "--dtype float16"),
        (serving(Model("/m", True, {"torch_dtype": "torch.bfloat16"}), dtype="auto"), {}, WARNING, "--dtype float16"),
        (quantised("awq"), {}, FAULT, "export VLLM_USE_TRITON_AWQ=1"),
        (quantised("awq"), {"VLLM_USE_TRITON_AWQ": "0"}, FAULT, "export VLLM_USE_TRITON_AWQ=1"),
        (quantised("awq"), {"VLLM_USE_TRITON_AWQ": "1"}, WARNING, "AWQ"),
        (serving(quantization="awq"), {}, FAULT, "VLLM_USE_TRITON_AWQ=1"),
        (
            quantised("compressed-tensors", **W4A16),
            {},
            FAULT,
            "compressed-tensors (W4A16) needs compute capability 7.5",
        ),
        (quantised("fp8"), {}, FAULT, "GPTQ"),
        (serving(quantization="awq_marlin"), {}, FAULT, "GPTQ"),
        (serving(quantization="fbgemm_fp8"), {}, FAULT, "compute capability 8.0"),
        # it goes by the model's method
        (dataclasses.replace(quantised("awq"), quantization="moe_wna16"), {}, FAULT, "AWQ"),
        (quantised("gptq_marlin"), {}, GOOD, "no trap"),
        (quantised("gptq"), {}, GOOD, "no trap"),
        (quantised("moe_wna16"), {}, GOOD, "no trap"),
        (quantised("a method of tomorrow"), {}, GOOD, "no trap"),
    ],
)
def test_traps_of_v100(flags: Serving, environ: dict[str, str], level: str, said: str) -> None:
    only(doctor_v100.traps([V100], flags, environ), level, said)


ORIGINAL = FlashAttention("26.06", "https://git.example.com/ai-bond/flash-attention-v100", extension=True)
PORT = FlashAttention("26.5.9", "git+https://git.example.com/zhinianqin/flash-attention-v100", extension=True)


def test_flash_attention_v100() -> None:
    only(doctor_v100.flash_attention(FlashAttention(), [V100]), GOOD, "not installed")
    found = only(
        doctor_v100.flash_attention(ORIGINAL, [V100]), WARNING, "26.06, ai-bond", "VLLM_NDT_NAN_GUARD", "docs/nan.md"
    )
    assert "no multiple of 16" in found.reason
    found = only(doctor_v100.flash_attention(PORT, [V100]), WARNING, "zhinianqin", "TRITON_ATTN")
    assert "vllm_flash_attn" in found.reason
    only(doctor_v100.flash_attention(ORIGINAL, [H200]), WARNING, "pip uninstall flash-attention-v100")
    only(
        doctor_v100.flash_attention(dataclasses.replace(ORIGINAL, extension=False), [V100]),
        FAULT,
        "flash_attn_v100_cuda",
    )
    only(
        doctor_v100.flash_attention(FlashAttention(fake=True), [H200]),
        WARNING,
        "stand-in",
        "remove the folder flash_attn",
    )
    assert levels(doctor_v100.flash_attention(dataclasses.replace(ORIGINAL, fake=True), [V100])) == [WARNING, WARNING]


def test_flash_attention_v100_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_v100.read_flash_attention() == FlashAttention()
    info = tmp_path / "flash_attention_v100-26.6.dist-info"
    for folder in (info, tmp_path / "flash_attn", tmp_path / "flash_attn_v100"):
        folder.mkdir()
    home = "Project-URL: Source, https://git.example.com/ai-bond/flash-attention-v100\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attention_v100\nVersion: 26.6\n{home}")
    (info / "RECORD").write_text("flash_attn/__init__.py,,\nflash_attn_v100/__init__.py,,\n")
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.8.3'\n")
    (tmp_path / "flash_attn_v100" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor_v100.read_flash_attention()
    assert (found.version, found.provider, found.extension, found.fake) == ("26.6", "ai-bond", False, True)
    # its folder alone, put there by hand
    (info / "METADATA").unlink()
    info.rename(tmp_path / "other")
    (tmp_path / "flash_attn" / "__init__.py").write_text("from flash_attn_v100 import flash_attn_func\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor_v100.read_flash_attention()
    assert (found.version, found.provider, found.fake) == ("of unknown version", "", True)


# ---- the machine ----


@pytest.mark.parametrize(
    ("facts", "spy", "permission"),
    [
        (Tracing(0, False, "/usr/bin/py-spy"), "/usr/bin/py-spy", "same user"),
        (Tracing(None, False, "/usr/bin/py-spy"), "/usr/bin/py-spy", "same user"),
        (Tracing(1, True, "/usr/bin/py-spy"), "/usr/bin/py-spy", "permitted (CAP_SYS_PTRACE)"),
        (Tracing(1, False, "/usr/bin/py-spy"), "/usr/bin/py-spy", "permitted for children"),
        (Tracing(2, False, "/usr/bin/py-spy"), "/usr/bin/py-spy", "is 2: not permitted without CAP_SYS_PTRACE"),
        (Tracing(3, True, "/usr/bin/py-spy"), "/usr/bin/py-spy", "is 3: not permitted until the next boot"),
        (Tracing(0, False, ""), "not found: processes print their own stacks", "same user"),
    ],
)
def test_tracing(facts: Tracing, spy: str, permission: str) -> None:
    """No warning either way: processes print their own stacks."""
    first, second = doctor_host.tracing(facts)
    assert (first.name, second.name) == ("py-spy", "ptrace")
    assert levels([first, second]) == [GOOD, GOOD]
    assert spy in first.found
    assert permission in second.found


@pytest.mark.parametrize(
    ("facts", "processes", "level", "said"),
    [
        (Memory(16 * GIB, 15 * GIB), 8, GOOD, "16384 MiB"),
        (Memory(64 * MIB, 64 * MIB), 1, WARNING, "--shm-size"),
        (Memory(64 * MIB, 64 * MIB), 2, FAULT, "2 GPUs work together"),
        (Memory(512 * MIB, 512 * MIB), 1, GOOD, "512 MiB"),
        (Memory(512 * MIB, 512 * MIB), 2, WARNING, "--shm-size"),
        (Memory(16 * GIB, 10 * MIB), 1, WARNING, "what lies in /dev/shm"),
        (Memory(why_not="No such file or directory"), 1, WARNING, "mount a tmpfs"),
    ],
)
def test_shared_memory(facts: Memory, processes: int, level: str, said: str) -> None:
    only(doctor_host.shared_memory(facts, processes), level, said)


def test_limits() -> None:
    good: dict[str, int | None] = {"nofile": 65536, "nproc": None, "memlock": None, "core": 0}
    assert levels(doctor_host.limits(good, 8)) == [GOOD] * 4
    for name, value, said in (
        ("nofile", 1024, "ulimit -n"),
        ("nproc", 512, "ulimit -u"),
        ("memlock", 65536, "ulimit -l"),
    ):
        bad = [one for one in doctor_host.limits(good | {name: value}, 8) if one.level != GOOD]
        only(bad, WARNING, f"({said})", f"{said} ", "docker run --ulimit")
    assert levels(doctor_host.limits(good | {"memlock": 65536}, 1)) == [GOOD] * 4
    assert "prompts" in doctor_host.limits({"core": None}, 1)[0].found
    only(doctor_host.limits({}, 1), UNCHECKED, "cannot be read")


# ---- the flags ----


def write(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)
    return folder


def test_flags(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "m", "config.json", '{"model_type": "qwen3", "dtype": "bfloat16"}'))
    found = doctor_flags.read(
        [folder, "--dtype", "half", "-tp", "2", "--pipeline_parallel_size=3", "-O3", "--x", "y"], {}
    )
    assert found is not None
    assert (found.model.name, found.model.local, found.model.kind, found.model.dtype) == (
        folder,
        True,
        "qwen3",
        "bfloat16",
    )
    assert (found.dtype, found.processes, found.quantization, found.any_media) == ("half", 6, "", True)
    found = doctor_flags.read(["--model", folder, "-q", "awq", "--allowed-media-domains", "a", "b"], {})
    assert found is not None
    assert (found.model.name, found.quantization, found.any_media, found.processes) == (folder, "awq", False, 1)
    assert doctor_flags.read([], {}) is None


def test_flags_of_a_file_and_a_model_of_the_hub(tmp_path: Path) -> None:
    hub = tmp_path / "home" / "hub" / "models--org--name"
    write(hub / "refs", "main", "abc\n")
    write(hub / "snapshots" / "abc", "config.json", '{"model_type": "gpt_oss"}')
    text = "model: org/name\ntensor-parallel-size: 4\ndtype: auto\nenforce-eager: true\nallowed-media-domains: [a]\n"
    write(tmp_path, "serve.yaml", text)
    found = doctor_flags.read(
        ["--config", str(tmp_path / "serve.yaml"), "--dtype", "float16"], {"HF_HOME": str(tmp_path / "home")}
    )
    assert found is not None
    assert (found.model.name, found.model.local, found.model.kind) == ("org/name", False, "gpt_oss")
    assert (found.dtype, found.processes, found.any_media) == ("float16", 4, False)


@pytest.mark.parametrize("content", ["no json", "[]", '{"quantization_config": 3, "text_config": 4}'])
def test_a_broken_config_is_an_empty_one(tmp_path: Path, content: str) -> None:
    found = doctor_flags.read([str(write(tmp_path, "config.json", content))], {})
    assert found is not None
    assert (found.model.kind, found.model.dtype, found.model.quantization) == ("", "", {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "float16"], "a model"),
        (["/m", "-tp", "two"], "invalid int value"),
        (["/m", "--dtype"], "expected one argument"),
        (["--config", "/nothing.yaml"], "--config /nothing.yaml"),
    ],
)
def test_flags_that_cannot_be_read(arguments: list[str], said: str) -> None:
    with pytest.raises(FlagError, match=r"^expected") as error:
        doctor_flags.read(arguments, {})
    assert said in str(error.value)


# ---- encoder cache and step ----

FITS = {"nothing_to_size": None, "demand": 4096, "cache": 8192, "fits": True, "set": {"number": 8192}}
FULL = {"nothing_to_size": None, "demand": 98304, "cache": 4096, "fits": False, "set": {"number": 98304}}
NUMBER = "VLLM_NDT_ENCODER_CACHE_TOKENS"


@pytest.mark.parametrize(
    ("report", "environ", "level", "said"),
    [
        ({"nothing_to_size": "the model takes no images or videos: nothing to size"}, {}, GOOD, "nothing to size"),
        (FITS, {}, GOOD, "4096 embeddings"),
        (FULL, {}, WARNING, f"export {NUMBER}=auto, or =98304"),
        (FULL, {NUMBER: "auto"}, GOOD, f"{NUMBER}=auto"),
        (FULL, {NUMBER: "98304"}, GOOD, f"{NUMBER}=98304"),
        (FULL, {NUMBER: "8192"}, WARNING, f"{NUMBER}=8192"),
        (FULL, {NUMBER: "many"}, WARNING, f"{NUMBER}=auto"),
    ],
)
def test_encoder_cache(report: dict[str, Any], environ: dict[str, str], level: str, said: str) -> None:
    cache, step = doctor_serving.budget(Budget(report), environ)
    only([cache], level, said)
    only([step], GOOD, "no recurrent states are cached")


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (Budget(FITS, "A prompt may have to wait for as long as others decode"), WARNING, "--max-num-batched-tokens"),
        (Budget(FITS, room=100), WARNING, "lower --max-num-seqs"),
        (Budget(FITS, room=1536), UNCHECKED, "A prompt may have to wait"),
        (Budget(FITS, room=7936), GOOD, "7936 tokens are left"),
    ],
)
def test_step_budget(facts: Budget, level: str, said: str) -> None:
    only(doctor_serving.budget(facts, {})[1:], level, said)


def test_no_configuration_is_one_finding() -> None:
    only(doctor_serving.budget(None, {}), UNCHECKED, "--model MODEL")
    only(doctor_serving.budget(Budget(problem="found: --jsno"), {}), WARNING, "correct the flags")
    only(doctor_serving.budget(Budget(problem="no device", no_device=True), {}), UNCHECKED, "where the engine will run")
    assert "no answer in 0.1 seconds" in doctor_serving.read_budget(["--model", "/nothing"], 0.1).problem


def test_budget_of_a_model(tmp_path: Path) -> None:
    from tiny_models import write_hybrid_vision_model

    flags = ["--max-num-batched-tokens", "2048", "--max-num-seqs", "512", "--enable-prefix-caching"]
    facts = doctor_serving.read_budget([str(write_hybrid_vision_model(tmp_path)), *flags], limit=600)
    assert (facts.problem, facts.room) == ("", 1536)
    assert (facts.report["cache"], facts.report["fits"], facts.report["slots"]) == (2048, False, 512)


# ---- the verdict and the command ----

BAD = Finding("kernel log", FAULT, "Xid 119", "the card is lost", "reboot")
MEDIUM = Finding("py-spy", WARNING, "not found", "nobody can look", "pip install py-spy")
FINE = Finding("own files", GOOD, "patched")
SKIPPED = Finding("expected build", UNCHECKED, "no digest given", remedy="vllm-ndt doctor --expect DIGEST")


@pytest.mark.parametrize(
    ("findings", "status", "summary"),
    [
        ((), 0, "0 faults, 0 warnings, 0 not checked, 0 good; exit status 0: all is well"),
        ((SKIPPED, FINE), 0, "0 faults, 0 warnings, 1 not checked, 1 good; exit status 0: all is well"),
        ((MEDIUM, FINE), 1, "0 faults, 1 warning, 0 not checked, 1 good; exit status 1: there are warnings"),
        ((BAD, MEDIUM), 2, "1 fault, 1 warning, 0 not checked, 0 good; exit status 2: there are faults"),
    ],
)
def test_verdict(findings: tuple[Finding, ...], status: int, summary: str) -> None:
    report = doctor.Report(findings, MANIFEST)
    assert (report.status, report.summary) == (status, summary)
    assert doctor_cli.lines(report, 80)[-1].endswith(summary[-20:])


@pytest.mark.parametrize("width", [1, 30, 50, 99, 100, 240])
def test_table_fits_the_terminal(width: int) -> None:
    report = doctor.Report(
        (BAD, MEDIUM, SKIPPED, dataclasses.replace(FINE, found="word " * 60 + "\x1b[31m\n")), MANIFEST
    )
    lines = doctor_cli.lines(report, width)
    longest = max(len(word) for word in f"{MANIFEST.digest}".split())
    assert all(len(line) <= max(width, 30, longest + 4) for line in lines)
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert re.search(r"why: +the card is lost", text)
    assert re.search(r"do: +reboot", text)
    order = [text.index(name) for name in ("kernel log", "py-spy", "expected build", "own files")]
    assert order == sorted(order)


def test_a_check_that_fails_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: doctor.Situation) -> list[Finding]:
        raise RuntimeError("of its own")

    monkeypatch.setattr(nvml, "read", lambda: Answer(nvml.ABSENT, "none"))
    monkeypatch.setattr(doctor, "CHECKS", {"good": lambda _: [FINE], "broken": fail, "bad": lambda _: [BAD]})
    report = doctor.run({})
    assert [finding.name for finding in report.findings] == ["kernel log", "broken", "own files"]
    only([report.findings[1]], UNCHECKED, "RuntimeError: of its own")


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor_cli.add_doctor(parser.add_subparsers(dest="command"))
    options, flags = parser.parse_known_args(["doctor", *arguments])
    return doctor_cli.run_doctor(options, flags)


def test_a_run_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = command("--json")
    report = json.loads(capsys.readouterr().out)
    assert status == report["status"]
    assert status in (0, 1, 2)
    assert set(report) == {"status", "error", "version", "manifest", "findings", "summary"}
    names = {finding["name"] for finding in report["findings"]}
    assert names >= {"own files", "usage statistics", "kernel log", "GPU code", "shared memory", "limits", "ptrace"}
    assert not [one for one in report["findings"] if one["reason"] == "this check failed itself"]


def test_a_run_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from vllm_ndt import doctor; doctor.run({}); print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    assert child.run([sys.executable, "-c", code], 300) == (0, "[]\n")


def test_a_table_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = command()
    out, err = capsys.readouterr()
    assert err == ""
    assert f"exit status {status}" in out.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--expect", "abc"], ["--expect", DIGEST, "--jsno"], ["/m", "--dtype"]])
def test_wrong_use_could_not_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: expected")
    assert command("--json", *arguments) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["findings"]) == (3, [])
    assert set(report) == {"status", "error", "version", "manifest", "findings", "summary"}


class Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [lambda: None, Broken, lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii")])
def test_output_that_nobody_reads_keeps_the_status(monkeypatch: pytest.MonkeyPatch, stream: Callable[[], Any]) -> None:
    monkeypatch.setattr(doctor, "run", lambda *_: doctor.Report((dataclasses.replace(BAD, found="Größe \udc80"),)))
    monkeypatch.setattr(sys, "stdout", stream())
    assert command() == 2
