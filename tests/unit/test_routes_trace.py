"""Routes written down by engine and learner, and compared."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from r3async.config import Config, EpisodeConfig, config_from_dict
from r3async.data.tokens import Sample, TokenTable
from r3async.envs.builtin import ReverseText
from r3async.learner import MinibatchResult, RouteTrace
from r3async.learner.micro_batches import pack_samples, pad_to_multiple
from r3async.learner.replay import RoutingReplay
from r3async.record.reading import read_json_objects
from r3async.record.route_verification import verify_routes
from r3async.record.routes import (
    EXPERT_LOAD_EVERY,
    RouteFileTracer,
    RouteIndex,
    TraceFilter,
    TrainedRoutes,
    load_route_record,
    parse_episode_id,
    record_engine_routes,
    scan_route_file,
)
from r3async.rollout.engine import GenerationRequest
from r3async.rollout.lease_player import RetryingPlayer
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.scripted import SCRIPTED_ROUTING, ScriptedEngine
from r3async.tools.init_model import build_byte_tokenizer
from r3async.world.real import REAL_WORLD
from tests.helpers.playing import play_lease
from tests.helpers.routes import EXPERTS, ID, LAYERS, experts
from tests.helpers.world import Reports


def traced(mode: str = "all") -> Config:
    return config_from_dict({"routing": {"trace": mode}, "schedule": {"prompts_per_step": 4}})


def test_the_plan_is_a_question_of_the_id_alone() -> None:
    assert parse_episode_id("g00000012e0003s1") == ("g00000012e0003", 12, 3, 1)
    assert parse_episode_id("score#1") is None
    plan = TraceFilter(traced("sample"))
    wanted = [g for g in range(100) if plan.should_trace(f"g{g:08d}e0000t2")]
    assert wanted == [0, 40, 80], "prompts_per_step = 4, every tenth step"
    assert not plan.should_trace("g00000040e0001")
    assert not plan.should_trace("score#1")
    assert not TraceFilter(traced("off")).should_trace(ID)
    assert TraceFilter(traced("all")).should_trace("g00000007e0003s0")


def request(number: int, start: int, name: str = f"{ID}t") -> GenerationRequest:
    return GenerationRequest(f"{name}{number}", np.asarray([1, 2, 3], np.int32), 4, routes_from=start)


async def scripted(*args: object, **options: object) -> ScriptedEngine:
    engine = ScriptedEngine(*args, **options)
    engine.version = 0
    await engine.start()
    return engine


async def test_the_engine_is_recorded_before_its_caller_sees_the_answer(tmp_path: Path) -> None:
    engine = record_engine_routes(await scripted([[5, 6, 7, 8]]), tmp_path, "generator-0", traced())
    assert (engine.routing, engine.version, engine.collect_stats()["running"]) == (SCRIPTED_ROUTING, 0, 0)
    first = await engine.generate(request(0, 0))
    second = await engine.generate(request(1, 2))
    await engine.generate(request(0, 0, "other-"))
    rows = first.routed_experts.copy()
    first.routed_experts[:] = 0  # whatever becomes of it, the record is what came
    calls = RouteIndex(tmp_path).load_calls(ID)
    assert [(c.turn, c.routes_from) for c in calls] == [(0, 0), (1, 2)]
    np.testing.assert_array_equal(calls[0].rows, rows)
    np.testing.assert_array_equal(calls[1].rows, second.routed_experts)
    np.testing.assert_array_equal(calls[0].token_ids, [5, 6, 7, 8])
    np.testing.assert_array_equal(calls[0].logprobs, first.logprobs)


async def test_an_engine_is_left_alone_where_nothing_is_traced(tmp_path: Path) -> None:
    dense, moe = ScriptedEngine([[5]], routing=None), ScriptedEngine([[5]])
    assert record_engine_routes(dense, tmp_path, "g", traced()) is dense
    assert record_engine_routes(moe, tmp_path, "g", traced("off")) is moe
    await moe.start()
    await record_engine_routes(moe, tmp_path, "g", traced("sample")).generate(request(0, 0, "g00000001e0000t"))
    assert not (tmp_path / "routes").exists()


async def test_routes_that_the_disk_does_not_take_end_no_episode_and_are_written_later(tmp_path: Path) -> None:
    (tmp_path / "routes").write_text("a file where the directory should be")
    engine = record_engine_routes(await scripted([[5, 6]]), tmp_path, "generator-0", traced())
    for number in range(3):
        assert len((await engine.generate(request(number, 0))).token_ids) == 2
    (tmp_path / "routes").unlink()
    assert await REAL_WORLD.record_flusher.finish_writes(10.0) == 0
    (path,) = (tmp_path / "routes").iterdir()
    entries, problem = scan_route_file(path)
    assert (len(entries), problem) == (3, "")


def step_result(samples: list[Sample], *, whole: bool = True) -> MinibatchResult:
    traces = []
    for micro_batch in pack_samples(samples, 24):
        tokens = micro_batch.num_real_tokens
        own, used = (experts(seed, tokens).astype(np.uint16) for seed in (3, 4))
        columns = list(range(LAYERS if whole else LAYERS - 1))
        cu_seqlens = micro_batch.cu_seqlens
        traces.append(RouteTrace(micro_batch.sample_ids, cu_seqlens, 0, columns, own[:, columns], used[:, columns]))
    return MinibatchResult(
        {"routing/agreement": 0.6},
        np.asarray([0.5, 1.0, 1 / 3], np.float32),
        np.arange(24).reshape(LAYERS, EXPERTS),
        traces,
    )


def sample(number: int) -> Sample:
    return Sample(f"g{number:08d}e0000s0", TokenTable.from_tokens(np.arange(10) + 100 * number))


def load_trained(run: Path) -> list[TrainedRoutes]:
    return [load_route_record(entry, TrainedRoutes) for entry in RouteIndex(run).trained_entries]


def test_the_learner_writes_what_each_wanted_sample_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample(n) for n in range(5)]
    reports = Reports()
    monkeypatch.setattr("r3async.record.routes.TRACE_EVERY_STEPS", 1)
    tracer = RouteFileTracer(tmp_path, traced("sample"), reports)  # groups 0 and 4
    assert tracer.should_trace(samples)
    assert not tracer.should_trace(samples[1:4])
    result = step_result(samples)
    tracer.write_trace(1, samples, result)
    written = load_trained(tmp_path)
    assert [(t.step, t.sample_id) for t in written] == [(1, samples[0].sample_id), (1, samples[4].sample_id)]
    for trained in written:
        trace = next(t for t in result.traces if trained.sample_id in t.sample_ids)
        start = int(trace.cu_seqlens[trace.sample_ids.index(trained.sample_id)])
        np.testing.assert_array_equal(trained.used, trace.used[start : start + 10])
        np.testing.assert_array_equal(trained.own, trace.own[start : start + 10])
        assert trained.used.dtype == np.uint8
        number = int(trained.sample_id[1:9])
        np.testing.assert_array_equal(trained.token_ids, np.arange(10) + 100 * number)
        assert trained.learner_logprobs is None
        np.testing.assert_array_equal(trained.turn, np.full(10, -1))
        np.testing.assert_array_equal(trained.rewards, np.zeros(10))
    assert reports == []


def test_each_sample_gets_its_own_part_of_log_probs_and_advantages(tmp_path: Path) -> None:
    samples = [sample(n) for n in range(5)]
    scores = {s.sample_id: np.full(10, -float(n), np.float32) for n, s in enumerate(samples)}
    prepared = [Sample(s.sample_id, s.table.with_columns(advantages=0.5 - scores[s.sample_id])) for s in samples]
    result = step_result(prepared)
    traces = [
        msgspec.structs.replace(t, logprobs=np.concatenate([scores[i] for i in t.sample_ids])) for t in result.traces
    ]
    assert any(len(t.sample_ids) > 1 for t in traces)
    RouteFileTracer(tmp_path, traced(), Reports()).write_trace(
        1, prepared, msgspec.structs.replace(result, traces=traces)
    )
    written = load_trained(tmp_path)
    assert len(written) == 5
    for trained in written:
        np.testing.assert_array_equal(trained.learner_logprobs, scores[trained.sample_id])
        np.testing.assert_array_equal(trained.advantages, 0.5 - scores[trained.sample_id])


def test_agreement_is_written_every_step_and_the_load_now_and_then(tmp_path: Path) -> None:
    tracer = RouteFileTracer(tmp_path, traced("off"), Reports())
    samples = [sample(0)]
    result = msgspec.structs.replace(step_result(samples), traces=[])
    for step in range(1, EXPERT_LOAD_EVERY + 2):
        tracer.write_trace(step, samples, result)
    lines = read_json_objects(tmp_path / "routing.jsonl")
    assert [line["step"] for line in lines] == list(range(1, EXPERT_LOAD_EVERY + 2))
    assert lines[0]["agreement"] == [0.5, 1.0, 0.33333]
    assert [line["step"] for line in lines if "load" in line] == [1, EXPERT_LOAD_EVERY + 1]
    assert lines[0]["load"] == np.arange(24).reshape(LAYERS, EXPERTS).tolist()
    assert not (tmp_path / "routes").exists()


@pytest.mark.parametrize(("layers", "written"), [(LAYERS, [["load", "step"]]), (0, [])])
def test_a_run_without_recorded_routes_has_loads_and_no_agreement_and_a_dense_model_nothing(
    tmp_path: Path, layers: int, written: list[list[str]]
) -> None:
    result = MinibatchResult({}, np.zeros(layers, np.float32), np.ones((layers, EXPERTS if layers else 0), np.int64))
    RouteFileTracer(tmp_path, traced(), Reports()).write_trace(1, [], result)
    assert [sorted(line) for line in read_json_objects(tmp_path / "routing.jsonl")] == written
    assert len(list(tmp_path.iterdir())) == len(written)


def test_traces_that_are_not_whole_are_told_and_end_no_run(tmp_path: Path) -> None:
    reports = Reports()
    samples = [sample(0)]
    RouteFileTracer(tmp_path, traced(), reports).write_trace(1, samples, step_result(samples, whole=False))
    ((event, fields),) = reports
    assert (event, fields["step"]) == ("routes_not_written", 1)
    assert "no trace has row 0 of MoE layer 2" in fields["error"]


async def play(engine, fail_first: bool) -> list[Sample]:
    """Three-turn episodes of two groups; the first try at one of them fails after its first turn."""
    failing = [fail_first]

    class Fails(ReverseText):
        async def step(self, action):
            result = await super().step(action)
            if failing.pop() if failing else False:
                raise RuntimeError("the environment broke")
            return result

    player = RetryingPlayer(
        PlayContext(engine, ChatRenderer(build_byte_tokenizer()), "generator-0", Reports()),
        EpisodeConfig(max_turns=3, max_new_tokens=8, max_prompt_tokens=64, max_total_tokens=128),
        lambda: Fails(4, 3),
    )
    played = [one for group in range(2) for one in await play_lease(player, group, 7, (0, 1))]
    return [sample for one in played for sample in one.trajectory.samples]


def train(samples: list[Sample]) -> MinibatchResult:
    """What a learner's routers do, on two pipeline stages and two sequence-parallel ranks."""
    shape, traces = SCRIPTED_ROUTING, []
    for micro_batch in (pad_to_multiple(m, 2) for m in pack_samples(samples, 128)):
        for column, rank in itertools.product(range(shape.layers), range(2)):
            replay = RoutingReplay(
                shape,
                [column],
                is_enabled=True,
                device=torch.device("cpu"),
                token_shard=(rank, 2),
            )
            with replay.bind_routes(micro_batch, keep=True) as routes:
                routes.choose_experts(
                    0, torch.rand(routes.num_local_tokens, shape.num_experts).topk(shape.top_k).indices
                )
                traces.append(routes.build_trace())
    load = np.zeros((shape.layers, shape.num_experts), np.int64)
    return MinibatchResult({}, np.ones(shape.layers, np.float32), load, traces)


@pytest.mark.parametrize("rows", ["all", "half", "none"])
@pytest.mark.parametrize("fail_first", [False, True])
async def test_from_the_engine_to_the_routers(tmp_path: Path, rows, fail_first: bool) -> None:
    inner = await scripted([[*b"dcba", 257], [*b"qwertyui"], [*b"q", 257], [*b"lm", 257]], returned_routes=rows)
    samples = await play(record_engine_routes(inner, tmp_path, "generator-0", traced()), fail_first)
    reports = Reports()
    RouteFileTracer(tmp_path, traced(), reports).write_trace(1, samples, train(samples))
    result = verify_routes(RouteIndex(tmp_path))
    tokens, layers = sum(len(s.table) for s in samples), SCRIPTED_ROUTING.layers
    recorded = sum(int(s.table["routing_recorded"].sum()) for s in samples)
    assert reports == []
    assert (result.samples, result.different, result.unmatched) == (4, 0, [])
    assert result.equal == recorded * layers
    assert result.equal + result.unrecorded == tokens * layers
    assert (result.equal > 0) == (rows != "none")
