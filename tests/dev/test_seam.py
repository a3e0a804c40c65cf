"""The rule about the seam, which `make lint` checks, sees what passes it by."""

from pathlib import Path

import pytest

from dev.lint import seam as lint_seam
from dev.lint.seam import (
    DECODING_EXEMPT,
    EXEMPT_FILES,
    ROOT,
    RealDefaults,
    check_decoding,
    check_repository,
    check_source,
)


@pytest.fixture(scope="module")
def defaults() -> RealDefaults:
    return RealDefaults()


PLANTED = {
    "import time\ntime.time()": "time.time",
    "from time import sleep\nsleep(1)": "time.sleep",
    "import time\nclock = time.perf_counter": "time.perf_counter",
    "import time\ntime.strftime('%H')": "time.strftime of now",
    "import time\ntime.localtime()": "time.localtime of now",
    "import datetime\ndatetime.datetime.now()": "datetime.datetime.now",
    "from datetime import datetime\ndatetime.now()": "datetime.datetime.now",
    "import asyncio\nasync def f(): return asyncio.get_running_loop().time()": "loop.time()",
    "import threading": "threading",
    "def f():\n    from threading import Lock": "threading.Lock",
    "from concurrent.futures import ThreadPoolExecutor": "concurrent.futures.ThreadPoolExecutor",
    "import asyncio\nasync def f(): await asyncio.to_thread(print)": "asyncio.to_thread",
    "from asyncio import to_thread": "asyncio.to_thread",
    "async def f(loop): await loop.run_in_executor(None, print)": ".run_in_executor",
    "open('a')": "open",
    "def f(path): return path.open('rb')": ".open(mode)",
    "def f(path): return path.open()": ".open(mode)",
    "def f(path): path.write_bytes(b'')": ".write_bytes",
    "def f(path): path.unlink(missing_ok=True)": ".unlink",
    "def f(path): path.replace(path)": ".replace(path)",
    "def f(path): return path.stat().st_size": ".stat()",
    "def f(path): path.touch()": ".touch()",
    "def f(path): return sorted(path.glob('*'))": ".glob",
    "import os\nos.replace('a', 'b')": "os.replace",
    "import os\nos.path.exists('a')": "os.path.exists",
    "import os\nos.getpid()": "os.getpid",
    "from os import unlink": "os.unlink",
    "import shutil\nshutil.rmtree('a')": "shutil",
    "import ray": "ray",
    "def f():\n    import ray.util.state": "ray.util.state",
    "def f(actor): return actor.ping.remote()": ".remote",
    "import socket": "socket",
    "import zmq.asyncio": "zmq.asyncio",
    "import uuid\nuuid.uuid4()": "uuid",
    "import random\nrandom.random()": "random.random",
    "import numpy as np\nnp.random.rand(3)": "numpy.random.rand",
    "import subprocess": "subprocess",
    "from r3async.world.real import REAL_WORLD\nREAL_WORLD.files": "REAL_WORLD",
    "from r3async.world.disk import SYSTEM_FILES\nSYSTEM_FILES.stat(1)": "SYSTEM_FILES",
    "from r3async.record.events import open_event_log\nopen_event_log(1, 'learner')": "open_event_log(...) with the real world",
    "from r3async.transport.spool import Spool\nSpool(1, 2)": "Spool(...) with the real world",
    "from r3async.checkpoint import CheckpointDirectory\nCheckpointDirectory(1)": "CheckpointDirectory(...) with the real files",
    "from r3async.record.process_time import LagMeter\nLagMeter()": "LagMeter(...) with the real processes",
    "from r3async.world import files\nfiles.replace_file(1, b'')": "replace_file(...) with the real files",
}

FINE = """
import os
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import ray

from r3async.record.process_time import LagMeter
from r3async.record.events import open_event_log
from r3async.world import World
from r3async.world.real import REAL_WORLD

def opened(path, world: World = REAL_WORLD, **options):
    LagMeter(world.processes)
    return open_event_log(path, "learner", world=world)

async def f(world, path, text, outbox, files, **options):
    opened(path, world), opened(path, world=world), opened(path, **options)
    with files.open(path, create=True) as file:
        file.append([b""])
    world.files.rename(path, path.with_name("b"))
    world.files.stat(path)
    world.clock.time(), world.clock.monotonic()
    await outbox.open()
    text.replace("a", "b"), replace(text, x=1), outbox.touch([1], 2.0)
    random.Random(1).random(), np.random.default_rng(1).random()
    os.environ, os.path.join("a", "b"), time.strftime("%H", time.localtime(world.clock.time()))
"""


