"""A run whose episodes are played by agents with the official clients of their protocols, with secrets wherever a run takes any:
real Ray, vLLM, ZeroMQ and Megatron."""

import io
import os
import secrets
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from rich.console import Console

from r3async.config import EnvConfig, InitConfig, InitShape, ServingConfig, config_from_dict, load_config
from r3async.envs.factory import build_environment_factory
from r3async.learner.micro_batches import pack_samples
from r3async.learner.supervised import run_supervised_step
from r3async.learner.torch.backend import TorchLearner
from r3async.record.reading import read_json_objects
from r3async.record.route_verification import verify_routes
from r3async.record.routes import RouteIndex
from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import OracleDemonstrations, build_byte_tokenizer, build_random_model
from r3async.tools.training_session import train
from r3async.views.report import write_report
from tests.helpers.agents import CLIENTS

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("local_ray")]

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, SAMPLES = 3, 2, 6
SETTINGS = [
    "name=agents",
    f"steps={STEPS}",
    f"schedule.prompts_per_step={GROUPS}",
    f"schedule.group_size={SAMPLES}",
    "generator.kv_cache_gib=0.25",
    "episode.max_turns=2",
    "episode.max_new_tokens=72",
    "episode.max_prompt_tokens=160",
    "episode.max_total_tokens=240",
    "episode.temperature=0.8",
    "routing.trace=all",
    "learner.lr=2e-5",
    "evaluation.every_steps=2",
    "evaluation.tasks=3",
    "checkpoint.every_steps=2",
]
PLANTED = f"planted{secrets.token_hex(8)}"
PROGRAM = f"""
import os, runpy
assert os.environ["API_KEY"].startswith("planted")
assert "R3_TEST_PLANTED" not in os.environ
runpy.run_path({str(ROOT / "examples" / "agent" / "chat_agent.py")!r}, run_name="__main__")
"""
"""The example as a person would start it, once it is known that it has its own secret and none of ours."""


class CommandLines(threading.Thread):
    """Looks at those of all processes until it is stopped. `found`: which had what it must not."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: list[list[str]] = []
        self.looked = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.5):
            for process in psutil.process_iter(["cmdline"]):
                words = process.info["cmdline"] or []
                self.found += [words] if any(PLANTED in word for word in words) else []
            self.looked += 1


def files_with(directory: Path, text: str) -> list[Path]:
    needle = text.encode()
    return [p for p in directory.rglob("*") if p.is_file() and not p.is_symlink() and needle in p.read_bytes()]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that mostly calls the tool: a short supervised warm-up, without the samples that `init_model` looks at."""
    # Heads of 32: vLLM has none of 16 on CPU.
    shape = InitShape(hidden_size=64, layers=2, heads=2, expert_hidden_size=32)
    tokenizer = build_byte_tokenizer()
    torch.manual_seed(0)
    model = build_random_model(InitConfig(rope_theta=5.0), tokenizer, shape)
    factory = build_environment_factory(EnvConfig(name="tests.helpers.agents:CalculatorFormat"))
    data = OracleDemonstrations(factory, ChatRenderer(tokenizer), 0)
    path = tmp_path_factory.mktemp("model") / "caller"
    model.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)
    settings = {"backend": "torch", "dtype": "float32", "lr": 4e-3, "weight_decay": 0.01, "betas": [0.9, 0.999]}
    learner = TorchLearner.from_pretrained(
        config_from_dict({"learner": {**settings, "max_grad_norm": 1e6}, "routing": {"replay": "off"}}), path
    )
    for _ in range(400):
        if run_supervised_step(learner, pack_samples(data.make_batch(12), 8192))["loss/answers"] < 0.015:
            break
    learner.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run_of_agents(local_ray, caller, tmp_path_factory):
    """The directory of the run, the file in which its clients wrote what they earned, and what was shown meanwhile.

    Training episodes are played by a function of this process's user, evaluations by a program.
    """
    path = tmp_path_factory.mktemp("agents")
    config = load_config("quickstart", [*SETTINGS, f"model.path={caller}"])
    program = {"command": [sys.executable, "-c", PROGRAM], "environment": {"API_KEY": PLANTED}}
    config = msgspec.structs.replace(
        config,
        env=EnvConfig(name="agent:tests.helpers.agents:each_client", args={"log": os.fspath(path / "played")}),
        evaluation=msgspec.structs.replace(config.evaluation, env=EnvConfig(name="agent-command", args=program)),
        serving=ServingConfig(enabled=True, token=PLANTED),
    )
    screen, looking = io.StringIO(), CommandLines()
    looking.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        patched.setenv("R3ASYNC_USER_PATH", os.fspath(ROOT))
        patched.setenv("R3_TEST_PLANTED", PLANTED)
        try:
            directory = train(config, "quickstart", Console(file=screen, width=120), path)
        finally:
            print(screen.getvalue())  # shown with a failure
            looking.stop.set()
            looking.join(120)
    return directory, path / "played", screen.getvalue(), looking


def test_each_official_client_unchanged_plays_training_episodes_with_a_tool(run_of_agents):
    """OpenAI's for chat and for responses, and Anthropic's, in turn."""
    directory, log, *_ = run_of_agents
    rows = read_json_objects(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["routing/recorded_fraction"] >= 0.95
        assert row["rollout_kl/k3"] < 0.01
        assert row["batch/trained_tokens"] > 0
        assert row["transport/rejected"] == 0
    # A tool was called and its result answered: in two turns, in one row of training.
    assert max(row["episode/turns_mean"] for row in rows) > 1
    assert max(row["reward/max"] for row in rows) > 0.25
    assert verify_routes(RouteIndex(directory)).is_verified
    played = [line.split() for line in log.read_text().splitlines()]
    for name in CLIENTS:
        rewards = [float(reward) for client, reward in played if client == name]
        assert len(rewards) >= GROUPS * STEPS
        assert max(rewards) >= 0.25, f"{name} called no tool: {rewards}"


def test_a_program_that_knows_only_an_address_and_a_key_plays_evaluations_with_a_tool(run_of_agents):
    directory, *_ = run_of_agents
    lines = read_json_objects(directory / "evaluation.jsonl")
    assert [line["step"] for line in lines] == [2, STEPS]
    assert lines[-1]["evaluation/version_max"] == STEPS
    assert all(line["evaluation/episodes"] == 3 and line["evaluation/reward_mean"] > 0 for line in lines)
    # They are played beside training, and none of their episodes has reached the learner.
    rows = read_json_objects(directory / "metrics.jsonl")
    assert rows[-1]["transport/received"] == STEPS * GROUPS * SAMPLES


def test_a_run_writes_none_of_its_secrets_anywhere(run_of_agents):
    """In no file that it leaves, no log of Ray's and no command line."""
    import ray

    directory, _, shown, looking = run_of_agents
    write_report(directory)
    assert looking.looked
    assert looking.found == []
    assert PLANTED not in shown
    assert (directory / "report.html").is_file()
    assert list(directory.glob("checkpoints/*/run.json"))
    assert list(directory.glob("serving-*.json"))
    assert '"***"' in (directory / "config.toml").read_text()
    assert files_with(directory, "agent-command")  # the search finds what is there
    assert files_with(directory, PLANTED) == []
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    assert list(logs.iterdir())
    assert files_with(logs, PLANTED) == []
