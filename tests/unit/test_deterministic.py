"""`learner.deterministic`: torch's kernels that give the same bits at every call, for as long as the process lives."""

import os

import pytest
import torch

from tests.helpers import models as hm
from tests.helpers.checkpoint import batches, settings
from tests.helpers.steps import train_minibatch


@pytest.fixture
def as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_step_needs_no_kernel_that_has_no_order(learners, tmp_path, as_before, backend):
    path, trained = hm.make_hf_model(tmp_path / "model"), []
    for deterministic in (False, True):
        config = settings(backend)
        config.learner.deterministic = deterministic
        learner = learners(config, path)
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        for step in batches(2):
            train_minibatch(learner, step)
        trained.append(learner.export_weights())
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
