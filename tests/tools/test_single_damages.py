"""Each single damage of a run's folder: what reads a run says what it leaves out, shows the rest, and never raises."""

import asyncio
import html
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest

from r3async.checkpoint import CheckpointDirectory
from r3async.data.wire import encode_trajectory
from r3async.record.routes import RouteFile
from r3async.tools.live import LivePageServer
from r3async.transport.spool import SPOOL_FORMAT
from tests.helpers.checkpoint import write_checkpoint
from tests.helpers.cli import typed
from tests.helpers.routes import episode
from tests.tools.test_damaged_runs import write_whole_run
from tests.tools.test_inspect_data import made

TOKEN = "token"
COMMANDS = (
    ("report", "demo"),
    ("report", "demo", "demo", "-o", "both.html"),
    ("tail", "demo", "--no-follow"),
    ("inspect", "demo"),
    ("inspect", "runs/demo/spool"),
    ("inspect", "runs/demo/checkpoints"),
    ("inspect", "runs/demo/checkpoints/step-00000008"),
    ("inspect", "trajectories", "demo"),
    ("inspect", "trajectories", "demo", "--tokens", "--limit", "0"),
    ("inspect", "trajectories", "demo", "--export", "all.jsonl"),
    ("inspect", "routes", "demo"),
    ("inspect", "verify", "demo"),
    ("inspect", "frames", "runs/demo/spool"),
)
"""Commands that read the folder of a run; the first three show a run whatever is damaged."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that a run may keep."""
    root = tmp_path_factory.mktemp("whole")
    run = write_whole_run(root)
    for step in (4, 8):
        write_checkpoint(CheckpointDirectory(run / "checkpoints"), step, model_path=str(run / "init"))
    for place, number in (("spool", 41), ("spool", 42), ("quarantine", 43)):
        (run / place).mkdir(exist_ok=True)
        frames = encode_trajectory(made(number))
        SPOOL_FORMAT.append_record(run / place / f"{number:09d}-0000.spool", frames, fsync=False)
    (run / "init" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (run.parent / "latest").symlink_to("demo")
    return root


# --- one damage each


def settings(text: str) -> Callable[[Path], object]:
    """Write these settings over the run's own, as a person or another release may have left them."""

    def damage(run: Path) -> None:
        own = (run / "config.toml").read_text()
        kept = own if not text.startswith("[") else cut_table(own, text.splitlines()[0])
        (run / "config.toml").write_text(f"{text}\n{kept}" if not text.startswith("[") else f"{kept}\n{text}\n")

    return damage


def cut_table(toml: str, head: str) -> str:
    """Leave out a table and those within it."""
    name, kept, within = head.strip("[]"), list[str](), False
    for line in toml.splitlines():
        if line.startswith("["):
            within = line.strip("[]") == name or line.strip("[]").startswith(f"{name}.")
        if not within:
            kept.append(line)
    return "\n".join(kept)


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(data)


def remove(name: str) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    return damage


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        remove(name)(run)
        make(run / name)

    return damage


def directory(name: str) -> Callable[[Path], object]:
    return replace(name, Path.mkdir)


def link_loop(name: str) -> Callable[[Path], object]:
    return replace(name, lambda path: path.symlink_to(path.name))


def pipe(name: str) -> Callable[[Path], object]:
    return replace(name, os.mkfifo)


def file(name: str) -> Callable[[Path], object]:
    return replace(name, lambda path: path.write_bytes(b"a file"))


def trained(**changes: object) -> Callable[[Path], object]:
    """Append a sample that the learner trained, with other columns or facts than this release writes."""

    def damage(run: Path) -> None:
        sample, calls = episode()
        name = "g00000049e0000"
        facts = {"step": 12, "trajectory_id": name, "sample_id": f"{name}s0", **changes}
        RouteFile(run / "routes", "learner").append(msgspec.structs.replace(sample, **facts))
        for call in calls:
            RouteFile(run / "routes", "engine-generator-0").append(
                msgspec.structs.replace(call, trajectory_id=facts["trajectory_id"])
            )

    return damage


def tokens(*ids: int, dtype: str = "i4") -> np.ndarray:
    length = len(episode()[0].token_ids)
    return np.resize(np.asarray(ids, dtype), length)


def line(name: str, **values: object) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        with (run / name).open("a") as records:
            records.write(json.dumps(values) + "\n")

    return damage


STEP = "checkpoints/step-00000008"
JSON_FILES = ("metrics.jsonl", "events.jsonl", "evaluation.jsonl", "episodes.jsonl", "timeline.jsonl", "routing.jsonl")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "no start model": remove("init"),
    "start model is a file": file("init"),
    "start model is a link loop": link_loop("init"),
    "no tokenizer": remove("init/tokenizer.json"),
    "tokenizer is garbage": write("init/tokenizer.json", b"\x00\xffgarbage"),
    "tokenizer is empty": write("init/tokenizer.json", b""),
    "tokenizer is another JSON": write("init/tokenizer.json", b'{"model": {"type": "Odd"}}'),
    "tokenizer is a directory": directory("init/tokenizer.json"),
    "tokenizer is a link loop": link_loop("init/tokenizer.json"),
    "tokenizer is a pipe": pipe("init/tokenizer.json"),
    "tokenizer's settings are garbage": write("init/tokenizer_config.json", b"\xff{"),
    "tokenizer's settings are a list": write("init/tokenizer_config.json", b"[1]"),
    "tokenizer's settings are a directory": directory("init/tokenizer_config.json"),
    "end token is a number": write("init/tokenizer_config.json", b'{"eos_token": 7}'),
    "end token is a list": write("init/tokenizer_config.json", b'{"eos_token": {"content": [1]}}'),
    "model.path is a number": settings("[model]\npath = 7"),
    "model.path is a list": settings("[model]\npath = [1]"),
    "model.path has a zero byte": settings('[model]\npath = "a\\u0000b"'),
    "model.path is too long": settings(f'[model]\npath = "{"x" * 5000}"'),
    "model is a text": settings('model = "x"'),
    "mix of numbers": settings('[env]\nname = "mix"\nargs = { a = 3 }'),
    "mix is a list": settings('[env]\nname = "mix"\nargs = [1, 2]'),
    "mix is a text": settings('[env]\nname = "mix"\nargs = "ab"'),
    "a weight is a text": settings('[env]\nname = "mix"\nargs = { a = { weight = "heavy" }, b = {} }'),
    "weights are zero": settings('[env]\nname = "mix"\nargs = { a = { weight = 0 }, b = { weight = 0 } }'),
    "a weight is negative": settings('[env]\nname = "mix"\nargs = { a = { weight = -1 }, b = {} }'),
    "a weight is no number": settings('[env]\nname = "mix"\nargs = { a = { weight = nan }, b = {} }'),
    "env.name is a list": settings("[env]\nname = [1]\nargs = 7"),
    "schedule of wrong types": settings("[schedule]\nprompts_per_step = true\nmax_staleness = [1]"),
    "schedule is huge": settings(f"[schedule]\nmax_staleness = {2**40}\nprompts_per_step = 1\nwindow = {2**62}"),
    "trust region is a number": settings("[algorithm]\nrollout_kl = 3"),
    "trust region's target is a text": settings('[algorithm.rollout_kl]\ntarget = "x"\nmax = [1]\nmeasure = 7'),
    "routing.replay is a list": settings("[routing]\nreplay = [1]\ntrace = 3"),
    "buffer.durability is a number": settings("[buffer]\ndurability = 3"),
    "generator.count is a text": settings('[generator]\ncount = "two"'),
    **{f"{name} is a directory": directory(name) for name in (*JSON_FILES, "quarantine.jsonl", "config.toml")},
    **{f"{name} is a link loop": link_loop(name) for name in (*JSON_FILES, "quarantine.jsonl", "config.toml")},
    "events.jsonl is a pipe": pipe("events.jsonl"),
    "config.toml is a pipe": pipe("config.toml"),
    **{f"no {name}": remove(name) for name in (*JSON_FILES, "config.toml")},
    "routes is a file": file("routes"),
    "routes is a link loop": link_loop("routes"),
    "a file of routes is a directory": directory("routes/learner.0.routes"),
    "a file of routes is a link loop": link_loop("routes/learner.0.routes"),
    "a file of routes is a pipe": pipe("routes/engine-generator-0.0.routes"),
    "token ids below zero": trained(token_ids=tokens(3, -5)),
    "token ids of eight bytes": trained(token_ids=tokens(2**40, dtype="i8")),
    "token ids are floats": trained(token_ids=tokens(3, dtype="f4")),
    "token ids beyond the vocabulary": trained(token_ids=tokens(2**31 - 1)),
    "columns of several lengths": trained(token_ids=tokens(3)[:4]),
    "versions of several lengths": trained(policy_version=np.zeros(2, np.int32)),
    "a mask of numbers": trained(loss_mask=tokens(3)),
    "routes of one dimension": trained(own=tokens(3), used=tokens(3)),
    "routes of other experts": trained(own=np.zeros((2, 1, 1), np.uint8)),
    "a step is a text": trained(step="three"),
    "a step is missing": trained(step=None),
    "an id is a number": trained(trajectory_id=7),
    "a sample's id is a list": trained(sample_id=[1]),
    "spool is a file": file("spool"),
    "spool is a link loop": link_loop("spool"),
    "a file of the spool is a directory": directory("spool/000000041-0000.spool"),
    "a file of the spool is a link loop": link_loop("spool/000000041-0000.spool"),
    "a file of the spool is garbage": write("spool/000000041-0000.spool", b"garbage"),
    "a file of the spool is a pipe": pipe("spool/000000041-0000.spool"),
    "quarantine is a file": file("quarantine"),
    "a file of the quarantine is a link loop": link_loop("quarantine/000000043-0000.spool"),
    "checkpoints is a file": file("checkpoints"),
    "checkpoints is a link loop": link_loop("checkpoints"),
    "a checkpoint is a file": file(STEP),
    "a checkpoint is a link loop": link_loop(STEP),
    "a checkpoint is empty": directory(STEP),
    "a manifest is a directory": directory(f"{STEP}/manifest.json"),
    "a manifest is a link loop": link_loop(f"{STEP}/manifest.json"),
    "a state is a directory": directory(f"{STEP}/run.json"),
    "a state is a link loop": link_loop(f"{STEP}/run.json"),
    "a learner's file is a directory": directory(f"{STEP}/learner-00000-of-00001.safetensors"),
    "a learner's file is a link loop": link_loop(f"{STEP}/learner-00000-of-00001.safetensors"),
    "a learner's file is a pipe": pipe(f"{STEP}/learner-00000-of-00001.safetensors"),
    "a stray link in a checkpoint": lambda run: (run / STEP / "stray").symlink_to("nowhere"),
    "a manifest without files": write(f"{STEP}/manifest.json", b"{}"),
    "the report is a directory": lambda run: (run / "report.html").mkdir(),
    "latest is a link loop": lambda run: replace("../latest", lambda path: path.symlink_to("latest"))(run),
    "rewards are texts": line("metrics.jsonl", step=13, **{"reward/mean": "x", "staleness/max": [1], "version": 13}),
    "an evaluation of texts": line(
        "evaluation.jsonl", step=9, **{"evaluation/reward_mean": "x", "evaluation/pass@x": {}}
    ),
    "turns of numbers": line("episodes.jsonl", step=[1], turns=[1]),
    "an episode of odd values": line("episodes.jsonl", step=3, reward="x", trajectory=[1], turns=[{"user": [1]}]),
    "an event of odd values": line(
        "events.jsonl", event="generator_lost", generator=[1], time=5, level="error", error=7
    ),
}


