"""Several environments in one run: which of them a group is of, what each is given, and what is said of each."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import Config, ConfigError, config_to_toml, load_config, resolve_envs
from r3async.config.load import apply_overrides
from r3async.data.metrics import find_metric
from r3async.data.mixed import ENV_SEED_BITS, join_seed, split_seed
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.envs import Action, Message
from r3async.envs.factory import build_environment_factory
from r3async.envs.mix import MixedEnvironment, add_default_evaluation_sets
from r3async.record.trained_trajectories import compute_environment_metrics
from r3async.rollout.evaluation import check_environment, count_tasks_by_part
from r3async.schedule.environment_mix import MAX_PERIOD, EnvironmentOrder, MixedTaskCursor
from r3async.tools.preflight import try_environments
from r3async.tools.rows import add_row_digests

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@settings(max_examples=60)
@given(WEIGHTS, st.integers(0, 5000), st.integers(1, 300))
def test_any_stretch_of_groups_has_each_environment_s_share(weights, start, length):
    order = EnvironmentOrder(weights)
    for entry, weight in enumerate(weights):
        share = order.count_before(entry, order.period) / order.period
        assert abs(share - weight / sum(weights)) <= max(1 / MAX_PERIOD, len(weights) / MAX_PERIOD)
        found = order.count_before(entry, start + length) - order.count_before(entry, start)
        assert found == sum(order.environment_of(group) == entry for group in range(start, start + length))
        assert abs(found - share * length) <= 2


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 100), st.data())
def test_each_environment_has_tasks_and_epochs_of_its_own(weights, seed, data):
    sizes = data.draw(st.lists(st.none() | st.integers(1, 7), min_size=len(weights), max_size=len(weights)))
    cursor, again = MixedTaskCursor(seed, weights, sizes), MixedTaskCursor(seed, weights, sizes)
    order, tasks = EnvironmentOrder(weights), [cursor.pick_task(group) for group in range(200)]
    assert tasks == [again.pick_task(group) for group in range(200)]  # whatever was asked before
    own: dict[int, list[int]] = {}
    for group, task in enumerate(tasks):
        entry, given = split_seed(task, len(weights)) if len(weights) > 1 else (0, task)
        assert entry == order.environment_of(group)
        assert join_seed(entry, given) == task < 2**63
        own.setdefault(entry, []).append(given)
    for entry, given in own.items():
        size = sizes[entry]
        if size is None:
            assert all(task % 2 == 0 and task < 2**ENV_SEED_BITS for task in given)  # evaluations pose odd ones
        else:
            epochs = [sorted(given[at : at + size]) for at in range(0, len(given) - size + 1, size)]
            assert all(epoch == list(range(size)) for epoch in epochs)
            assert cursor.count_epochs(200)[entry] == len(given) / size


def test_a_quarantined_task_is_not_posed_from_its_group_on_and_is_of_its_environment_alone():
    quarantined: dict[int, int] = {}
    cursor, before = MixedTaskCursor(3, [1, 1], [4, 4], quarantined), MixedTaskCursor(3, [1, 1], [4, 4])
    bad = before.pick_task(9)
    entry, given = split_seed(bad, 2)
    quarantined[bad] = 21
    tasks = [cursor.pick_task(group) for group in range(80)]
    assert tasks[:21] == [before.pick_task(group) for group in range(21)]
    assert bad in tasks[:21]
    assert bad not in tasks[21:]
    assert join_seed(1 - entry, given) in tasks[21:]
    assert {split_seed(task, 2)[0] for task in tasks[21:]} == {0, 1}
    quarantined |= {join_seed(entry, task): 21 for task in range(4)}
    with pytest.raises(ValueError, match="all 4 tasks of the environment are quarantined"):
        [cursor.pick_task(group) for group in range(21, 23)]


TOML = """
extends = "quickstart"
steps = 3

[[env]]
name = "reverse-text"
weight = 3
args = { letters = 5 }

