"""Two lint rules about access to the outside world: `python -m dev.lint.seam`.

Packages that also run in a simulation may touch the outside only through their `World`. The linter
reports, with file and line, each direct use of the clock, threads, files, sockets, processes, Ray
and random number generators. It reads the source alone, so it judges calls by their form:
`x.open("rb")` is a method of a path, `files.open(path)` one of the world. A caller of something
that uses the real world by default must pass its own.

Code that users run must decode with `r3async/untrusted.py`: a decoder that is called directly may
raise any exception for untrusted input.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

SIMULATED_PATTERNS = (
    "actors/*.py",
    "r3async/data/consumed_groups.py",
    "r3async/data/versions.py",
    "r3async/world/appending.py",
    "r3async/world/disk_retries.py",
    "r3async/world/files.py",
    "r3async/checkpoint/*.py",
    "r3async/rollout/blocking_detector.py",
    "r3async/rollout/episode.py",
    "r3async/rollout/lease_player.py",
    "r3async/rollout/samples.py",
    "r3async/learner/scripted.py",
    "r3async/record/events.py",
    "r3async/record/reading.py",
    "r3async/record/merged_traces.py",
    "r3async/record/route_verification.py",
    "r3async/record/routes.py",
    "r3async/record/trained_trajectories.py",
    "r3async/record/step_writer.py",
    "r3async/record/engine_calls.py",
    "r3async/record/process_time.py",
    "r3async/record/timeline.py",
    "r3async/schedule/*.py",
    "r3async/transport/*.py",
)
"""Glob patterns of the files that the rule about the `World` applies to, new files included."""

EXEMPT_FILES = {"r3async/world/zmq_sockets.py": "makes and converts keys, as only libzmq can"}
"""Files of those packages that no simulation runs, each with the reason for its exemption."""

DECODING_PATTERNS = ("r3async/**/*.py", "actors/*.py", "tools/**/*.py")
"""Glob patterns of the files that must decode with `r3async/untrusted.py`."""

DECODING_EXEMPT = {
    "r3async/untrusted.py": "is the decoder",
    "r3async/rollout/vllm/messages.py": "reads the arrays of the engine's own process, by hooks",
    "r3async/envs/confine.py": "runs by itself, with the standard library alone",
    "r3async/world/keeper.py": "runs by itself, with the standard library alone",
    "tools/gpu_check/": "reads what it wrote itself",
}
"""Files and folders that are exempt from the rule about decoding, each with the reason."""

UNTRUSTED = "r3async.untrusted"
DECODERS = {
    "ast.literal_eval": "decode_json",
    "json.JSONDecoder": "decode_json",
    "json.load": "decode_json",
    "json.loads": "decode_json",
    "msgspec.json.Decoder": "decode_json",
    "msgspec.json.decode": "decode_json",
    "msgspec.msgpack.Decoder": "decode_msgpack",
    "msgspec.msgpack.decode": "decode_msgpack",
    "msgspec.toml.decode": "decode_toml",
    "msgspec.yaml.decode": "decode_json",
    "tomllib.load": "decode_toml",
    "tomllib.loads": "decode_toml",
}
"""Names that must not be used, each with the function of `r3async/untrusted.py` to call instead."""

CLOCK = "world.clock"
THREADS = "world.threads"
FILES = "world.files"
PROCESSES = "world.processes"

FORBIDDEN_MODULES = {
    "concurrent": THREADS,
    "fcntl": FILES,
    "glob": FILES,
    "mmap": FILES,
    "multiprocessing": "world.actors",
    "psutil": PROCESSES,
    "ray": "world.actors",
    "secrets": "world.unique",
    "shutil": FILES,
    "signal": PROCESSES,
    "socket": "world.sockets",
    "subprocess": PROCESSES,
    "tempfile": FILES,
    "threading": THREADS,
    "uuid": "world.unique",
    "zmq": "world.sockets",
}
"""Modules that must not be used, each with what to use instead."""

ALLOWED_NAMES = {
    "os": ({"PathLike", "environ", "fspath", "path", "sep", "strerror"}, f"{FILES} or {PROCESSES}"),
    "os.path": ({"basename", "dirname", "join", "normpath", "relpath", "split", "splitext"}, FILES),
    "random": ({"Random"}, "random.Random(seed)"),
    "numpy.random": (
        {"Generator", "Philox", "SeedSequence", "default_rng"},
        "numpy.random.default_rng(seed)",
    ),
    "time": ({"gmtime", "localtime", "strftime", "struct_time"}, CLOCK),
}
"""Modules of which only some names may be used: the allowed names, and what to use
instead of the others."""

FORBIDDEN_NAMES = {
    "asyncio.create_subprocess_exec": PROCESSES,
    "asyncio.create_subprocess_shell": PROCESSES,
    "asyncio.open_connection": "world.sockets",
    "asyncio.start_server": "world.sockets",
    "asyncio.to_thread": THREADS,
    "datetime.date.today": CLOCK,
    "datetime.datetime.now": CLOCK,
    "datetime.datetime.today": CLOCK,
    "datetime.datetime.utcnow": CLOCK,
    "io.open": FILES,
    "open": FILES,
    "pathlib.Path.cwd": PROCESSES,
    "pathlib.Path.home": PROCESSES,
}

FORBIDDEN_METHODS = {
    "add_signal_handler": PROCESSES,
    "chmod": FILES,
    "exists": FILES,
    "expanduser": FILES,
    "glob": FILES,
    "hardlink_to": FILES,
    "is_dir": FILES,
    "is_file": FILES,
    "iterdir": FILES,
    "mkdir": FILES,
    "read_bytes": FILES,
    "read_text": FILES,
    "remote": "ActorRef.call",
    "rglob": FILES,
    "rmdir": FILES,
    "run_in_executor": THREADS,
    "symlink_to": FILES,
    "unlink": FILES,
    "write_bytes": FILES,
    "write_text": FILES,
}
"""Methods that must not be used, on any object, each with what to use instead."""

DEFINITION_PATTERNS = ("r3async/**/*.py", "actors/*.py")
"""Glob patterns of the files that define callables which use a part of the real
world by default."""

REAL_NAMES = ("REAL_WORLD", "SYSTEM_FILES")
"""Names of the real world and of its files, which parameters have as their default."""

LOOP_GETTERS = ("asyncio.get_running_loop", "asyncio.get_event_loop")


class SeamFinding(NamedTuple):
    path: str
    line: int
    name: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: `{self.name}` passes the seam by: use {self.remedy}"


def _collect_imports(tree: ast.Module) -> dict[str, str]:
    """Return the full names of everything that a file imports, anywhere in it, by
    their local names."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