NOT_SHOWN = ("the report is a directory",)
"""Damages for which a command cannot do its work."""


async def look_at_pages(run: Path) -> None:
    """Open every page of `report --serve`; each must be answered."""
    pages = LivePageServer([run, run], TOKEN)
    runner = await pages.start(0)
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:

            async def get(path: str, **words: object) -> str:
                asked = {"token": TOKEN, **{name: str(word) for name, word in words.items()}}
                async with session.get(address + path, params=asked) as answer:
                    assert answer.status == 200, (path, words, answer.status)
                    return await answer.text()

            await get("/")
            await get("/page", run=0)
            listed = await get("/episodes", run=0)
            for key in re.findall(r"data-key='(.*?)'", listed):
                await get("/episode", run=0, key=html.unescape(key), group=1)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("name", [name for name in DAMAGES if "checkpoint" in name or "start model" in name])
def test_an_export_of_a_damaged_run_is_one_line(whole: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole, tmp_path / "root", symlinks=True)
    DAMAGES[name](tmp_path / "root" / "runs" / "demo")
    said = typed("export", "demo", "exported", "--model", "runs/demo/init", cwd=tmp_path / "root")
    assert (said.returncode, len(said.stderr.splitlines())) == (2, 1), said.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", DAMAGES)
def test_whoever_reads_a_damaged_run_shows_the_rest(whole: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole, root, symlinks=True)
    run = root / "runs" / "demo"
    DAMAGES[name](run)
    faults = []
    for words in COMMANDS:
        said = typed(*words, cwd=root)
        allowed = (0,) if words in COMMANDS[:3] and name not in NOT_SHOWN else (0, 1, 2)
        if "Traceback" in said.stderr or said.returncode not in allowed:
            faults.append(f"{' '.join(words)}: {said.stderr.strip().splitlines()[-1:]}")
    try:
        asyncio.run(look_at_pages(run))
    except Exception as error:
        faults.append(f"report --serve: {error!r}")
    assert not faults, "\n".join(faults)
