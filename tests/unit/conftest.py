"""What several modules of this folder begin with."""

import contextlib
from typing import Any

import pytest

from r3async.data import control_messages
from tests.helpers.fleet import Generator, loaded, outside


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Make a directory with a tiny random model for learners, which no test changes."""
    from tests.helpers.models import make_hf_model

    return make_hf_model(tmp_path_factory.mktemp("learner_model"))


@pytest.fixture
def learners():
    """Build learners, and close them."""
    from r3async.learner import build_learner

    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(build_learner(*args, **options)))


@pytest.fixture
async def handles():
    return {"generator-0": Generator(), "generator-1": Generator()}


@pytest.fixture
def world():
    return outside()


@pytest.fixture
def clock(world):
    """The clock of the generators' world."""
    return world.clock.monotonic


@pytest.fixture
async def installer(handles, world):
    installer = await loaded(handles, world=world)
    await installer.install_first_version()
    return installer


@pytest.fixture
def fleet(installer):
    return installer.fleet


@pytest.fixture
def sent_together(monkeypatch) -> list[list[str]]:
    """Names in each message, as they are sent."""
    messages: list[list[str]] = []
    delivery = control_messages.encode_delivery

    def note(session: str, items: list[control_messages.DeliveryItem], frames: Any) -> Any:
        messages.append([item.trajectory_id for item in items])
        return delivery(session, items, frames)

    monkeypatch.setattr("r3async.transport.sender.encode_delivery", note)
    return messages