@pytest.mark.parametrize("source", PLANTED)
def test_what_passes_the_seam_by_is_seen(defaults, source) -> None:
    found = check_source("a.py", source, defaults)
    assert PLANTED[source] in [each.name for each in found]
    assert all(each.remedy and each.line <= len(source.splitlines()) for each in found)


def test_what_goes_through_the_seam_is_not(defaults) -> None:
    assert check_source("a.py", FINE, defaults) == []


DECODED = {
    "import json\njson.loads(x)": "json.loads",
    "import json as j\nf = j.load": "json.load",
    "from json import loads\nloads(x)": "json.loads",
    "def f():\n    from json import loads as read\n    return read(x)": "json.loads",
    "import msgspec\nmsgspec.json.decode(x)": "msgspec.json.decode",
    "from msgspec import msgpack\nmsgpack.decode(x, type=int)": "msgspec.msgpack.decode",
    "import msgspec.msgpack\nmsgspec.msgpack.Decoder(int)": "msgspec.msgpack.Decoder",
    "import tomllib\ntomllib.loads(x)": "tomllib.loads",
    "import ast\nast.literal_eval(x)": "ast.literal_eval",
    "def f(peer): return peer.decode()": ".decode()",
    "def f(frame): return frame.bytes.decode()": ".decode()",
}

ENCODED = """
import json
import msgspec
from r3async.untrusted import decode_json

def f(data, tokenizer, reader):
    json.dumps(data), msgspec.json.encode(data).decode(), data.decode(errors="replace"), decode_json(data)
    tokenizer.decode([1]), reader.decode(data, skip=True), msgspec.convert(data, int), "x".encode().decode()
"""


@pytest.mark.parametrize("source", DECODED)
def test_a_decoder_that_is_called_directly_is_seen(source) -> None:
    (found,) = [each for each in check_decoding("a.py", source) if each.name == DECODED[source]]
    assert found.line == len(source.splitlines())
    assert found.remedy.startswith("r3async.untrusted.decode_")


def test_what_encodes_or_is_told_what_to_do_with_bad_bytes_is_not() -> None:
    assert check_decoding("a.py", ENCODED) == []


def test_every_exemption_from_decoding_is_needed() -> None:
    for name in DECODING_EXEMPT:
        paths = [ROOT / name] if name.endswith(".py") else list((ROOT / name).rglob("*.py"))
        assert any(check_decoding(name, path.read_text()) for path in paths), f"{name} needs no exemption"


def test_every_exemption_is_needed(defaults) -> None:
    for name in EXEMPT_FILES:
        assert check_source(name, (ROOT / name).read_text(), defaults), f"{name} needs no exemption"


def test_a_planted_call_fails_the_command_and_is_named_with_its_line(tmp_path: Path, monkeypatch, capsys) -> None:
    for package in lint_seam.SIMULATED_PATTERNS:
        path = tmp_path / package.replace("*", "a")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    for name in EXEMPT_FILES:
        (tmp_path / name).write_text("import zmq\n")
    assert check_repository(tmp_path) == []
    (tmp_path / "actors/new.py").write_text("import time\n\nbegan = time.monotonic()\n")
    assert [str(each) for each in check_repository(tmp_path)] == [
        "actors/new.py:3: `time.monotonic` passes the seam by: use world.clock"
    ]
    (tmp_path / "actors/new.py").write_text("import json\n\nsaid = json.loads(text)\n")
    assert [str(each) for each in check_repository(tmp_path)] == [
        "actors/new.py:3: `json.loads` passes the seam by: use r3async.untrusted.decode_json"
    ]
    (tmp_path / "r3async/world/files.py").unlink()
    with pytest.raises(ValueError, match=r"no file is r3async/world/files\.py"):
        check_repository(tmp_path)


def test_the_command_is_part_of_lint() -> None:
    assert "-m dev.lint.seam" in (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
