"""`r3async eval`: the newest model is evaluated as the run played, and what cannot be is refused."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from r3async.actors.process import RunFailed
from r3async.config import ConfigError, config_from_dict, load_config
from r3async.rollout.evaluation import check_environment
from r3async.rollout.evaluation_results import EpisodeOutcome, join_sets, summarize_outcomes
from r3async.tools.eval import (
    EvaluationTarget,
    PairedDifference,
    check_target,
    compare_results,
    describe_difference,
    describe_result,
    eval_command,
    find_evaluation_target,
    make_baseline_target,
    run_evaluation,
    save_result,
)
from tests.helpers.serving import answer_ids, ready, renderer


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
    target = find_evaluation_target("a", None, None, [], tmp_path)
    assert target.model == run / "model"
    assert (target.config.env.args, target.config.seed) == ({"letters": 2}, 7)
    assert find_evaluation_target(str(run), None, "reverse-text", ["env.args.turns=2"], tmp_path).config.env.args == {
        "letters": 2,
        "turns": 2,
    }
    # Arguments of the run's environment are not those of another.
    assert find_evaluation_target(str(run), None, "guess", [], tmp_path).config.env.args == {}
    make_run(tmp_path, "young", init=1)
    assert find_evaluation_target("young", None, None, [], tmp_path).model == tmp_path / "young" / "init"
    assert find_evaluation_target(str(run / "model"), None, "guess", [], tmp_path).config.env.name == "guess"
    assert (
        find_evaluation_target(str(run / "model"), "quickstart", None, [], tmp_path).config.episode.max_total_tokens
        == 128
    )


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
        ("run/model", None, [], "say which environment to evaluate it in, with --env"),
        ("run", None, ["env.nam=x"], r"did you mean `env\.name`"),
    ],
)
def test_what_cannot_be_evaluated_is_named(tmp_path, monkeypatch, name, env, overrides, message):
    make_run(tmp_path, "runs/run", model=1)
    make_run(tmp_path, "runs/empty")
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(ConfigError, match=message):
        find_evaluation_target(name, None, env, overrides, tmp_path / "runs")


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
        check_target(find_evaluation_target("run", None, None, overrides, tmp_path), policy)


async def test_the_command_plays_with_an_engine_of_its_own_and_stops_it(tiny_model, monkeypatch):
    config = load_config("quickstart", ["episode.retries=0"])
    chat = renderer()
    engine = await ready(answer_ids(chat, "abcd"))
    monkeypatch.setattr("r3async.tools.eval.ChatRenderer.from_model", lambda *a: chat)
    target = EvaluationTarget(tiny_model, config).with_tasks(3, 0)
    phases, outcomes = [], []
    values = {"make_engine": lambda config, model, seed: engine}
    result = await run_evaluation(target, **values, show_phase=phases.append, on_outcome=outcomes.append)
    assert (result.episodes, len(outcomes), phases) == (3, 3, ["loading the model", "evaluating"])
    with pytest.raises(Exception, match="not running"):
        await engine.score_tokens(np.array([1, 2]))

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


async def played(target, monkeypatch, tasks):
    """The prompts that `r3async eval` posed, and what it told the maker of its engine."""
    chat, told = renderer(), []
    engine = await ready(answer_ids(chat, "yes"))
    monkeypatch.setattr("r3async.tools.eval.ChatRenderer.from_model", lambda *a: chat)

    def make(config, model, seed):
        told.append((config, model, seed))
        return engine

    await run_evaluation(target.with_tasks(tasks, 0), make_engine=make)
    texts = {chat.tokenizer.decode([int(t) for t in call.prompt_ids]) for call in engine.requests}
    return texts, told


async def test_eval_poses_the_tasks_of_the_runs_evaluations_each_once_and_builds_its_engine_by_the_runs_settings(
    tmp_path, monkeypatch
):
    held_out = write_rows(tmp_path / "test.jsonl", *(f"test{i}" for i in range(4)))
    make_dataset_run(tmp_path, f'[evaluation]\nseed = 5\n[evaluation.env]\nname = "{held_out}"\n')
    target = find_evaluation_target("rows", None, None, [], tmp_path)
    texts, told = await played(target, monkeypatch, tasks=4)
    assert [sum(f"test{i}" in text for text in texts) for i in range(4)] == [1, 1, 1, 1]
    assert not any("train" in text for text in texts)
    assert told == [(target.with_tasks(4, 0).config, str(tmp_path / "rows" / "model"), 7)]
    assert target.config.generator.engine == "scripted"
    other = find_evaluation_target(
        "rows", None, None, [f"evaluation.env.name={held_out}", "env.args.reward=contains"], tmp_path
    )
    assert (other.config.env.name, other.config.evaluation.seed) == (held_out, 5)


@pytest.mark.parametrize("policy", ["model", "oracle"])
async def test_the_bar_counts_what_will_be_played_and_not_what_was_asked_for(tmp_path, untrained, policy):
    scripted = ["generator.engine=scripted", "generator.engine_args={ token_seconds = 0.0 }", "weights.probe=false"]
    rows = write_rows(tmp_path / "rows.jsonl", *(f"test{i}" for i in range(4)), "a prompt that is too long " * 20)
    settings = [f"env.name={rows}", "env.args={}", "evaluation.samples_per_task=2", "episode.max_prompt_tokens=64"]
    target = EvaluationTarget(untrained, load_config("quickstart", [*scripted, *settings], command="eval")).with_tasks(
        64, 0
    )
    totals, outcomes = [], []
    result = await run_evaluation(target, policy=policy, on_total=totals.append, on_outcome=outcomes.append)
    assert totals == [result.episodes] == [len(outcomes)] == [8 if policy == "model" else 10]


async def test_eval_of_a_run_with_the_scripted_engine_loads_no_other(untrained, monkeypatch):
    monkeypatch.setitem(sys.modules, "r3async.rollout.vllm.engine", None)  # importing it fails
    scripted = ["generator.engine=scripted", "generator.engine_args={ token_seconds = 0.001 }", "weights.probe=false"]
    result = await run_evaluation(EvaluationTarget(untrained, load_config("quickstart", scripted)).with_tasks(3, 0))
    assert (result.episodes, result.tokens_mean > 0) == (3, True)


@pytest.mark.parametrize("env", [None, "train"])
async def test_tasks_that_were_trained_are_not_evaluated_unless_the_model_is_named_without_its_run(
    tmp_path, monkeypatch, env
):
    train = make_dataset_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    name = env and "dataset:train.jsonl"  # the same file, by another path
    for target in (
        find_evaluation_target("rows", None, name, [], tmp_path),
        find_evaluation_target("rows", None, name, ["env.args.reward=contains"], tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"has 6 tasks, and the run trains on all.*`evaluation\.env`"):
            await played(target, monkeypatch, tasks=4)
    directory = find_evaluation_target(
        str(tmp_path / "rows" / "model"),
        None,
        train,
        ["episode.max_total_tokens=128", "episode.max_prompt_tokens=64"],
        tmp_path,
    )
    texts, _ = await played(directory, monkeypatch, tasks=6)
    assert [sum(f"train{i}" in text for text in texts) for i in range(6)] == [1] * 6


def make_model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 4096}')
    return str(tmp_path / "model")


@pytest.mark.parametrize(("keep", "posed"), [([], 2), (["data.eval=5"], 5), (["data.eval=0"], 40)])
async def test_a_model_plays_own_rows_with_the_preset_that_trains_them(tmp_path, monkeypatch, keep, posed):
    write_rows(tmp_path / "rows.jsonl", *(f"row{i}." for i in range(40)))
    overrides = [f"data={tmp_path / 'rows.jsonl'}", "reward=contains", *keep]
    target = find_evaluation_target(make_model(tmp_path), "math", None, overrides, tmp_path)
    texts, [(config, *_)] = await played(target, monkeypatch, tasks=None)
    assert sum(f"row{i}." in text for text in texts for i in range(40)) == posed
    assert (config.episode.max_new_tokens, config.env.args["reward"]) == (512, "contains")


def test_a_preset_for_rows_says_that_none_are_named(tmp_path):
    with pytest.raises(ConfigError, match="`data` names no rows: set `data` = FILE"):
        find_evaluation_target(make_model(tmp_path), "math", None, [], tmp_path)


async def test_a_runs_model_plays_other_rows_than_those_that_the_run_noted(tmp_path, monkeypatch):
    train = make_dataset_run(tmp_path)
    config = tmp_path / "rows" / "config.toml"
    noted = 'name = "dataset"\nargs = { path = "' + train.partition(":")[2] + '", digest = "of other rows" }'
    config.write_text(config.read_text().replace(f'name = "{train}"', noted))
    write_rows(tmp_path / "new.jsonl", *(f"new{i}" for i in range(4)))
    with pytest.raises(ConfigError, match="the rows are not those that the run began with"):
        await played(find_evaluation_target("rows", None, None, ["reward=contains"], tmp_path), monkeypatch, tasks=4)
    target = find_evaluation_target("rows", None, None, [f"data={tmp_path / 'new.jsonl'}"], tmp_path)
    assert "digest" not in target.config.env.args
    target = msgspec.structs.replace(target, trained_env=None)  # whose rows are not there
    texts, _ = await played(target, monkeypatch, tasks=4)
    assert sum(f"new{i}" in text for text in texts for i in range(4)) == 4


def test_rows_of_which_none_are_kept_for_evaluations_say_what_to_set(tmp_path):
    write_rows(tmp_path / "rows.jsonl", "a", "b", "c")
    config = load_config("math", [f"data={tmp_path / 'rows.jsonl'}", "reward=exact", "data.eval=0"])
    with pytest.raises(
        ConfigError, match=r"has 3 tasks.*`data\.eval`, as 0\.05.*`evaluation\.every_steps` = 0.*`evaluation\.env`"
    ):
        check_environment(config)


def test_a_run_that_would_evaluate_what_it_trains_is_refused_before_it_starts(tmp_path):
    train = {"name": write_rows(tmp_path / "train.jsonl", "a", "b")}
    check_environment(config_from_dict({"env": train}))
    with pytest.raises(ConfigError, match="has 2 tasks, and the run trains on all"):
        check_environment(config_from_dict({"env": train, "evaluation": {"every_steps": 1}}))
    test = {"name": write_rows(tmp_path / "test.jsonl", "c")}
    check_environment(config_from_dict({"env": train, "evaluation": {"every_steps": 1, "env": test}}))


def test_rows_that_training_poses_too_are_not_evaluated_and_the_first_is_named(tmp_path, monkeypatch):
    train = {"name": write_rows(tmp_path / "train.jsonl", "a", "b", "c")}
    test = {"name": write_rows(tmp_path / "test.jsonl", "d", "b")}
    with pytest.raises(
        ConfigError, match=r"1 rows of 'dataset:.*test\.jsonl'.* such as .*test\.jsonl.*2.*`data\.eval`"
    ):
        check_environment(config_from_dict({"env": train, "evaluation": {"every_steps": 1, "env": test}}))
    sets = {"new": {"env": {"name": write_rows(tmp_path / "new.jsonl", "e")}}, "old": {"env": test}}
    with pytest.raises(ConfigError, match="1 rows of"):
        check_environment(config_from_dict({"env": train, "evaluation": {"every_steps": 1, "sets": sets}}))
    make_dataset_run(tmp_path)
    other = write_rows(tmp_path / "other.jsonl", "new", "train3")
    with pytest.raises(ConfigError, match="1 rows of"):
        check_target(find_evaluation_target("rows", None, other, [], tmp_path), "model")
    kept = {"name": "dataset", "args": {"path": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "test.jsonl")}}
    kept["args"]["reward"] = "exact"
    check_environment(config_from_dict({"env": kept, "evaluation": {"every_steps": 1}}))  # leaves "b" out of training


async def test_the_sets_of_a_run_are_played_and_its_result_is_kept_beside_its_checkpoints(tmp_path, monkeypatch):
    sets = "[evaluation]\ntasks = 2\n[evaluation.sets.greedy]\ntemperature = 0\n[evaluation.sets.sampled]\nsamples_per_task = 4\n"
    held_out = write_rows(tmp_path / "test.jsonl", *(f"test{i}" for i in range(4)))
    run = make_dataset_run(tmp_path, f'{sets}[evaluation.env]\nname = "{held_out}"\n') and tmp_path / "rows"
    chat, engine = renderer(), await ready(answer_ids(renderer(), "no"))
    monkeypatch.setattr("r3async.tools.eval.ChatRenderer.from_model", lambda *a: chat)
    target = find_evaluation_target("rows", None, None, [], tmp_path).with_tasks(None, None)
    result = await run_evaluation(target, make_engine=lambda config, model, seed: engine)
    assert {name: (s.episodes, s.tasks, list(s.passes)) for name, s in result.sets.items()} == {
        "greedy": (2, 2, ["1"]),
        "sampled": (8, 2, ["1", "2", "4"]),
    }
    assert {call.temperature for call in engine.requests} == {0.0, 1.0}
    text = "\n".join(describe_result(result, "model", target.environments))
    assert "model, greedy, on dataset:" in text
    assert "  pass@4 1.0000  (95 %: 1.0000 to 1.0000)" in text
    paths = [save_result(target, result) for _ in range(2)]
    assert paths == [run / "checkpoints" / f"evaluation-model-{n}.json" for n in (1, 2)]
    assert json.loads(paths[0].read_text())["result"]["sets"]["sampled"]["passes"]["4"] == [1.0, 1.0, 1.0]
    alone = find_evaluation_target("rows", None, "guess", [], tmp_path).with_tasks(5, 3).config.evaluation
    assert (alone.sets, alone.tasks, alone.seed) == ({}, 5, 3)
    each = find_evaluation_target("rows", None, None, [], tmp_path).with_tasks(5, None).config.evaluation.resolve_sets()
    assert [(s.tasks, s.samples_per_task) for s in each.values()] == [(5, 1), (5, 4)]


def evaluated(**rewards):
    outcomes = [
        EpisodeOutcome(reward, 1, "stop", task_seed=int(task[1:])) for task, each in rewards.items() for reward in each
    ]
    return summarize_outcomes(outcomes, 1.0)


def test_the_difference_from_a_baseline_is_paired_by_task():
    """By hand: +1, 0, -0.5 and +0.5 on the four tasks that both played; the fifth only one of them had."""
    ours = evaluated(t1=[1, 1], t2=[0, 1], t3=[0, 0], t4=[1, 0], t5=[1, 1])
    theirs = evaluated(t1=[0, 0], t2=[1, 0], t3=[1, 0], t4=[0, 0])
    difference = compare_results(ours, theirs)[""]
    half = 1.96 * np.std([1, 0, -0.5, 0.5], ddof=1) / 2
    assert difference == PairedDifference(
        0.25, pytest.approx(0.25 - half), pytest.approx(0.25 + half), tasks=4, better=2, worse=1
    )
    text = describe_difference(difference, "greedy")
    assert text.startswith("difference on greedy: +0.2500  (95 %: -")
    assert text.endswith("better on 2 and worse on 1 of 4 tasks")
    sets = compare_results(join_sets({"a": ours, "b": theirs}), join_sets({"a": theirs, "b": theirs}))
    assert (sets["a"].mean, sets["b"].mean) == (0.25, 0.0)
    assert compare_results(evaluated(t1=[1]), evaluated(t2=[1])) == {}


def test_a_baseline_is_the_start_model_a_directory_or_a_run(tmp_path):
    make_dataset_run(tmp_path, "")
    run, other = tmp_path / "rows", Path(make_model(tmp_path))
    target = find_evaluation_target("rows", None, None, [], tmp_path)
    with pytest.raises(ConfigError, match=r"`--baseline start`: .*init has no config.json"):
        make_baseline_target(target, "start", tmp_path)
    (run / "init").mkdir()
    (run / "init" / "config.json").write_text("{}")
    for baseline, model in (("start", run / "init"), (str(other), other), ("rows", run / "model")):
        made = make_baseline_target(target, baseline, tmp_path)
        assert (made.model, made.config, made.run) == (model, target.config, None)
    with pytest.raises(ConfigError, match=r"`--baseline nowhere` is no model directory .* and"):
        make_baseline_target(target, "nowhere", tmp_path)
    alone = find_evaluation_target(str(other), "quickstart", None, [], tmp_path)
    with pytest.raises(ConfigError, match="`--baseline start` needs a run"):
        make_baseline_target(alone, "start", tmp_path)


def test_the_command_prints_both_models_and_their_difference(untrained, tmp_path, capsys):
    scripted = ["generator.engine=scripted", "generator.engine_args={ token_seconds = 0.001 }", "weights.probe=false"]
    options = {"preset": "quickstart", "tasks": 3, "seed": 0, "json": True, "root": tmp_path}
    result = eval_command(str(untrained), None, scripted, baseline=str(untrained), policy="model", **options)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" on ")[0] for line in lines if ": mean reward" in line] == [
        f"baseline {untrained}",
        untrained.name,
    ]
    assert sum(line.startswith("difference: ") for line in lines) == 1
    data = json.loads(lines[-1])
    assert (data["reward_mean"], data["baseline"]["tasks"]) == (result.reward_mean, 3)
    assert data["differences"][""]["tasks"] == 3
    with pytest.raises(ConfigError, match="`--baseline` compares models"):
        eval_command(None, "guess", [], baseline="start", policy="oracle", **options)
