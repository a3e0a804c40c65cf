"""Everything else that a learner on several ranks must do: train, export, score, record, refuse, and leave nothing behind."""

import gc
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from r3async.data.routes import RoutingError
from r3async.learner import LearnerError
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import collate_samples, pack_samples
from r3async.record.merged_traces import merge_traces
from tests.helpers import models as hm
from tests.helpers.learner import replace_columns
from tests.helpers.parity import LENGTHS, batch, config, of_rank
from tests.helpers.steps import train_minibatch

EVERYTHING = {"dp": 2, "tp": 2, "ep": 4}
STAGES = {"tp": 2, "pp": 2, "ep": 2}
CONTEXT = {"cp": 2, "tp": 2, "ep": 4}


@pytest.fixture(scope="module")
def alone(model_path):
    return MegatronLearner.from_pretrained(config(), model_path)


def in_learner(function, path: Path, settings, *args):
    learner = MegatronLearner.from_pretrained(settings, path)
    try:
        return function(learner, *args)
    finally:
        learner.close()


def trained(learner, micro_batches):
    before = learner.export_weights()
    mine = of_rank(micro_batches, learner.ranks.dp_rank, learner.config.learner.parallel.dp)
    results = [train_minibatch(learner, mine) for _ in range(3)]
    return before, learner.export_weights(), [r.metrics for r in results], results[-1].expert_load, learner.update_count


def without(names, metrics):
    return {name: value for name, value in metrics.items() if name not in names}


@pytest.mark.parametrize("layout", [EVERYTHING, STAGES, CONTEXT], ids=["dp2-tp2-ep4", "tp2-pp2-ep2", "cp2-tp2-ep4"])
def test_ranks_train_the_model_that_one_rank_trains(four_ranks, model_path, layout):
    learner = MegatronLearner.from_pretrained(config(), model_path)
    expected = [train_minibatch(learner, batch()).metrics for _ in range(3)]
    answers = four_ranks.call(in_learner, trained, model_path, config(**layout), batch())
    before, after, metrics, load, version = answers[0]
    source = load_file(model_path / "model.safetensors")
    assert set(before) == set(source)
    assert all(torch.equal(before[name], tensor) for name, tensor in source.items())
    assert version == 3
    for name, exact in learner.export_weights().items():
        moved = (exact - source[name]).norm()
        assert (after[name] - exact).norm() <= 1e-3 * moved, name
        assert moved > 0 or "experts" in name, name
    for ours, exact in zip(metrics, expected, strict=True):
        # A padding micro-batch is in none of them. What is squared is off by twice as much.
        squared = [name for name in exact if "/chi2_" in name]
        assert {n: ours[n] for n in squared} == pytest.approx({n: exact[n] for n in squared}, rel=2e-4)
        assert without(squared, ours) == pytest.approx(without(squared, exact), rel=1e-4, abs=1e-6)
    assert load.sum() == 3 * hm.TOP_K * sum(LENGTHS)
    assert answers[1][0] == answers[1][1] == {}
    assert answers[1][2] == metrics


def test_an_embedding_shared_by_two_stages_is_trained_once(two_ranks, tmp_path):
    path = hm.make_hf_model(tmp_path / "tied", num_hidden_layers=2, tie_word_embeddings=True)
    samples = hm.make_samples(3, LENGTHS, layers=2)
    learner = MegatronLearner.from_pretrained(config(), path)
    expected = [train_minibatch(learner, pack_samples(samples, 48)).metrics for _ in range(3)]
    answers = two_ranks.call(in_learner, trained, path, config(pp=2), pack_samples(samples, 48))
    _, after, metrics, _, _ = answers[0]
    assert [m["grad_norm"] for m in metrics] == pytest.approx([m["grad_norm"] for m in expected], rel=1e-5)
    source = load_file(path / "model.safetensors")
    name = "model.embed_tokens.weight"
    exact = learner.export_weights()[name]
    assert (after[name] - exact).norm() <= 1e-3 * (exact - source[name]).norm()


def looked_at(learner, micro_batches):
    given = learner.logprobs(micro_batches), learner.logprobs(micro_batches, replay=False)
    score = learner.score_sequence(micro_batches[0].table["token_ids"])
    recorded = learner.record_learner_routes(micro_batches)
    assert learner.replay.current_routes is None
    return *given, score, recorded


@pytest.mark.parametrize("layout", [EVERYTHING, STAGES, CONTEXT], ids=["dp2-tp2-ep4", "tp2-pp2-ep2", "cp2-tp2-ep4"])
def test_forward_only_passes_equal_those_of_one_rank_on_every_rank(four_ranks, model_path, alone, layout):
    exact = looked_at(alone, batch())
    for answer in four_ranks.call(in_learner, looked_at, model_path, config(**layout), batch()):
        for ours, expected in zip([*answer[0], *answer[1], answer[2]], [*exact[0], *exact[1], exact[2]], strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, expected, atol=2e-5)
        for ours, expected in zip(answer[3], exact[3], strict=True):
            assert ours.table["routed_experts"].dtype == np.uint8
            sets = (np.sort(m.table["routed_experts"], -1) for m in (ours, expected))
            assert (next(sets) == next(sets)).all(-1).mean() > 0.99  # scores that all but tie
            assert ours.table["routing_recorded"].all()


