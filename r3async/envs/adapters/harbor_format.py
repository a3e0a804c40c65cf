"""The format of Harbor's tasks, as its version 0.26 reads it: `task.toml`, an instruction, an
environment, tests and a solution."""

from __future__ import annotations

import base64
import gzip
import io
import re
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.envs import EnvironmentFailed
from r3async.untrusted import decode_json_object, decode_toml, to_finite_float

_VARIABLE_TEMPLATE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)


class EnvironmentTable(msgspec.Struct, frozen=True):
    docker_image: str | None = None
    workdir: str | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network_mode: str | None = None
    allow_internet: bool = True
    build_timeout_sec: float = 600.0
    env: dict[str, str] = {}
    os: str = "linux"
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    healthcheck: dict[str, Any] | None = None


class PhaseTable(msgspec.Struct, frozen=True):
    """`[agent]`, `[verifier]` or `[solution]`."""

    timeout_sec: float | None = None
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class HarborTask(msgspec.Struct, frozen=True):
    """A `task.toml`, and the folder that it is in."""

    environment: EnvironmentTable = EnvironmentTable()
    agent: PhaseTable = PhaseTable()
    verifier: PhaseTable = PhaseTable()
    solution: PhaseTable = PhaseTable()
    steps: list[Any] | None = None
    path: str = ""
    instruction: str = ""

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def has_dockerfile(self) -> bool:
        return (self.folder / "environment" / "Dockerfile").exists()

    @property
    def is_online(self) -> bool:
        mode = self.environment.network_mode
        return self.environment.allow_internet if mode is None else mode == "public"


def load_task(folder: Path, variables: Mapping[str, str]) -> HarborTask:
    """Return the task of a folder, with `variables` in place of `${NAME}` in its `env` tables.
    Raises `OSError`, or `ValueError` that names what is missing, wrong or not supported."""
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"it has no {name}")
    table = decode_toml((folder / "task.toml").read_bytes())
    for name in ("environment", "agent", "verifier", "solution"):
        if isinstance(table.get(name), dict):
            env = table[name].get("env")
            if isinstance(env, dict):
                table[name]["env"] = {
                    key: _resolve_variable(value, variables) for key, value in env.items()
                }
    instruction = (folder / "instruction.md").read_text().strip()
    task = msgspec.convert({**table, "path": str(folder), "instruction": instruction}, HarborTask)
    unsupported = ", ".join(_list_unsupported(task))
    if unsupported:
        raise ValueError(f"it asks for {unsupported}")
    return task


def _resolve_variable(value: Any, variables: Mapping[str, str]) -> Any:
    named = _VARIABLE_TEMPLATE.fullmatch(value) if isinstance(value, str) else None
    if named is None:
        return value
    found = variables.get(named[1], named[2])
    if found is None:
        raise ValueError(
            f"it wants the variable {named[1]}: set it, and name it in `env.variables`"
        )
    return found


def _list_unsupported(task: HarborTask) -> list[str]:
    environment = task.environment
    verifier = task.verifier
    asked = {
        "several steps": task.steps,
        "an environment of the verifier's own": verifier.environment
        or verifier.environment_mode == "separate",
        "collected artifacts": verifier.collect,
        "docker-compose.yaml": (task.folder / "environment" / "docker-compose.yaml").exists(),
        f"os {environment.os}": environment.os.lower() != "linux",
        "an accelerator": environment.gpus or environment.tpu,
        "MCP servers": environment.mcp_servers,
        "a health check": environment.healthcheck,
        "a network allowlist": environment.network_mode == "allowlist",
    }
    return [name for name, wanted in asked.items() if wanted]


def parse_rewards(text: str) -> dict[str, float]:
    """Return the rewards by name that tests wrote: a number, which is `reward`, or an object of
    numbers; none if it is anything else."""
    try:
        return {"reward": to_finite_float(float(text))}
    except ValueError:
        pass
    try:
        return {name: to_finite_float(value) for name, value in decode_json_object(text).items()}
    except (TypeError, ValueError):
        return {}


def format_exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())


def build_solution_command(task: HarborTask) -> str:
    """Return the commands of `solution/solve.sh`; if it has other files beside it, they are
    unpacked in `/solution`."""
    folder = task.folder / "solution"
    if not (folder / "solve.sh").is_file():
        raise EnvironmentFailed(f"{folder} has no solve.sh, which the oracle runs")
    if len(list(folder.iterdir())) == 1:
        return format_exports(task.solution.env) + (folder / "solve.sh").read_text()
    packed = base64.b64encode(gzip.compress(pack_folder(folder))).decode()
    unpack = f"mkdir -p /solution && echo {packed} | base64 -d | tar -xzC /solution"
    return f"{format_exports(task.solution.env)}{unpack} && bash /solution/solve.sh"


def pack_folder(folder: Path, leave_out: str = "") -> bytes:
    """Return the content of a folder as a tar archive, owned by root, in which scripts
    may be executed."""

    def set_owner_and_mode(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        executable = 0o111 if entry.name.endswith(".sh") else 0
        return entry.replace(uid=0, gid=0, uname="", gname="", mode=entry.mode | executable)

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            if path.name != leave_out:
                archive.add(path, path.name, filter=set_owner_and_mode)
    return packed.getvalue()
