"""Recorded gates, from an engine's answer to the learner's routers: alike on both backends, and in transformers."""

import msgspec
import numpy as np
import pytest
import torch

from r3async.config import ConfigError
from r3async.data.routes import RoutingError, RoutingTrace
from r3async.data.tokens import Sample, TokenTable, Trajectory
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import collate_samples, pack_samples
from r3async.learner.shared_prefixes import find_prefix_overlap
from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.samples import EpisodeSamples
from r3async.rollout.scripted import scripted_gates
from r3async.rollout.vllm.route_recording import split_gates
from r3async.schedule.groups import max_trajectory_bytes
from r3async.schedule.validation import InvalidTrajectory, validate_trajectories
from r3async.tools.plan import count_wire_bytes
from tests.helpers import learner as megatron
from tests.helpers import models
from tests.helpers import torch as plain
from tests.helpers.learner import fully_recorded, replace_columns
from tests.helpers.steps import train_minibatch
from tests.unit.test_rows import SHAPE, generation

WITH_GATES = msgspec.structs.replace(SHAPE, has_gates=True)


def gated(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """With gates that no router would compute."""
    rng = np.random.default_rng(seed)
    shapes = [s.table["routed_experts"].shape for s in samples]
    gates = [rng.uniform(0.1, 0.9, shape).astype(np.float32) for shape in shapes]
    return [replace_columns(s, routed_weights=g) for s, g in zip(samples, gates, strict=True)]


def reference_logits(path, sample: Sample) -> torch.Tensor:
    """Return what transformers computes with the experts and gates of a sample."""
    model = models.load_hf(path)
    table = sample.table
    for column, gate in enumerate(models.gates_of(model)):
        ids = torch.from_numpy(table["routed_experts"][:, column].astype(np.int64))
        weights = torch.from_numpy(table["routed_weights"][:, column].copy())
        gate.forward = lambda hidden, weights=weights, ids=ids: (hidden, weights, ids)
    with torch.no_grad():
        return model(torch.from_numpy(table["token_ids"].astype(np.int64))[None]).logits[0]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "olmoe"])