def traced(learner, micro_batches):
    return train_minibatch(learner, micro_batches, trace=True).traces


@pytest.mark.parametrize("layout", [STAGES, CONTEXT], ids=["tp2-pp2-ep2", "cp2-tp2-ep4"])
def test_the_traces_of_all_ranks_hold_the_learners_log_probs(four_ranks, model_path, alone, layout):
    answers = four_ranks.call(in_learner, traced, model_path, config(**layout), batch())
    merged = {t.sample_ids: t for t in merge_traces([t for rank in answers for t in rank], alone.replay.num_moe_layers)}
    assert len(merged) == len(batch())
    for m, expected in zip(batch(), alone.logprobs(batch()), strict=True):
        trained = m.table["loss_mask"][: m.num_real_tokens]
        logprobs = merged[tuple(m.sample_ids)].logprobs
        np.testing.assert_allclose(logprobs[trained], expected[: m.num_real_tokens][trained], atol=2e-5)
        assert np.isnan(logprobs[~trained]).all()


def fed_too_much(learner):
    """Only rank 0 feeds tokens forward: with any collective before the check it would wait for the other rank."""
    if learner.ranks.rank:
        return ""
    bound, fed = collate_samples(hm.make_samples(9, [20])), collate_samples(hm.make_samples(9, [30]))
    with pytest.raises(RoutingError) as error, learner.replay.bind_routes(bound):
        learner.forward(fed, np.zeros(0, np.int64), None)
    return str(error.value)


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"dp": 2, "ep": 2}, {"pp": 2}, {"cp": 2}], ids=["tp2", "ep2", "pp2", "cp2"]
)
def test_a_token_count_mismatch_raises_before_any_collective(two_ranks, model_path, layout):
    answers = two_ranks.call(in_learner, fed_too_much, model_path, config(**layout))
    assert answers == ["routes of 20 tokens are bound, but 30 tokens are fed forward", ""]


def failed_then_trained(learner, micro_batches):
    calls = iter([None, RuntimeError("broken expert")])
    experts = [layer.mlp.experts for layer in learner.model.decoder.layers if hasattr(layer.mlp, "experts")]

    def break_once(*args) -> None:
        if error := next(calls, None):
            raise error

    handle = experts[-1].register_forward_pre_hook(break_once)
    dp, dp_rank = learner.config.learner.parallel.dp, learner.ranks.dp_rank
    with pytest.raises(RuntimeError, match="broken expert"):
        train_minibatch(learner, of_rank(micro_batches, dp_rank, dp))
    handle.remove()
    assert learner.replay.current_routes is None
    with learner.replay.bind_pipelined():  # refused while anything is bound
        pass
    assert learner.replay.counts.expert_load.sum() == 0
    assert all(p.grad is None for p in learner.model.parameters())
    assert learner.update_count == 0
    dist.barrier()
    return train_minibatch(learner, of_rank(micro_batches, dp_rank, dp)).metrics


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "ep": 2}], ids=["tp2", "ep2"])
def test_nothing_is_left_behind_when_every_rank_fails(two_ranks, model_path, layout):
    expected = train_minibatch(MegatronLearner.from_pretrained(config(), model_path), batch()).metrics
    for metrics in two_ranks.call(in_learner, failed_then_trained, model_path, config(**layout), batch()):
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


def uneven(learner, micro_batches):
    with pytest.raises(LearnerError, match="between 1 and 2 micro-batches"):
        train_minibatch(learner, micro_batches[: 1 + learner.ranks.dp_rank])
    bare = [
        collate_samples([replace_columns(s, routing_recorded=np.zeros(20, bool)) for s in hm.make_samples(1, [20])])
    ]
    settings = learner.config.routing
    settings.min_recorded_fraction = 0.6
    mine = bare if learner.ranks.dp_rank else [collate_samples(hm.make_samples(1, [20]))]
    with pytest.raises(LearnerError, match=r"only 0\.500 of the trained tokens"):
        train_minibatch(learner, mine)
    return learner.update_count


def test_a_step_is_refused_on_every_rank_alike(two_ranks, model_path):
    samples = hm.make_samples(0, [9, 12])
    assert two_ranks.call(in_learner, uneven, model_path, config(dp=2), [collate_samples([s]) for s in samples]) == [
        0,
        0,
    ]


def threads_after(path: Path, settings) -> tuple[int, int]:
    counts = []
    for _ in range(3):
        MegatronLearner.from_pretrained(settings, path).close()
        # Each router holds the method that replaced its own, and a process group: a circle.
        gc.collect()
        counts.append(psutil.Process().num_threads())
    return counts[0], counts[-1]


def test_a_closed_learner_leaves_no_threads(two_ranks, model_path):
    """A process group of gloo that is forgotten without being destroyed keeps its threads."""
    for first, last in two_ranks.call(threads_after, model_path, config(dp=2, ep=2)):
        assert last <= first
