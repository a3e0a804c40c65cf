"""A learner that was stopped and continued is, bit by bit, the one that was never stopped."""

import pytest
import torch

from r3async.checkpoint import CheckpointError
from r3async.checkpoint.rank_files import LearnerStateReader, write_rank_file
from r3async.learner import build_learner
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.helpers.checkpoint import fresh, in_two_parts, paths, settings

MODEL = {"num_hidden_layers": 4, "mlp_only_layers": [1], "vocab_size": 97}
"""The vocabulary does not divide by 2, and one layer is dense."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), **MODEL)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("megatron", "float32"), ("megatron", "bfloat16"), ("torch", "float32")]
)
@pytest.mark.long
def test_ten_steps_equal_five_and_five_after_a_restart(model_path, tmp_path, backend, dtype):
    """In bfloat16 it continues from the float32 weights."""
    in_two_parts(None, model_path, tmp_path, settings(backend, dtype=dtype))


def test_a_state_does_not_change_with_later_steps(model_path, tmp_path):
    config = settings()
    learner = build_learner(config, model_path)
    hc.train(learner, config, hc.batches(1))
    state = learner.capture_state()
    now, later = fresh(tmp_path / "now"), fresh(tmp_path / "later")
    record = write_rank_file(now, state)
    hc.train(learner, config, hc.batches(2))
    assert write_rank_file(later, state) == record


def test_the_reference_model_is_the_start_path_s_after_a_resume(model_path, tmp_path):
    config, batch = settings(), hc.batches(1)[0]
    first = build_learner(config, model_path)
    expected = first.logprobs(batch)
    hc.train(first, config, hc.batches(2))
    write_rank_file(tmp_path, first.capture_state())
    config.algorithm.reference_kl.coef = 0.1
    second = build_learner(config, model_path)
    second.restore_state(LearnerStateReader(paths(tmp_path)))
    assert all((a == b).all() for a, b in zip(second.logprobs(batch, use_reference=True), expected, strict=True))
    assert any((a != b).any() for a, b in zip(second.logprobs(batch), expected, strict=True))


def test_random_numbers_go_on_where_they_were(model_path, tmp_path):
    learner = build_learner(settings(), model_path)
    torch.manual_seed(5)
    write_rank_file(tmp_path, learner.capture_state())
    expected = torch.rand(4)
    learner.restore_state(LearnerStateReader(paths(tmp_path)))
    assert torch.equal(torch.rand(4), expected)
    state = learner.capture_state()
    for piece in state.slices:
        if piece.tensor_slice.name == "rng/cpu/0":
            piece.values.fill_(255)
    write_rank_file(fresh(tmp_path), state)
    with pytest.raises(CheckpointError, match="rng/cpu/0: "):
        learner.restore_state(LearnerStateReader(paths(tmp_path)))


def test_another_backend_or_model_is_refused(model_path, tmp_path):
    write_rank_file(tmp_path, build_learner(settings(), model_path).capture_state())
    parts = LearnerStateReader(paths(tmp_path))
    with pytest.raises(CheckpointError, match=r'learner\.backend = "megatron"'):
        build_learner(settings("torch"), model_path).restore_state(parts)
    other = hm.make_hf_model(tmp_path / "other", **(MODEL | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"it is of another model"):
        build_learner(settings(), other).restore_state(parts)
