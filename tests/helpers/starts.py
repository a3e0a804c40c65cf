"""The start of any preset without a GPU and without the weights of its model.

Driver, conductor, placement, transport, weights and records are the run's own. Each rank is an actor that holds the place
which was reserved for it, and one scripted rank in the learner's process trains. Engines are scripted. The model has the
`config.json` that the plan is made from, and one tensor.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.driver import RunLauncher
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.config import Config, LearnerConfig
from r3async.rollout.scripted import build_scripted_engine
from r3async.tools.memory import INIT_VOCAB_SIZE, PUBLISHED_CONFIGS
from r3async.world import World

SHORT = [
    "steps=1",
    "schedule.prompts_per_step=2",
    "schedule.group_size=4",
    "episode.max_new_tokens=8",
    "cluster.wait_seconds=8",
    "observe.timeline=false",
]
"""Settings of a run that only has to start: what decides about places and addresses is not among them."""


def make_described_model(directory: Path, config: Config) -> Path:
    """Make the directory of a preset's model, as far as anybody reads it who does not load it."""
    import torch
    from safetensors.torch import save_file

    from r3async.tools.init_model import build_byte_tokenizer

    init, name = config.model.init, Path(config.model.path).name
    described = PUBLISHED_CONFIGS[name] if name else init.shape.build_model_config(INIT_VOCAB_SIZE, init.rope_theta)
    build_byte_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(described))
    save_file({"one": torch.zeros(1)}, directory / "model.safetensors")
    return directory


class PlacedRank:
    """A rank that only holds its place."""

    def __init__(self, world: World):
        self._host = world.processes.host

    def find_place(self) -> tuple[str, list[str]]:
        """Return the host, by its name in the layout, and the GPUs that this process sees."""
        return self._host, []


class PlacedRankOnRay(PlacedRank):
    def find_place(self) -> tuple[str, list[str]]:
        import ray

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return ray.get_runtime_context().get_node_id(), [gpu for gpu in gpus.split(",") if gpu]


def as_one_scripted_rank(config: Config) -> Config:
    """Return the configuration with the scripted learner in the place of the backend and its ranks."""
    own = config.learner
    learner = LearnerConfig(backend="scripted", max_tokens_per_micro_batch=own.max_tokens_per_micro_batch)
    return msgspec.structs.replace(config, learner=learner)


class PlacedLearner(LearnerActor):
    """The learner actor, with an event `ranks_placed` that says where its ranks are."""

    rank_class: type[PlacedRank] = PlacedRank

    async def start(self) -> dict[str, Any]:
        spawn = self.world.actors.spawn_actor
        self._ranks = [
            spawn(self.rank_class, name=f"learner-rank-{rank}", actor_options=place)
            for rank, place in enumerate(self._rank_placements)
        ]
        places = await asyncio.gather(*(rank.call("find_place") for rank in self._ranks))
        self.events.info("ranks_placed", hosts=[host for host, _ in places], gpus=[gpus for _, gpus in places])
        self.config = as_one_scripted_rank(self.config)
        return await super().start()


class PlacedLearnerOnRay(PlacedLearner):
    rank_class = PlacedRankOnRay


class ScriptedPlayer(GeneratorActor):
    """A generator with a scripted engine, whatever engine the preset names."""

    def make_engine(self, model_path: str, seed: int) -> Any:
        return build_scripted_engine(model_path, self.world)


class PlacedLauncher(RunLauncher):
    learner_class = PlacedLearner
    generator_class = ScriptedPlayer


class PlacedLauncherOnRay(PlacedLauncher):
    learner_class = PlacedLearnerOnRay