[[env]]
label = "small"
name = "guess"
args = { highest = 16 }
max_turns = 2
max_new_tokens = 4
"""


@pytest.fixture
def mixed(tmp_path) -> Config:
    path = tmp_path / "mixed.toml"
    path.write_text(TOML)
    return load_config(str(path))


def test_entries_have_their_own_keys_and_the_run_s_for_the_rest(mixed, tmp_path):
    reverse, small = resolve_envs(mixed)
    assert (reverse.label, reverse.env.name, reverse.weight) == ("reverse-text", "reverse-text", 3.0)
    assert (small.label, small.env.args, small.weight) == ("small", {"highest": 16}, 1.0)
    assert reverse.episode == mixed.episode
    assert (small.episode.max_turns, small.episode.max_new_tokens) == (2, 4)
    assert small.episode.max_total_tokens == mixed.episode.max_total_tokens
    (tmp_path / "config.toml").write_text(config_to_toml(mixed))
    assert resolve_envs(load_config(str(tmp_path / "config.toml"))) == resolve_envs(mixed)
    assert resolve_envs(apply_overrides(mixed, ["env.args.small.weight=9"]))[1].weight == 9.0
    alone = apply_overrides(mixed, ["env.name=guess"])
    assert [(each.label, each.env.name, each.env.args) for each in resolve_envs(alone)] == [("", "guess", {})]


def test_a_file_that_extends_another_has_the_environments_that_it_names_itself(mixed, tmp_path):
    path = tmp_path / "other.toml"
    path.write_text('extends = "mixed.toml"\n[[env]]\nname = "countdown"\n[[env]]\nname = "guess"\n')
    path.write_text(path.read_text().replace("mixed.toml", str(tmp_path / "mixed.toml")))
    assert [each.label for each in resolve_envs(load_config(str(path)))] == ["countdown", "guess"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "env.args.small.max_turnz=3",
            "unknown key `env.args.small.max_turnz`: did you mean `env.args.small.max_turns`",
        ),
        ("env.args.small.weight=0", r"\[env.args.small\] `weight` must be greater than 0"),
        (
            "env.args.small.max_new_tokens=9999",
            r"`env.args.small.max_new_tokens` = 9999 is more than `episode.max_new_tok",
        ),
        ("env.args.small=3", "`env.args.small` is a section"),
        ('env=[{ name = "guess" }, { name = "guess" }]', r"`env\[1\]`: two are called 'guess'"),
        ('env=[{ name = "guess", label = "a.b" }]', r"`env\[0\].label` = 'a.b'"),
        ("env=[{ weight = 2 }]", r"`env\[0\]`: which environment"),
        ("env=[]", "names no environment"),
        ("env.name=mix env.args={}", ""),
        ('env=[{ data = "rows.jsonl", limitz = 3 }]', "unknown key `env.args.rows.limitz`"),
        ('env=[{ data = { path = "rows.jsonl", promt = "q" } }]', "unknown key `data.promt`"),
    ],
)
def test_what_is_wrong_with_an_entry_names_it(mixed, override, says):
    if not says:
        override, says = 'env={ name = "mix" }', "without environments"
        mixed = load_config("quickstart")
    with pytest.raises(ConfigError, match=says):
        apply_overrides(mixed, [override])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("name = 'gess'", r"\[env.args.bad\] `env.name` = 'gess': no such environment; did you mean 'guess'"),
        ("name = 'guess', args = { hihgest = 3 }", r"\[env.args.bad\] `env.args.hihgest`"),
        ("name = 'agent:here:play'", "an agent cannot be one of several"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named_by_its_entry(mixed, entry, says):
    config = apply_overrides(mixed, [f"env=[{{ name = 'guess' }}, {{ label = 'bad', {entry} }}]"])
    with pytest.raises(ConfigError, match=says):
        check_environment(config)


def test_secrets_of_an_entry_are_not_written(mixed):
    config = apply_overrides(mixed, ['env.args.small.args.environment={ KEY = "hidden-text" }'])
    assert "hidden-text" not in config_to_toml(config)
    assert "KEY" in config_to_toml(config)


async def test_a_task_s_seed_says_which_environment_poses_it(mixed):
    factory = build_environment_factory(mixed.env)
    reverse, small = (build_environment_factory(each.env) for each in resolve_envs(mixed))
    for entry, alone in ((0, reverse), (1, small), (0, reverse)):
        one, two = factory(), alone()
        assert await one.reset(join_seed(entry, 12344)) == await two.reset(12344)
        assert one.oracle() == two.oracle()
        assert await one.step(Action(one.oracle())) == await two.step(Action(two.oracle()))
    assert await count_tasks_by_part(factory) == (None, None)
    await try_environments(mixed)
    again = factory()
    for entry, alone in ((1, small), (0, reverse), (1, small)):
        assert await again.reset(join_seed(entry, 12344)) == await alone().reset(12344), "it plays several episodes"


async def test_the_environment_that_another_episode_does_not_play_is_closed():
    closed = []

    class One:
        def __init__(self, name):
            self.name = name

        async def reset(self, task_seed):
            return [Message("user", self.name)]

        async def close(self):
            closed.append(self.name)

    environment = MixedEnvironment([lambda: One("a"), lambda: One("b")])
    for entry, told in ((0, []), (1, ["a"]), (1, ["a"]), (0, ["a", "b"])):
        (message,) = await environment.reset(join_seed(entry, 1))
        assert (message.content, closed) == ("ab"[entry], told)


async def test_rows_of_several_files_are_noted_and_evaluated_each_by_its_label(mixed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("sums", 20), ("words", 10)):
        rows = [f'{{"prompt": "{name} {i}", "answer": "{i}"}}\n' for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    entries = '{ data = { path = "sums.jsonl", eval = 5 }, reward = "number", weight = 2 }, { data = "words.jsonl" }'
    config = apply_overrides(mixed, [f"env=[{entries}, {{ name = 'guess' }}]", "evaluation.every_steps=1"])
    said: list[str] = []
    noted = add_row_digests(config, said.append)
    assert [each.label for each in resolve_envs(noted)] == ["guess", "sums", "words"]
    assert said[:2] == ["sums: 15 rows are trained, 0 dropped", "sums: 5 rows are evaluated, 0 dropped"]
    assert [bool(each.env.args.get("digest")) for each in resolve_envs(noted)] == [False, True, True]
    assert await count_tasks_by_part(build_environment_factory(noted.env)) == (None, 15, 10)
    (tmp_path / "words.jsonl").write_text('{"prompt": "other", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"env.args.words.*rows are not those that the run began with"):
        build_environment_factory(noted.env)
    assert add_default_evaluation_sets(config).evaluation.resolve_sets()["sums"].env.args["part"] == "eval"
    with pytest.raises(ConfigError, match="trains on all of them"):  # none of words.jsonl is left
        check_environment(config)
    check_environment(apply_overrides(config, ["evaluation.every_steps=0"]))


def test_what_is_named_to_be_evaluated_is(mixed):
    assert list(add_default_evaluation_sets(mixed).evaluation.sets) == ["reverse-text", "small"]
    named = apply_overrides(mixed, ["evaluation.env.name=countdown"])
    assert add_default_evaluation_sets(named) is named
    alone = load_config("quickstart")
    assert add_default_evaluation_sets(alone) is alone


def episode(entry: int, group: int, reward: float, tokens: int, **told: float) -> Trajectory:
    name = f"g{group:08d}e0000"
    samples = [Sample(f"{name}/0", TokenTable.from_tokens(range(tokens)))]
    turns = [Turn(0, 0, 0, tokens, reward, "stop")]
    return Trajectory(name, group, 0, join_seed(entry, group), "", "env_done", turns, samples, metrics=told)


def test_each_environment_has_metrics_by_its_label():
    episodes = [episode(0, 0, 1.0, 10), episode(0, 1, 0.0, 20), episode(1, 2, 0.5, 4, moves=3.0)]
    row = compute_environment_metrics(episodes, ["reverse-text", "small"])
    assert row["env/reverse-text/reward_mean"] == 0.5
    assert row["env/reverse-text/response_length_mean"] == 15
    assert row["env/reverse-text/episodes"] == 2
    assert row["env/small/reward_mean"] == 0.5
    assert row["env/small/moves/mean"] == 3.0
    assert "env/reverse-text/moves/mean" not in row
    assert not compute_environment_metrics(episodes, [""])
    assert not any("small" in name for name in compute_environment_metrics(episodes[:2], ["reverse-text", "small"]))
    for name in row:
        known = find_metric(name)
        assert known.description.startswith("Of the environment ")
        assert known.label.partition(": ")[0] in ("reverse-text", "small")
    assert find_metric("env/small/reward_mean").label == "small: reward"
    assert find_metric("env/small/rewards/brief/mean").label == "small: brief mean"
    assert find_metric("env/small/epochs").description.endswith(find_metric("data/epochs").description)


def test_labels_are_in_one_order_however_the_file_has_them(mixed):
    assert all(one < two for one, two in pairwise([each.label for each in resolve_envs(mixed)]))