class RealDefault(NamedTuple):
    """A parameter that defaults to the real world, or a part of it. `position` is None for a
    keyword-only parameter."""

    parameter: str
    position: int | None


class RealDefaults:
    """An index of callables, by full name, with their `RealDefault` parameters."""

    def __init__(self, root: Path = ROOT):
        self._by_callable: dict[str, list[RealDefault]] = {}
        self._imports: dict[str, dict[str, str]] = {}
        for path in sorted(path for source in DEFINITION_PATTERNS for path in root.glob(source)):
            self._add_module(_module_name(str(path.relative_to(root))), ast.parse(path.read_text()))

    def find_defaults(self, name: str) -> list[RealDefault]:
        """Return the parameters of a callable that default to the real world. `name` may be
        that of a re-export."""
        seen = set[str]()
        while name and name not in seen and name not in self._by_callable:
            seen.add(name)
            module, _, last = name.rpartition(".")
            name = self._imports.get(module, {}).get(last, "")
        return self._by_callable.get(name, [])

    def _add_module(self, module: str, tree: ast.Module) -> None:
        self._imports[module] = _collect_imports(tree)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._by_callable[f"{module}.{node.name}"] = _find_real_parameters(node)
            elif isinstance(node, ast.ClassDef):
                constructors = [
                    f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"
                ]
                self._by_callable[f"{module}.{node.name}"] = [
                    d for f in constructors for d in _find_real_parameters(f, skipped=1)
                ] + _find_real_fields(node)


