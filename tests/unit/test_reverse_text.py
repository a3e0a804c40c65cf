"""The game: equal seeds pose equal tasks, and the reward is the fraction of right positions, the end included."""

import pytest

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action
from r3async.envs.builtin import ReverseText, score_positions
from r3async.envs.factory import build_environment_factory


@pytest.mark.parametrize(
    ("answer", "stop", "reward"),
    [
        ("dcba", "stop", 1.0),
        ("dcba", "length", 0.8),  # right letters, but it did not end
        ("dcbax", "stop", 0.8),
        ("dcb", "stop", 0.6),
        ("", "stop", 0.0),
        ("abcd", "stop", 0.2),  # only the end is right
        ("dxbx", "stop", 0.6),
    ],
)
def test_reward_is_the_fraction_of_right_positions(answer, stop, reward):
    assert score_positions(Action(answer, stop), "dcba") == pytest.approx(reward)


async def test_the_oracle_earns_one_in_all_in_equal_shares_and_the_episode_ends():
    env = ReverseText(letters=5, turns=3)
    messages, rewards, done = await env.reset(7), [], False
    while not done:
        assert len(messages[0].content) == 5
        result = await env.step(Action(env.oracle()))
        rewards.append(result.reward)
        messages, done = result.messages, result.done
    assert rewards == [1 / 3] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvConfig(name="reverse-txt"), "did you mean 'reverse-text'"),
        (EnvConfig(args={"leters": 3}), "letters"),
        (EnvConfig(args={"letters": 0}), "at least 1"),
        (EnvConfig(name="no_such_module:Thing"), "cannot be loaded"),
    ],
)
def test_a_wrong_environment_is_refused_with_the_fix(config, message):
    with pytest.raises(ConfigError, match=message):
        build_environment_factory(config)
