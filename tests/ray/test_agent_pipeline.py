"""A run whose episodes are played by a program with the `openai` package: real Ray, vLLM, ZeroMQ and Megatron."""

import io
import os
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from r3async.config import EnvConfig, InitConfig, config_from_dict, load_config
from r3async.envs.factory import build_environment_factory
from r3async.learner.batch import pack_samples
from r3async.learner.supervised import run_supervised_step
from r3async.learner.torch.backend import TorchLearner
from r3async.record.reading import read_json_objects
from r3async.record.routes import RouteIndex, verify_routes
from r3async.rollout.chat import ChatRenderer
from r3async.tools.init_model import OracleDemonstrations, build_byte_tokenizer, build_random_model
from r3async.tools.train import train
from tests.helpers.agents import CLIENTS

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("local_ray")]

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, SAMPLES = 3, 2, 2
SETTINGS = [
    f"steps={STEPS}",
    f"schedule.prompts_per_step={GROUPS}",
    f"schedule.group_size={SAMPLES}",
    "generator.kv_cache_gib=0.25",
    "episode.max_turns=2",
    "episode.max_new_tokens=72",
    "episode.max_prompt_tokens=160",
    "episode.max_total_tokens=240",
    "routing.trace=all",
    "learner.lr=2e-5",
]
EVALUATED = [
    "evaluation.every_steps=2",
    "evaluation.tasks=3",
    "evaluation.env.name=agent:docs.examples.calculator_agent:play",
]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that mostly calls the tool: a short supervised warm-up, without the samples that `init_model` looks at."""
    # Heads of 32: vLLM has none of 16 on CPU.
    init = InitConfig(hidden_size=64, layers=2, heads=2, kv_heads=2, expert_hidden_size=32, rope_theta=5.0)
    tokenizer = build_byte_tokenizer()
    torch.manual_seed(0)
    model = build_random_model(init, tokenizer)
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


@pytest.fixture
def trained(caller, tmp_path, monkeypatch):
    """`trained(env, *settings)`: the directory and the rows of a run with this environment, each row of which is sound."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("R3ASYNC_USER_PATH", os.fspath(ROOT))

    def run(env: EnvConfig, *settings: str):
        config = load_config("quickstart", [*SETTINGS, *settings, f"model.path={caller}"])
        screen = io.StringIO()
        try:
            directory = train(
                msgspec.structs.replace(config, env=env), "quickstart", Console(file=screen, width=120), tmp_path
            )
        finally:
            print(screen.getvalue())  # shown with a failure
        rows = read_json_objects(directory / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        for row in rows:
            assert row["routing/recorded_fraction"] >= 0.95
            assert row["rollout_kl/k3"] < 0.01
            assert row["batch/trained_tokens"] > 0
            assert row["transport/rejected"] == 0
        # A tool was called and its result answered: in two turns, in one row of training.
        assert max(row["episode/turns_mean"] for row in rows) > 1
        assert verify_routes(RouteIndex(directory)).is_verified
        return directory, rows

    return run


def test_a_program_that_knows_only_an_address_and_a_key_plays_with_a_tool_and_its_trajectories_train(trained):
    command = ["python", str(ROOT / "docs" / "examples" / "calculator_agent.py")]
    run_dir, rows = trained(EnvConfig(name="agent-command", args={"command": command}), "name=agent", *EVALUATED)
    assert max(r["reward/max"] for r in rows) > 0.25
    # Evaluations are played beside it, and none of their episodes has reached the learner.
    assert rows[-1]["transport/received"] == STEPS * GROUPS * SAMPLES
    lines = read_json_objects(run_dir / "evaluation.jsonl")
    assert [line["step"] for line in lines] == [2, STEPS]
    assert lines[-1]["evaluation/version_max"] == STEPS
    assert all(line["evaluation/episodes"] == 3 and line["evaluation/reward_mean"] > 0 for line in lines)
    print(rows[-1], lines)


def test_each_official_client_unchanged_plays_training_episodes_with_a_tool(trained, tmp_path):
    """OpenAI's for chat and for responses, and Anthropic's, in turn in one run."""
    log = tmp_path / "played"
    own = ["schedule.group_size=6", "episode.temperature=0.8", "name=clients"]
    _, rows = trained(EnvConfig(name="agent:tests.helpers.agents:each_client", args={"log": os.fspath(log)}), *own)
    played = [line.split() for line in log.read_text().splitlines()]
    for name in CLIENTS:
        rewards = [float(reward) for client, reward in played if client == name]
        assert len(rewards) >= GROUPS * STEPS
        assert max(rewards) >= 0.25, f"{name} called no tool: {rewards}"
    print(played, rows[-1]["routing/recorded_fraction"])