def _find_real_parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef, skipped: int = 0
) -> list[RealDefault]:
    positional = [*function.args.posonlyargs, *function.args.args][skipped:]
    with_defaults = zip(positional[::-1], function.args.defaults[::-1], strict=False)
    real_defaults = [
        RealDefault(each.arg, positional.index(each))
        for each, default in with_defaults
        if _is_real(default)
    ]
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return real_defaults + [
        RealDefault(each.arg, None) for each, default in keywords if default and _is_real(default)
    ]


def _find_real_fields(class_node: ast.ClassDef) -> list[RealDefault]:
    fields = [
        each
        for each in class_node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    return [
        RealDefault(ast.unparse(each.target), at)
        for at, each in enumerate(fields)
        if each.value and _is_real(each.value)
    ]


def _is_real(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in REAL_NAMES


def _module_name(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name.replace("actors.", "r3async.actors.", 1) if path.startswith("actors/") else name


class _SeamVisitor(ast.NodeVisitor):
    """A visitor that collects the findings of one file in `found`."""

    def __init__(self, path: str, tree: ast.Module, defaults: RealDefaults):
        self.path = path
        self.found = list[SeamFinding]()
        self._awaited: list[ast.expr] = []
        self._names = _collect_imports(tree)
        self._defaults = defaults
        own_names = {
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self._local_names = {name: f"{_module_name(path)}.{name}" for name in own_names}
        self.visit(tree)

    def visit_arguments(self, node: ast.arguments) -> None:
        """Visit the defaults of parameters, where alone the real world may be named."""
        for default in [*node.defaults, *filter(None, node.kw_defaults)]:
            if not _is_real(default):
                self.visit(default)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value and not _is_real(node.value):
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if self._resolve_name(node.test) == "typing.TYPE_CHECKING":  # for types, never run
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._check_name(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if not node.level:
                self._check_name(f"{node.module}.{alias.name}", node)

    def visit_Name(self, node: ast.Name) -> None:
        # Imported names are checked where they are imported.
        if isinstance(node.ctx, ast.Load) and node.id == "open" and node.id not in self._names:
            self._check_name("open", node)
        if isinstance(node.ctx, ast.Load) and node.id in REAL_NAMES:
            self._add_finding(node, node.id, "the world that is handed in")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._resolve_name(node)
        if not (name and self._check_name(name, node)):
            if node.attr in FORBIDDEN_METHODS:
                self._add_finding(node, f".{node.attr}", FORBIDDEN_METHODS[node.attr])
            self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        self._awaited.append(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # Path and loop methods: none awaited.
        if isinstance(node.func, ast.Attribute) and node not in self._awaited:
            self._check_call(node, node.func)
        called = self._resolve_name(node.func) or (
            self._local_names.get(node.func.id, "") if isinstance(node.func, ast.Name) else ""
        )
        spread = any(keyword.arg is None for keyword in node.keywords)
        for parameter, position in self._defaults.find_defaults(called):
            by_place = position is not None and len(node.args) > position
            if (
                not by_place
                and not spread
                and all(keyword.arg != parameter for keyword in node.keywords)
            ):
                self._add_finding(
                    node,
                    f"{called.rpartition('.')[2]}(...) with the real {parameter}",
                    f"{parameter}=",
                )
        self.generic_visit(node)

    def _check_call(self, node: ast.Call, function: ast.Attribute) -> None:
        """Check calls of methods of paths and loops whose names the `World` has too."""
        first = node.args[0] if node.args else None
        mode = first is None or (isinstance(first, ast.Constant) and isinstance(first.value, str))
        match function.attr:
            case "open" if mode:
                self._add_finding(node, ".open(mode)", FILES)
            case "stat" | "lstat" | "touch" if not node.args:
                self._add_finding(node, f".{function.attr}()", FILES)
            case "localtime" | "gmtime" | "strftime" if self._resolve_name(function).startswith(
                "time."
            ) and (len(node.args) == (function.attr == "strftime")):
                self._add_finding(node, f"time.{function.attr} of now", CLOCK)
            case "rename" | "replace" if (
                len(node.args) == 1 and not node.keywords and not self._resolve_name(function)
            ):
                self._add_finding(node, f".{function.attr}(path)", FILES)
            case "time" if (
                isinstance(function.value, ast.Call)
                and self._resolve_name(function.value.func) in LOOP_GETTERS
            ):
                self._add_finding(node, "loop.time()", CLOCK)

    def _check_name(self, name: str, node: ast.AST) -> bool:
        """Record a finding and return True if the name must not be used. A module itself is refused
        only if it is forbidden as a whole."""
        module, _, last = name.rpartition(".")
        instead = FORBIDDEN_MODULES.get(name.partition(".")[0]) or FORBIDDEN_NAMES.get(name)
        if instead:
            self._add_finding(node, name, instead)
            return True
        if module in ALLOWED_NAMES and last not in ALLOWED_NAMES[module][0]:
            self._add_finding(node, name, ALLOWED_NAMES[module][1])
            return True
        return False

    def _add_finding(self, node: ast.AST, name: str, remedy: str) -> None:
        finding = SeamFinding(self.path, node.lineno, name, remedy)  # type: ignore[attr-defined]
        if finding not in self.found:
            self.found.append(finding)

    def _resolve_name(self, node: ast.expr) -> str:
        return _resolve_full_name(node, self._names)


def _resolve_full_name(node: ast.AST, names: dict[str, str]) -> str:
    """Return the full name of an expression that is imported (`names`); "" for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _resolve_full_name(node.value, names)
        if base:
            return f"{base}.{node.attr}"
    return ""


def check_decoding(path: str, source: str) -> list[SeamFinding]:
    """Return the direct decoding in a file, in order of lines: uses of decoders, and
    `data.decode()` unless `data` is the result of a call."""
    tree = ast.parse(source)
    names = _collect_imports(tree)
    findings = list[SeamFinding]()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "decode"
        ):
            if not (node.args or node.keywords or isinstance(node.func.value, ast.Call)):
                findings.append(
                    SeamFinding(path, node.lineno, ".decode()", f"{UNTRUSTED}.decode_text")
                )
        elif isinstance(node, ast.Attribute | ast.Name):
            what = _resolve_full_name(node, names)
            if what in DECODERS:
                findings.append(
                    SeamFinding(path, node.lineno, what, f"{UNTRUSTED}.{DECODERS[what]}")
                )
    return sorted(findings, key=lambda each: each.line)


def check_source(path: str, source: str, defaults: RealDefaults) -> list[SeamFinding]:
    """Return the places in a file that bypass the `World`, in order of lines."""
    return sorted(
        _SeamVisitor(path, ast.parse(source), defaults).found, key=lambda found: found.line
    )


def list_simulated_files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files that the rule about the `World` applies to. Raises `ValueError` for a
    pattern, or an exemption, without a file."""
    for package in SIMULATED_PATTERNS:
        files = sorted(root.glob(package))
        if not files:
            raise ValueError(f"dev/lint/seam.py: no file is {package}")
        yield from (path for path in files if str(path.relative_to(root)) not in EXEMPT_FILES)
    for name in EXEMPT_FILES:
        if not (root / name).exists():
            raise ValueError(f"dev/lint/seam.py: {name} is exempt, and not there")


def list_decoding_files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files that must decode with `r3async/untrusted.py`."""
    for path in sorted({path for pattern in DECODING_PATTERNS for path in root.glob(pattern)}):
        if not str(path.relative_to(root)).startswith(tuple(DECODING_EXEMPT)):
            yield path


def check_repository(root: Path = ROOT) -> list[SeamFinding]:
    defaults = RealDefaults(root)
    findings = [
        each
        for path in list_simulated_files(root)
        for each in check_source(*_read_source(path, root), defaults)
    ]
    return findings + [
        each
        for path in list_decoding_files(root)
        for each in check_decoding(*_read_source(path, root))
    ]


def _read_source(path: Path, root: Path) -> tuple[str, str]:
    return str(path.relative_to(root)), path.read_text()


def main() -> int:
    findings = check_repository()
    for each in findings:
        print(each)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
