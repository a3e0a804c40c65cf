"""`dataset:PATH`: rows become tasks, and a row that does not fit is named by its line."""

import json

import pytest

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, EnvironmentFailed, Message
from r3async.envs.factory import build_environment_factory
from tests.helpers.rewards import mean_reward


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "tasks.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return path

    return write


def factory(path, /, **args):
    settings = {name: args.pop(name) for name in ("workers", "step_timeout") if name in args}
    return build_environment_factory(EnvConfig(name=f"dataset:{path}", args=args, **settings))


SUMS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]


async def test_a_seed_chooses_a_row_and_its_answer_pays(write):
    make = factory(write(*SUMS[:10], "", *SUMS[10:]))
    assert await mean_reward(make, "oracle", 50) == 1.0
    prompts = {seed: (await make().reset(seed))[0].content for seed in range(60)}
    assert prompts == {seed: (await make().reset(seed))[0].content for seed in range(60)}
    assert len(set(prompts.values())) > 10
    env = make()
    await env.reset(1)
    result = await env.step(Action("no"))
    assert (result.reward, result.done) == (0.0, True)


async def test_episodes_that_play_at_once_do_not_share_their_row(write):
    make = factory(write(*SUMS))
    one, two = make(), make()
    first = await one.reset(1)
    seed = 2
    while await two.reset(seed) == first:
        seed += 1
    assert (await one.step(Action(str(int(first[0].content[:-3]) + 1)))).reward == 1.0


async def test_fields_and_a_system_message_are_named_by_the_arguments(write):
    make = factory(write({"q": "six?", "a": 6}), prompt="q", answer="a", system="be brief")
    env = make()
    assert await env.reset(1) == [Message("system", "be brief"), Message("user", "six?")]
    assert (await env.step(Action(" 6\n"))).reward == 1.0


@pytest.mark.parametrize(
    ("reward", "answer", "want", "paid"),
    [
        ("exact", " yes ", "yes", 1.0),
        ("exact", "yes!", "yes", 0.0),
        ("contains", "oh yes!", "yes", 1.0),
        ("contains", "no", "yes", 0.0),
        ("number", "3 and 4 make 1,007.0.", "1007", 1.0),
        ("number", "1007 or 8", "1007", 0.0),
        ("number", "-2", 2, 0.0),
        ("number", "none", 2, 0.0),
    ],
)
async def test_the_built_in_rewards(write, reward, answer, want, paid):
    env = factory(write({"prompt": "?", "answer": want}), reward=reward)()
    await env.reset(1)
    assert (await env.step(Action(answer))).reward == paid


async def test_a_function_of_ones_own_sees_the_whole_row_and_may_not_hang(write):
    path = write({"prompt": "?", "solution": "x"})
    make = factory(path, reward="tests.helpers.envs:half_for_trying", workers=1, step_timeout=2.0)
    paid = []
    for answer in ("x", "y"):
        env = make()
        assert await env.reset(1) == [Message("user", "?")]
        paid.append((await env.step(Action(answer))).reward)
    assert paid == [1.0, 0.5]
    env = make()
    await env.reset(1)
    with pytest.raises(EnvironmentFailed, match=r"env\.step_timeout = 2 s"):
        await env.step(Action("hang"))
    env._make_worker()._pool.close()


async def test_an_async_function_is_awaited(write):
    env = factory(write({"prompt": "?", "length": 2}), reward="tests.helpers.envs:patient_reward")()
    await env.reset(1)
    assert (await env.step(Action("ab"))).reward == 1.0


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        ([SUMS[0], '{"prompt": "a"'], {}, r"tasks\.jsonl, line 2: not JSON"),
        ([SUMS[0], "", "[1]"], {}, r"line 3: a row must be an object"),
        (
            [SUMS[0], {"prompt": "a", "answr": "b"}],
            {},
            r"line 2: no answer, which reward 'exact' asks for; its fields: prompt, answr\. .*`data\.answer`",
        ),
        (
            [{"prompt": "a", "answr": "b"}],
            {"answer": "answer"},
            r"line 1: no field 'answer'; did you mean 'answr'\?.*`data\.answer`",
        ),
        ([{"q": "a", "answer": "b"}], {}, r"line 1: no field 'prompt'.*`data\.prompt`"),
        ([{"prompt": 3, "answer": "b"}], {}, r"line 1: field 'prompt' must be a text or chat messages, not 3"),
        (
            [{"prompt": "a", "answer": ["b"]}],
            {},
            r"line 1: the answer must be a text or a number for `exact`, not \['b'\]",
        ),
        ([{"prompt": "a", "answer": "b"}], {"reward": "number"}, r"line 1: `number` finds no number in the answer 'b'"),
        ([""], {}, "has no rows"),
        (SUMS, {"reward": "exakt"}, "did you mean 'exact'"),
        (SUMS, {"reward": "tests.helpers.envs:nothing"}, r"`reward` = .* cannot be loaded"),
        (SUMS, {"reward": "tests.helpers.envs:three_arguments"}, r"must take \(completion, answer\), or"),
        (SUMS, {"promt": "q"}, r"unknown key `data\.promt`: did you mean `data\.prompt`"),
        (SUMS, {"path": "elsewhere"}, r"`env\.args\.path`"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line_and_the_fix(write, rows, args, message):
    with pytest.raises(ConfigError, match=message):
        factory(write(*rows), **args)


def test_a_file_that_is_not_there_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/none.jsonl"):
        factory("none.jsonl")
    (tmp_path / "none.jsonl").write_text(json.dumps(SUMS[0]))
    factory("none.jsonl")
