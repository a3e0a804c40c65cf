"""Evaluation: tasks that training never poses, figures that are right, and nothing of it in what is trained."""

import asyncio
import json
import math
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.actors.fleet import Fleet
from r3async.actors.generator import GeneratorActor, GeneratorParts
from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.actors.process import NotLoaded, RunFailed
from r3async.actors.tasks import Evaluator
from r3async.config import ConfigError, EnvConfig, EpisodeConfig, ServingConfig, config_from_dict, load_config, to_dict
from r3async.envs.factory import environment_factory
from r3async.rollout.evaluation import (
    Outcome,
    check_environment,
    evaluate,
    evaluate_without_model,
    evaluation_tasks,
    summarize_outcomes,
)
from r3async.schedule.admission import GroupLease
from r3async.schedule.tasks import evaluation_seed, training_seed
from r3async.tools.eval import Target, check_target, describe, find_target, run_evaluation
from r3async.world.keys import new_keys
from r3async.world.real import REAL
from tests.helpers.serving import answer_ids, ready, renderer
from tests.helpers.world import StandIn

EPISODE = EpisodeConfig(max_turns=3, max_new_tokens=8, max_prompt_tokens=64, max_total_tokens=128, retries=0)
REVERSE = EnvConfig(name="reverse-text", args={"letters": 4, "turns": 3})


def test_training_and_evaluation_never_pose_one_task_also_where_a_seed_is_used_modulo_a_power_of_two():
    training = {training_seed(run, group) for run in range(20) for group in range(500)}
    evaluated = {evaluation_seed(seed, index) for seed in range(20) for index in range(500)}
    assert len(training) == len(evaluated) == 10_000
    assert all(0 <= s < 2**63 for s in training | evaluated)
    for bits in (63, 31, 16, 1):
        assert not {s % 2**bits for s in training} & {s % 2**bits for s in evaluated}
    assert training_seed(1, 2) == training_seed(1, 2) != training_seed(2, 1)


def test_the_figures_of_an_evaluation():
    outcomes = [
        Outcome(1.0, 2, "env_done", 10, 3, 4),
        Outcome(0.0, 4, "length", 30, 4, 5),
        Outcome(0.5, 3, "env_done", 20, 4, 4),
    ]
    result = summarize_outcomes(outcomes, 2.0)
    assert (result.episodes, result.reward_mean, result.turns_mean, result.tokens_mean) == (3, 0.5, 3, 20)
    assert result.reward_error == pytest.approx(0.5 / math.sqrt(3))
    assert (result.version_min, result.version_max) == (3, 5)
    assert result.stop_reasons == {"env_done": (2, 0.75), "length": (1, 0.0)}
    assert summarize_outcomes(outcomes[:1], 1).reward_error is None
    assert "mean reward 0.5000 ± 0.2887" in describe(result, "m", REVERSE)[0]


async def test_the_oracle_earns_all_the_policy_what_its_answers_are_worth_and_all_play_the_same_tasks():
    factory = environment_factory(REVERSE)
    oracle = await evaluate_without_model(REVERSE, factory, "oracle", episodes=5, seed=1, max_turns=9)
    assert (oracle.reward_mean, oracle.turns_mean, oracle.stop_reasons) == (
        pytest.approx(1.0),
        3,
        {"env_done": (5, pytest.approx(1.0))},
    )
    cut = await evaluate_without_model(REVERSE, factory, "oracle", episodes=2, seed=1, max_turns=2)
    assert (cut.turns_mean, list(cut.stop_reasons)) == (2, ["turns"])

    chat, seeds, said_so_far = renderer(), [], []

    class Watched:
        def __init__(self):
            self.env = factory()

        async def reset(self, task_seed):
            seeds.append(task_seed)
            return await self.env.reset(task_seed)

        async def step(self, action):
            return await self.env.step(action)

    engine = await ready(answer_ids(chat, "zzzz"))
    values = {"episodes": 5, "seed": 1, "trained": REVERSE, "concurrency": 2, "progress": said_so_far.append}
    result = await evaluate(REVERSE, Watched, engine, chat, EPISODE, ServingConfig(), **values)
    assert sorted(seeds) == sorted(evaluation_seed(1, i) for i in range(5))
    assert len(said_so_far) == result.episodes == 5
    assert 0.2 <= result.reward_mean < 0.5  # the end of each answer is right
    assert (result.version_min, result.version_max, result.tokens_mean) == (5, 5, 15)


