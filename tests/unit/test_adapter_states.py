"""Several clients' adapters on one model: each is trained as if it were alone."""

import msgspec
import pytest
import torch

from r3async.learner import LearnerError
from r3async.learner import train_step as verbs
from tests.helpers import checkpoint as hc
from tests.helpers import lora as hl
from tests.helpers import models as hm

CLIENTS = {"a": (2, 5), "b": (hl.RANK, 6)}
"""Rank and seed of each client."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[1])


@pytest.fixture
def build(learners, model_path):
    return lambda config: learners(config, model_path)


def settings(backend, rank=hl.RANK):
    config = hl.alone(hl.with_lora(hl.settings(backend), "self_attn", "layers.1.mlp"))
    lora = msgspec.structs.replace(config.learner.lora, rank=rank)
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, lora=lora))


def accumulate(learner, name, number):
    learner.adapter_states.use(name)
    seeded = 100 * list(CLIENTS).index(name) + number
    (batch,) = hc.batches(1, first=seeded)
    verbs.forward_backward(learner, verbs.agree_on_counts(learner, batch))


def step(learner, name):
    learner.adapter_states.use(name)
    return verbs.optim_step(learner).grad_norm


def factors(learner, name):
    learner.adapter_states.use(name)
    return {key: tensor.clone() for key, tensor in learner.export_adapters().items()}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_clients_in_turns_are_trained_as_alone(build, backend):
    """Bit by bit, with the gradients of one waiting while the other is trained."""
    learner = build(settings(backend))
    for name, (rank, seed) in CLIENTS.items():
        learner.adapter_states.create(name, rank, seed)
    beside = {name: [] for name in CLIENTS}
    for number in range(3):
        for half in range(2):
            for name in CLIENTS:
                accumulate(learner, name, 2 * number + half)
        for name in CLIENTS:
            beside[name].append(step(learner, name))
    found = {name: factors(learner, name) for name in CLIENTS}
    for name, (rank, seed) in CLIENTS.items():
        learner.adapter_states.drop(name)
        learner.adapter_states.create(name, rank, seed)
        alone = []
        for number in range(3):
            accumulate(learner, name, 2 * number)
            accumulate(learner, name, 2 * number + 1)
            alone.append(step(learner, name))
        assert alone == beside[name]
        assert min(alone) > 0
        for key, tensor in factors(learner, name).items():
            assert torch.equal(tensor, found[name][key]), key


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_client_of_a_lower_rank_has_adapters_of_that_rank(build, backend):
    """They begin with the same values as those of a learner with that rank, and stay equal up to rounding."""
    rank, seed = 2, 0
    expected, learner = build(settings(backend, rank)), build(settings(backend))
    expected.adapter_states.create("a", rank, seed)
    learner.adapter_states.create("a", rank, seed)
    for number in range(3):
        for each in (expected, learner):
            accumulate(each, "a", number)
        assert step(learner, "a") == pytest.approx(step(expected, "a"), rel=1e-5)
    found = factors(learner, "a")
    for key, tensor in factors(expected, "a").items():
        side = "rows" if ".lora_A." in key else "columns"
        kept, rest = found[key].split([rank, hl.RANK - rank], 0 if side == "rows" else 1)
        assert torch.allclose(kept, tensor, rtol=0, atol=1e-5), key
        assert not rest.any(), key


def test_what_is_not_to_be_trained_stays_zero(build):
    learner = build(settings("torch"))
    learner.adapter_states.create("a", 2, 1, {"mlp"})
    accumulate(learner, "a", 0)
    assert step(learner, "a") > 0
    for key, tensor in factors(learner, "a").items():
        assert bool(tensor.any()) == (".mlp." not in key), key
    with pytest.raises(LearnerError, match="no adapter is left to train"):
        learner.adapter_states.create("b", 2, 1, {"mlp", "self_attn"})


def test_saved_state_is_that_of_the_client(build, tmp_path):
    learner = build(settings("torch"))
    for name, (rank, seed) in CLIENTS.items():
        learner.adapter_states.create(name, rank, seed)
    accumulate(learner, "a", 0)
    step(learner, "a")
    saved = factors(learner, "a")
    verbs.save_state(learner, tmp_path)
    others = factors(learner, "b")
    accumulate(learner, "a", 1)
    step(learner, "a")
    verbs.load_state(learner, tmp_path)
    for name, expected in (("a", saved), ("b", others)):
        for key, tensor in factors(learner, name).items():
            assert torch.equal(tensor, expected[key]), (name, key)
    with pytest.raises(KeyError):
        learner.adapter_states.use("c")
