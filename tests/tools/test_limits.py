"""Limits of docs/run-files.md at which a run ends: each names its setting. The actors are stand-ins."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from typing import ClassVar

import pytest
from rich.console import Console

from r3async.actors.conductor import Conductor
from r3async.actors.fleet import Fleet, LearnerAddress
from r3async.actors.process import ProcessLost, RunFailed
from r3async.actors.run_setup import RunSetup
from r3async.actors.version_delivery import VersionDelivery
from r3async.config import config_to_dict, load_config
from r3async.tools.training_session import train
from r3async.world.real import REAL_WORLD
from tests.helpers.fleet import Events, Generator, outside, published
from tests.helpers.world import StandIn


def run(untrained, root, pipeline, *overrides):
    """What `train` printed, and what it raised."""
    settings = ["generator.engine=scripted", "weights.probe=false", "name=run", f"model.path={untrained}", *overrides]
    screen = io.StringIO()
    with pytest.raises(RunFailed) as caught:
        train(load_config("quickstart", settings), "quickstart", Console(file=screen, width=160), root, pipeline)
    return screen.getvalue(), caught.value


class Stub:
    """A pipeline, and what it starts, without actors."""

    made: ClassVar[list[Stub]]

    def __init__(self, world, config, model_path, run_dir, resume):
        self.world, self.config, self.run_dir, self.ended = world, config, run_dir, False
        type(self).made.append(self)

    def start(self):
        return self

    async def poll_status(self, since, timeout=0.0):
        return None

    async def check_conductor(self, print_line):
        pass

    def restore_directory(self, identity, print_line):
        return False

    async def end_actors(self):
        self.ended = True


def test_a_run_restarts_as_often_as_it_may_and_then_fails(untrained, tmp_path):
    class Lost(Stub):
        made: ClassVar[list[Stub]] = []

        async def wait_finished(self, timeout):
            return True

        def get_result(self):
            raise ProcessLost("the learner's process was lost")

    said, error = run(untrained, tmp_path, Lost, "supervise.max_run_restarts=2")
    assert len(Lost.made) == 3
    assert all(pipeline.ended for pipeline in Lost.made)
    assert "(2 of 2, supervise.max_run_restarts)" in said
    assert isinstance(error, ProcessLost)


def test_a_stopped_run_whose_actors_do_not_end_is_ended_with_the_reason(untrained, tmp_path):
    class NeverEnds(Stub):
        made: ClassVar[list[Stub]] = []
        stopping = False

        async def wait_finished(self, timeout):
            os.kill(os.getpid(), signal.SIGTERM) if not self.stopping else None
            return False

        def request_stop(self):
            self.stopping = True

        def get_result(self):
            raise AssertionError("it has none")

    _, error = run(untrained, tmp_path, NeverEnds, "supervise.stop_grace_seconds=0.05")
    assert "4 x supervise.stop_grace_seconds" in str(error)
    assert not isinstance(error, ProcessLost)  # it was to stop: no restart
    assert [pipeline.ended for pipeline in NeverEnds.made] == [True]


class Silent(StandIn):
    """An actor that never answers `silent`."""

    def __init__(self, *silent):
        self.silent = silent

    async def answer(self, name, *args):
        if name in self.silent:
            await asyncio.Event().wait()


@pytest.mark.parametrize("slow", ["learner", "generator"])
async def test_a_process_that_does_not_start_in_time_ends_the_run_and_names_the_setting(tmp_path, monkeypatch, slow):
    monkeypatch.setattr("r3async.actors.conductor.prepare_process", lambda *args: None)
    config = load_config("quickstart", [f"supervise.patience={0.05 / 600}"])
    learner = Silent("start") if slow == "learner" else Silent()
    generator = Silent("start") if slow == "generator" else Generator()
    conductor = Conductor(
        REAL_WORLD, RunSetup("run", config_to_dict(config), str(tmp_path)), learner, {"generator-0": generator}
    )
    with pytest.raises(RunFailed, match=r"within 0\.05 s \(supervise\.patience\)"):
        await asyncio.wait_for(conductor.run(), 120)


async def test_weights_that_are_not_installed_in_time_lose_their_generator_and_name_the_setting(monkeypatch):
    monkeypatch.setattr("r3async.actors.version_delivery.RPC_SECONDS", 0.5)
    config = load_config("quickstart", [f"supervise.patience={0.05 / 120}"])
    silent = Generator()
    silent.may_install.clear()
    fleet = Fleet(config, Events(), {"generator-0": silent, "generator-1": Generator()})
    await fleet.load_engines()
    installer = VersionDelivery(fleet, StandIn(), LearnerAddress("", ""), None, published(0), outside())
    await asyncio.wait_for(installer.install_first_version(), 120)
    (lost,) = fleet.events.facts("generator_lost")
    assert re.match(r"generator-0: no answer to `install_version` within .* \(supervise\.patience\)", lost["error"])