async def test_an_environment_without_such_a_policy_is_named():
    class Mute:
        async def reset(self, task_seed):
            return []

    with pytest.raises(ConfigError, match=r"--policy oracle.*'mine' has no oracle\(\)"):
        await evaluate_without_model(EnvConfig(name="mine"), Mute, "oracle", episodes=1, seed=0, max_turns=1)


# -- the command --------------------------------------------------------------------------------------------------


def make_run(root, name, **files):
    run = root / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(
        'seed = 7\n[env]\nname = "reverse-text"\nargs = { letters = 2 }\n'
        "[episode]\nmax_prompt_tokens = 64\nmax_total_tokens = 128\n"
    )
    for part in files:
        (run / part).mkdir()
        (run / part / "config.json").write_text('{"max_position_embeddings": 256}')
    return run


def test_a_runs_newest_model_is_evaluated_as_the_run_played(tmp_path):
    run = make_run(tmp_path, "a", model=1, init=1)
    target = find_target("a", None, None, [], tmp_path)
    assert target.model == run / "model"
    assert (target.config.env.args, target.config.seed) == ({"letters": 2}, 7)
    assert find_target(str(run), None, "reverse-text", ["env.args.turns=2"]).config.env.args == {
        "letters": 2,
        "turns": 2,
    }
    # Arguments of the run's environment are not those of another.
    assert find_target(str(run), None, "guess", []).config.env.args == {}
    make_run(tmp_path, "young", init=1)
    assert find_target("young", None, None, [], tmp_path).model == tmp_path / "young" / "init"
    assert find_target(str(run / "model"), None, "guess", []).config.env.name == "guess"
    assert find_target(str(run / "model"), "quickstart", None, []).config.episode.max_total_tokens == 128


@pytest.mark.parametrize(
    ("name", "env", "overrides", "message"),
    [
        (
            "nowhere",
            None,
            [],
            r"RUN_OR_MODEL = 'nowhere' is no model directory .* and no run 'nowhere'; there are: empty, run",
        ),
        ("empty", None, [], "has no model yet"),
        ("run/model", None, [], "say which environment it is to play, with --env"),
        ("run", None, ["env.nam=x"], r"did you mean `env\.name`"),
    ],
)
def test_what_cannot_be_evaluated_is_named(tmp_path, monkeypatch, name, env, overrides, message):
    make_run(tmp_path, "runs/run", model=1)
    make_run(tmp_path, "runs/empty")
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(ConfigError, match=message):
        find_target(name, None, env, overrides, tmp_path / "runs")