@torch.no_grad()
def test_outputs_are_those_of_the_recorded_gates_on_the_torch_backend(tmp_path, family):
    path = plain.make_model(tmp_path / "m", family)
    learner = TorchLearner.from_pretrained(plain.settings(), path)
    samples = gated(plain.recorded_samples(plain.moe_layers(family)))
    packed = collate_samples(samples)
    with learner.replay.bind_routes(packed):
        got = plain.logits(learner, packed)
    want = torch.cat([reference_logits(path, sample) for sample in samples])
    torch.testing.assert_close(got[: len(want)], want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_outputs_are_those_of_the_recorded_gates_on_megatron(tmp_path):
    path = models.make_hf_model(tmp_path / "m")
    learner = MegatronLearner.from_pretrained(megatron.settings(), path)
    samples = gated(fully_recorded(models.make_samples(3, [9, 17, 5])))
    packed = collate_samples(samples)
    with learner.replay.bind_routes(packed):
        got = megatron.logits(learner, packed)
    want = torch.cat([reference_logits(path, sample) for sample in samples])
    torch.testing.assert_close(got[: len(want)], want, rtol=1e-4, atol=1e-4)


def load(backend: str, path, **changes):
    if backend == "torch":
        return TorchLearner.from_pretrained(plain.settings(**changes), path)
    return MegatronLearner.from_pretrained(megatron.settings(**changes), path)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_the_order_of_a_record_and_gates_of_rows_without_one_change_no_bit(tmp_path, backend):
    path = models.make_hf_model(tmp_path / "m")
    samples = gated(models.make_samples(3, [9, 17, 5]))  # their last rows have no record
    backwards = [
        replace_columns(
            s,
            routed_experts=s.table["routed_experts"][..., ::-1].copy(),
            routed_weights=s.table["routed_weights"][..., ::-1].copy(),
        )
        for s in samples
    ]
    spoiled = [
        replace_columns(
            s, routed_weights=np.where(s.table["routing_recorded"][:, None, None], s.table["routed_weights"], np.nan)
        )
        for s in samples
    ]
    made = []
    for variant in (samples, backwards, spoiled):
        learner = load(backend, path)
        train_minibatch(learner, pack_samples(variant, 48))
        made.append(learner.export_weights())
    for other in made[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in made[0].items())


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_the_loss_trains_no_router_and_its_balance_does(tmp_path, backend, recompute):
    path = models.make_hf_model(tmp_path / "m")
    samples = gated(fully_recorded(models.make_samples(3, [9, 17, 5])))

    def moved(**changes) -> set[str]:
        learner = load(backend, path, learner__recompute=recompute, learner__weight_decay=0.0, **changes)
        before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
        train_minibatch(learner, pack_samples(samples, 48))
        return {n for n, t in learner.export_weights().items() if not torch.equal(t, before[n])}

    names = set(models.load_weights(path))
    routers = {name for name in names if name.endswith("mlp.gate.weight")}
    assert routers
    assert names - moved() == routers
    assert routers <= moved(algorithm__router_aux={"coef": 0.1})


def answer(*args, **changes):
    made = generation(*args, **changes)
    return msgspec.structs.replace(made, routed_weights=scripted_gates(made.routed_experts))


def played() -> Trajectory:
    """Return an episode of three turns, the last of which branches from the first."""
    rows = EpisodeSamples(WITH_GATES)
    rows.finish_call(rows.start_call([1, 2]), answer(2, [3, 4], 0, seed=0))
    rows.finish_call(rows.start_call([1, 2, 3, 4, 5]), answer(5, [6], 3, seed=1))
    rows.finish_call(rows.start_call([1, 2, 3, 9]), answer(4, [7], 0, seed=2))
    samples, turns = rows.build_samples("g", 1.0)
    return Trajectory("g", 0, 0, 1, "g0", "eos", turns, samples)


def test_gates_are_recorded_with_their_routes_across_turns_and_branches():
    trajectory = played()
    assert len(trajectory.samples) == 2
    for sample in trajectory.samples:
        table = sample.table
        recorded = table["routing_recorded"]
        assert recorded.sum() == len(table) - 1
        assert np.array_equal(table["routed_weights"][recorded], scripted_gates(table["routed_experts"])[recorded])
        assert not table["routed_weights"][~recorded].any()
    for form in ("plain", "bits"):
        received = decode_trajectory([bytes(f) for f in encode_trajectory(trajectory, routes=form)])
        for one, other in zip(received.samples, trajectory.samples, strict=True):
            assert np.array_equal(one.table["routed_weights"], other.table["routed_weights"])


@pytest.mark.parametrize("spoil", [lambda g: None, lambda g: g[:, :1], lambda g: g * np.inf, lambda g: g.astype(float)])
def test_answers_without_their_gates_are_refused(spoil):
    trace = RoutingTrace(layers=2, top_k=2, num_experts=4, has_gates=True)
    routes = np.tile(np.arange(2, dtype=np.uint8), (3, 2, 1))
    with pytest.raises(RoutingError, match="gate"):
        trace.record_rows(0, routes, 3, spoil(scripted_gates(routes)))
    assert trace.positions_fed == 0


def test_trajectories_whose_gates_are_not_those_of_their_engine_are_refused():
    def check(spoil, *, has_gates: bool) -> None:
        trajectory = played()
        samples = [Sample(s.sample_id, spoil(s.table), s.temperature) for s in trajectory.samples]
        validate_trajectories(
            [msgspec.structs.replace(trajectory, samples=samples)],
            vocab_size=100,
            learner_version=9,
            max_tokens=64,
            routing=WITH_GATES if has_gates else SHAPE,
        )

    def without(table: TokenTable) -> TokenTable:
        return table.without_columns("routed_weights")

    def infinite(table: TokenTable) -> TokenTable:
        return table.with_columns(routed_weights=table["routed_weights"] * np.float32(np.inf))

    check(lambda table: table, has_gates=True)
    check(without, has_gates=False)
    with pytest.raises(InvalidTrajectory, match="has no gates, which its engine records"):
        check(without, has_gates=True)
    with pytest.raises(InvalidTrajectory, match="has gates, which its engine does not record"):
        check(lambda table: table, has_gates=False)
    with pytest.raises(InvalidTrajectory, match="not finite"):
        check(infinite, has_gates=True)


def test_only_rows_with_equal_gates_are_shared():
    (sample,) = gated(fully_recorded(models.make_samples(1, [12])))
    other = sample.table["routed_weights"].copy()
    other[7, 1, 0] += 1e-6
    mask = np.arange(12) >= 10  # rows before the first trained one can be shared
    twins = [
        Sample(n, sample.table.with_columns(loss_mask=mask, routed_weights=g))
        for n, g in (("a", sample.table["routed_weights"]), ("b", other))
    ]
    assert find_prefix_overlap(twins).shared_rows.max() == 7


def test_ids_and_gates_of_an_engine_are_taken_apart():
    gates = np.random.default_rng(0).random((5, 3, 2), np.float32)
    ids = np.arange(30, dtype=np.int32).reshape(5, 3, 2)
    got_ids, got_gates = split_gates(np.concatenate([ids, gates.view(np.int32)], axis=2), np.dtype(np.uint8))
    assert got_ids.dtype == np.uint8
    assert np.array_equal(got_ids, ids)
    assert np.array_equal(got_gates, gates)


@pytest.mark.parametrize("replay", ["off", "learner"])
def test_gates_of_experts_that_are_not_replayed_are_refused(replay):
    with pytest.raises(ConfigError, match="`gates` = "):
        plain.settings(routing__gates="rollout", routing__replay=replay)


@pytest.mark.parametrize("has_gates", [False, True])
def test_gates_count_in_a_plan_only_where_they_are_recorded(has_gates):
    routing = msgspec.structs.replace(SHAPE, has_gates=has_gates)
    more = 4 * SHAPE.layers * SHAPE.top_k * has_gates
    assert count_wire_bytes(routing) == count_wire_bytes(SHAPE) + more
    config = plain.settings()
    tokens = config.episode.max_turns * config.episode.max_total_tokens
    limit = max_trajectory_bytes(config, routing)
    assert limit == max_trajectory_bytes(config, SHAPE) + more * tokens
