"""What several modules of this folder begin with."""

from __future__ import annotations

import contextlib

import pytest

from tests.helpers.fleet import Generator, loaded


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
async def installer(handles):
    installer = await loaded(handles)
    await installer.install_first_version()
    return installer


@pytest.fixture
def fleet(installer):
    return installer.fleet
