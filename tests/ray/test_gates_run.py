"""A run that replays the engine's gates: what it trains, and what it leaves as it was."""

import contextlib

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from r3async.actors.process import NotTrained
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.training_session import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]


def test_a_run_with_the_engines_gates_trains_all_but_its_routers(warm_model, tmp_path):
    settings = {
        "steps": 3,
        "routing": {"gates": "rollout"},
        "schedule": {"prompts_per_step": 4, "group_size": 4, "max_staleness": 0},
        "generator": {"kv_cache_gib": 0.25},
        "learner": {"weight_decay": 0.0},
        "algorithm": {"router_aux": {"coef": 0.0}},
        "model": {"path": str(warm_model)},
        "name": "gates",
    }
    with contextlib.suppress(NotTrained):  # the episodes may all be worth the same
        train(load_config("quickstart", settings), "quickstart", Console(width=120), tmp_path)
    rows = read_json_objects(tmp_path / "gates" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["routing/recorded_fraction"] == 1
        print(row["rollout_kl/k3"], row["routing/agreement"])
        assert row["rollout_kl/k3"] < 1e-3
    before = load_file(warm_model / "model.safetensors")
    after = load_file(tmp_path / "gates" / "model" / "model.safetensors")
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name].to(tensor.dtype))}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert routers
    assert not routers & moved
    assert moved