@pytest.mark.parametrize(
    ("overrides", "policy", "message"),
    [
        (
            ["episode.max_total_tokens=512"],
            "model",
            r"`episode\.max_total_tokens` = 512 is more than the 256 positions",
        ),
        (["env.name=agent-outside", "env.args={}"], "model", "agent-outside"),
        (["env.name=agent:tests.helpers.agents:counts", "env.args={}"], "oracle", "is an agent, which asks a model"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_engine_starts(tmp_path, overrides, policy, message):
    make_run(tmp_path, "run", model=1)
    with pytest.raises(ConfigError, match=message):
        check_target(find_target("run", None, None, overrides, tmp_path), policy)


async def test_the_command_plays_with_an_engine_of_its_own_and_stops_it(tiny_model, monkeypatch):
    config = load_config("quickstart", ["episode.retries=0"])
    chat = renderer()
    engine = await ready(answer_ids(chat, "abcd"))
    monkeypatch.setattr("r3async.tools.eval.ChatRenderer.from_model", lambda *a: chat)
    target = Target(tiny_model, config)
    phases, outcomes = [], []
    values = {"episodes": 3, "seed": 0, "make_engine": lambda config, model, seed: engine}
    result = await run_evaluation(target, **values, phase=phases.append, progress=outcomes.append)
    assert (result.episodes, len(outcomes), phases) == (3, 3, ["loading the model", "playing"])
    with pytest.raises(Exception, match="not running"):
        await engine.score(np.array([1, 2]))

    class Broken:
        async def start(self):
            raise RuntimeError("no memory")

        async def stop(self):
            pass

    with pytest.raises(RunFailed, match="no memory"):
        await run_evaluation(target, **{**values, "make_engine": lambda config, model, seed: Broken()})


def write_rows(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": p, "answer": "no"}) + "\n" for p in prompts))
    return f"dataset:{path}"


def make_dataset_run(tmp_path, evaluation=""):
    """A run that trained on six rows."""
    run = make_run(tmp_path, "rows", model=1)
    train = write_rows(tmp_path / "train.jsonl", *(f"train{i}" for i in range(6)))
    text = (
        (run / "config.toml").read_text().replace('"reverse-text"', f'"{train}"').replace("args = { letters = 2 }", "")
    )
    (run / "config.toml").write_text(
        text
        + '[generator]\nengine = "scripted"\n[generator.engine_args]\ntoken_seconds = 0.0\n[weights]\nprobe = false\n'
        + evaluation
    )
    return train


async def played(target, monkeypatch, **values):
    """The prompts that `r3async eval` posed, and what it told the maker of its engine."""
    chat, told = renderer(), []
    engine = await ready(answer_ids(chat, "yes"))
    monkeypatch.setattr("r3async.tools.eval.ChatRenderer.from_model", lambda *a: chat)

    def make(config, model, seed):
        told.append((config, model, seed))
        return engine

    await run_evaluation(target, seed=0, make_engine=make, **values)
    texts = {chat.tokenizer.decode([int(t) for t in call.prompt_ids]) for call in engine.calls}
    return texts, told


async def test_eval_poses_the_tasks_of_the_runs_evaluations_each_once_and_builds_its_engine_by_the_runs_settings(
    tmp_path, monkeypatch
):
    held_out = write_rows(tmp_path / "test.jsonl", *(f"test{i}" for i in range(4)))
    make_dataset_run(tmp_path, f'[evaluation]\nseed = 5\n[evaluation.env]\nname = "{held_out}"\n')
    target = find_target("rows", None, None, [], tmp_path)
    texts, told = await played(target, monkeypatch, episodes=4)
    assert [sum(f"test{i}" in text for text in texts) for i in range(4)] == [1, 1, 1, 1]
    assert not any("train" in text for text in texts)
    assert told == [(target.config, str(tmp_path / "rows" / "model"), 7)]
    assert target.config.generator.engine == "scripted"
    other = find_target("rows", None, None, [f"evaluation.env.name={held_out}", "env.args.reward=contains"], tmp_path)
    assert (other.config.env.name, other.config.evaluation.seed) == (held_out, 5)


async def test_eval_of_a_run_with_the_scripted_engine_loads_no_other(untrained, monkeypatch):
    monkeypatch.setitem(sys.modules, "r3async.rollout.engines.vllm", None)  # importing it fails
    scripted = ["generator.engine=scripted", "generator.engine_args={ token_seconds = 0.001 }", "weights.probe=false"]
    result = await run_evaluation(Target(untrained, load_config("quickstart", scripted)), episodes=3, seed=0)
    assert (result.episodes, result.tokens_mean > 0) == (3, True)


@pytest.mark.parametrize("env", [None, "train"])
async def test_tasks_that_were_trained_are_not_evaluated_unless_the_model_is_named_without_its_run(
    tmp_path, monkeypatch, env
):
    train = make_dataset_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    name = env and "dataset:train.jsonl"  # the same file, by another path
    for target in (
        find_target("rows", None, name, [], tmp_path),
        find_target("rows", None, name, ["env.args.reward=contains"], tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"has 6 tasks, and the run trains on all.*`evaluation\.env`"):
            await played(target, monkeypatch, episodes=4)
    directory = find_target(
        str(tmp_path / "rows" / "model"), None, train, ["episode.max_total_tokens=128", "episode.max_prompt_tokens=64"]
    )
    texts, _ = await played(directory, monkeypatch, episodes=6)
    assert [sum(f"train{i}" in text for text in texts) for i in range(6)] == [1] * 6


def test_a_run_that_would_evaluate_what_it_trains_is_refused_before_it_starts(tmp_path):
    train = {"name": write_rows(tmp_path / "train.jsonl", "a", "b")}
    check_environment(config_from_dict({"env": train}))
    with pytest.raises(ConfigError, match="has 2 tasks, and the run trains on all"):
        check_environment(config_from_dict({"env": train, "evaluation": {"every": 1}}))
    test = {"name": write_rows(tmp_path / "test.jsonl", "c")}
    check_environment(config_from_dict({"env": train, "evaluation": {"every": 1, "env": test}}))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 120))
def test_evaluation_poses_each_of_a_number_of_tasks_once_before_any_again(size, seed, episodes):
    seeds = [task.task_seed for task in evaluation_tasks(REVERSE, size, seed, episodes)]
    assert set(seeds) <= set(range(size))
    for epoch in range(0, episodes, size):
        posed = seeds[epoch : epoch + size]
        assert len(set(posed)) == len(posed)
    longer = evaluation_tasks(REVERSE, size, seed, episodes + 7)
    assert [task.task_seed for task in longer[:episodes]] == seeds


# -- inside a run -------------------------------------------------------------------------------------------------


class Events:
    def __init__(self):
        self.reported = []

    def __getattr__(self, level):
        return lambda event, **fields: self.reported.append((event, fields))


def evaluator(tmp_path, answer, dead=False, **settings):
    config = config_from_dict({"evaluation": {"every": 2, **settings}, "supervise": {"stop_grace_seconds": 0.3}})
    events = Events()
    fleet = Fleet(config, events, {"g": StandIn(evaluate=answer)})
    fleet["g"].health.loaded()
    fleet["g"].health.installed(0, 0)
    if dead:
        fleet["g"].health.lost()
    return Evaluator(config, tmp_path, events, fleet), events


def lines(tmp_path):
    file = tmp_path / "evaluation.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def settle(it):
    await asyncio.wait_for(it._wait(lambda: False), 5)


async def test_evaluations_are_due_every_so_many_steps_and_after_the_last(tmp_path):
    async def answer():
        return {"reward_mean": 0.5, "version_min": 3, "version_max": 4, "episodes": 32}

    it, _ = evaluator(tmp_path, answer, at_start=True)
    for step in range(6):
        it.after(step)
        await settle(it)
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 4]
    await it.finish(5, lambda: False)
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 4, 5]
    await it.finish(5, lambda: False)
    assert len(lines(tmp_path)) == 4
    assert lines(tmp_path)[0]["evaluation/reward_mean"] == 0.5
    assert {"step", "time", "evaluation/version_min", "evaluation/version_max", "evaluation/episodes"} <= set(
        lines(tmp_path)[0]
    )


async def test_a_generator_that_stops_answering_in_an_evaluation_is_left_for_another(tmp_path):
    asked = []

    def generator(name, frozen):
        async def evaluate():
            asked.append(name)
            await asyncio.sleep(60 if frozen else 0.2)
            return {"reward_mean": 0.5}

        async def whereabouts():
            await asyncio.sleep(60 if frozen else 0)

        return StandIn(evaluate=evaluate, whereabouts=whereabouts)

    it, events = evaluator(tmp_path, None)
    it.config = config_from_dict({"supervise": {"silence_seconds": 0.1}})
    fleet = Fleet(it.config, events, {name: generator(name, name != "c") for name in "abc"})
    for member in fleet:
        member.health.loaded()
        member.health.installed(0, 0)
    it._fleet = fleet
    it.after(2)
    await settle(it)
    assert asked == ["a", "b", "c"]
    assert [(e, f["generator"]) for e, f in events.reported] == [
        ("evaluation_moved", "a"),
        ("evaluation_moved", "b"),
        ("evaluation_finished", "c"),
    ]
    assert [line["step"] for line in lines(tmp_path)] == [2]
    fleet["c"].health.lost()
    it.after(4)
    await settle(it)
    assert events.reported[-1] == ("evaluation_failed", {"step": 4, "error": "a, b did not answer"})


async def test_an_evaluation_that_fails_is_an_event_and_no_more(tmp_path):
    async def answer():
        raise RuntimeError("the environment is away")

    it, events = evaluator(tmp_path, answer)
    it.after(2)
    await settle(it)
    await it.finish(2, lambda: False)
    assert [(e, f["step"]) for e, f in events.reported] == [("evaluation_failed", 2)]
    assert "the environment is away" in events.reported[0][1]["error"]
    it, events = evaluator(tmp_path, answer, dead=True)
    it.after(2)
    await settle(it)
    assert events.reported[0][1]["error"] == "no generator is healthy"
    assert lines(tmp_path) == []


async def test_one_that_takes_long_lets_the_next_one_out_and_a_stopped_run_waits_no_longer_than_its_grace(tmp_path):
    async def answer():
        await asyncio.sleep(60)

    it, events = evaluator(tmp_path, answer)
    it.after(2)
    it.after(4)
    assert events.reported == [("evaluation_skipped", {"step": 4, "running_since_step": 2})]
    await asyncio.wait_for(it.finish(4, lambda: True), 3)
    assert events.reported[-1][0] == "evaluation_abandoned"
    await it.finish(4, lambda: True)
    assert len(events.reported) == 2


async def test_a_run_without_evaluations_asks_for_none(tmp_path):
    it, events = evaluator(tmp_path, None, every=0)
    for step in range(5):
        it.after(step)
    await it.finish(4, lambda: False)
    await it.cancel()
    assert (events.reported, it._task) == ([], None)


class Learner:
    """Where a generator's sender would send to."""

    unacknowledged = 0

    def __init__(self):
        self.got = {}

    async def start(self):
        pass

    @property
    def acked(self):
        return len(self.got)

    async def send(self, trajectory):
        self.got[trajectory.trajectory_id] = trajectory

    async def flush(self, timeout):
        pass

    async def close(self):
        pass

    def __contains__(self, trajectory_id):
        return False


@pytest.fixture
def made(monkeypatch):
    """`made(directory, config, engine, chat, sender)`: a generator, in this process."""
    monkeypatch.setattr("r3async.actors.generator.begin", lambda *args: None)

    def make(directory, config, engine, chat, sender=None):
        parts = GeneratorParts(lambda *args: engine, lambda *args: chat, sender=lambda *args, **facts: sender)
        return GeneratorActor(REAL, "g", "run", to_dict(config), "nowhere", str(directory), parts=parts)

    return make


async def play_run(made, directory, evaluations, groups=3):
    """What a generator delivers of `groups` leases at S = 0, with evaluations beside each or without."""
    settings = {"every": 1 if evaluations else 0, "episodes": 6, "seed": 0}
    config = load_config("quickstart", ["schedule.samples_per_group=2", "schedule.max_staleness=0"])
    config = msgspec.structs.replace(config, evaluation=config_from_dict({"evaluation": settings}).evaluation)
    chat, sender = renderer(), Learner()

    def answer(request, index):  # of the request alone, as greedy sampling would be
        return [int(t) for t in request.prompt_ids[-4:] % 256] + [chat.end_id]

    engine = await ready(answer)
    actor = made(directory, config, engine, chat, sender)
    await actor.start()
    await actor.connect("", "shared_memory", new_keys()[1])
    results = []

    async def lease(message):
        call = msgspec.msgpack.decode(message, type=LeaseCall)
        for _ in range(int(call.wait / 0.01)):
            if len(sender.got) >= 2 * len(lease.given):
                break
            await asyncio.sleep(0.01)
        played = len(sender.got) // 2
        if evaluations and len(results) <= played < groups:
            results.append(asyncio.create_task(actor.evaluate()))
        free = len(sender.got) == 2 * played and played not in lease.given and played < groups
        leases = [GroupLease(played, training_seed(0, played), (0, 1))] if free and call.free else []
        lease.given |= {g.group_index for g in leases}
        return msgspec.msgpack.encode(LeaseAnswer(leases, more=played < groups))

    lease.given = set()
    await asyncio.wait_for(actor.run(StandIn(lease=lease)), 30)
    evaluated = await asyncio.gather(*results)
    await actor.stop()
    return sender.got, evaluated, engine


async def test_training_data_is_the_same_with_and_without_evaluation_and_no_evaluation_is_sent_to_the_learner(
    made, tmp_path
):
    plain, none, _ = await play_run(made, tmp_path / "a", evaluations=False)
    beside, evaluated, engine = await play_run(made, tmp_path / "b", evaluations=True)
    assert none == []
    assert len(evaluated) == 3
    assert all(e["episodes"] == 6 for e in evaluated)
    assert len({e["reward_mean"] for e in evaluated}) == 1  # the same tasks each time
    assert sorted(plain) == sorted(beside) == [f"g{g:08d}e{i:04d}" for g in range(3) for i in range(2)]
    for name, trajectory in plain.items():
        other = beside[name]
        assert trajectory.task_seed == other.task_seed
        assert trajectory.turns == other.turns
        assert [s.table for s in trajectory.samples] == [s.table for s in other.samples]
    asked = [call.request_id for call in engine.calls]
    assert sum(name.startswith("evaluation") for name in asked) == 3 * 6 * 3
    assert len(asked) == 3 * 6 * 3 + 3 * 2 * 3


async def test_a_generator_that_stops_gives_its_evaluations_up(made, tmp_path):
    never = asyncio.Event()
    engine, chat = await ready([[1]], pace=never.wait), renderer()
    actor = made(tmp_path, load_config("quickstart", []), engine, chat)
    with pytest.raises(NotLoaded, match="is not set up yet"):
        await actor.evaluate()
    await actor.start()
    evaluating = asyncio.create_task(actor.evaluate())
    await asyncio.sleep(0.05)
    await asyncio.wait_for(actor.stop(), 5)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(evaluating, 5)
