"""The episode loop: what is recorded is what the engine saw."""

import asyncio

import pytest

from r3async.config import ConfigError, EpisodeConfig, load_config
from r3async.envs import Action, EnvironmentProtocolError, Message, StepResult
from r3async.envs.builtin import ReverseText
from r3async.rollout.episode import EpisodeError, EpisodePlayer, PromptTooLongError
from r3async.rollout.play_context import PlayContext
from r3async.tools.preflight import try_environments
from tests.helpers.playing import make_player, play_lease
from tests.helpers.serving import TASK, answer_ids, ready, renderer
from tests.helpers.world import Reports


def limits(**changes):
    return EpisodeConfig(
        **{"max_turns": 3, "max_new_tokens": 8, "max_prompt_tokens": 64, "max_total_tokens": 128} | changes
    )


SETTINGS = limits()


@pytest.fixture(scope="module")
def chat():
    return renderer()


async def play(chat, engine, settings=SETTINGS, env=None):
    return await EpisodePlayer(
        TASK, env or ReverseText(4, 3), settings, PlayContext(engine, chat, generator_id="g")
    ).play_episode()


class Talker:
    """Two turns; the user says `words`."""

    def __init__(self, words="hi"):
        self.words, self.turn = words, 0

    async def reset(self, task_seed):
        return [Message("user", self.words)]

    async def step(self, action):
        self.turn += 1
        return StepResult(float(self.turn), [Message("user", self.words)], done=self.turn == 2)


class Growing(Talker):
    """Hands out one list, to which it appends."""

    def __init__(self, answers=False, rewrites=False):
        super().__init__()
        self.said, self.answers, self.rewrites = [], answers, rewrites

    async def reset(self, task_seed):
        self.said.append(Message("user", "hi"))
        return self.said

    async def step(self, action):
        self.turn += 1
        self.said += [Message("assistant", action.text)] * self.answers + [Message("user", "and?")]
        return StepResult(1.0, self.said, done=self.turn == 3, rewrites=self.rewrites)


@pytest.mark.parametrize("answers", [False, True])
async def test_an_environment_that_tells_all_messages_again_is_refused(chat, answers):
    engine = await ready(answer_ids(chat, "a") * 3)
    with pytest.raises(
        EnvironmentProtocolError, match=r"the 1 messages of the call before again.*return only what is new"
    ):
        await play(chat, engine, env=Growing(answers))


async def test_such_an_environment_is_refused_before_anything_starts():
    config = load_config("quickstart", ["env.name=tests.unit.test_episodes:Growing", "env.args={answers = true}"])
    with pytest.raises(ConfigError, match=r"failed in its first episode: .*return only what is new"):
        await try_environments(config)


async def test_an_environment_may_tell_all_messages_again_to_rewrite_them_and_the_same_words_twice(chat):
    for env in (Growing(answers=True, rewrites=True), Talker()):
        assert (await play(chat, await ready(answer_ids(chat, "a") * 3), env=env)).stop_reason == "env_done"


async def test_sampled_tokens_are_kept_as_they_are_and_only_they_are_trained(chat):
    answers = answer_ids(chat, "dcba", "xy", "q")
    trajectory = await play(chat, await ready(answers))
    table = trajectory.samples[0].table
    assert trajectory.stop_reason == "env_done"
    assert table["token_ids"][table["loss_mask"]].tolist() == [t for a in answers for t in a]
    for turn, answer in zip(trajectory.turns, answers, strict=True):
        rows = slice(turn.start, turn.stop)
        assert table["token_ids"][rows].tolist() == answer
        assert set(table["turn"][rows].tolist()) == {turn.index}
        assert table["rewards"][turn.stop - 1] == pytest.approx(turn.reward)
    assert table["rewards"].sum() == pytest.approx(sum(t.reward for t in trajectory.turns))
    observed = ~table["loss_mask"]
    assert (table["policy_version"][~observed] == 5).all()
    assert (table["turn"][observed] == -1).all()


async def test_the_budget_of_a_turn_respects_the_context_left(chat):
    settings = limits(max_turns=9, max_prompt_tokens=10, max_total_tokens=22)
    engine = await ready(answer_ids(chat, "abcdefghij", end=False))
    trajectory = await play(chat, engine, settings, ReverseText(4, 9))
    assert [call.max_tokens for call in engine.requests] == [8, *(22 - len(c.prompt_ids) for c in engine.requests[1:])]
    assert {trajectory.stop_reason, *(turn.stop_reason for turn in trajectory.turns)} == {"length"}
    assert len(trajectory.samples[0].table) <= 22


async def test_a_first_prompt_that_is_too_long_is_an_error_that_names_the_setting(chat):
    engine = await ready(answer_ids(chat, "a"))
    with pytest.raises(PromptTooLongError, match=r"episode\.max_prompt_tokens = 64"):
        await play(chat, engine, env=Talker("x" * 100))
    assert engine.requests == []


async def test_turns_run_out(chat):
    trajectory = await play(chat, await ready(answer_ids(chat, "a")), limits(max_turns=2))
    assert trajectory.stop_reason == "turns"
    assert len(trajectory.turns) == 2
    assert trajectory.samples[0].table["loss_mask"][-1]  # nothing dangles after the last answer


async def test_an_engine_without_routes_gives_samples_without_route_columns(chat):
    trajectory = await play(chat, await ready(answer_ids(chat, "a"), routing=None))
    assert "routed_experts" not in trajectory.samples[0].table


async def test_a_slow_episode_times_out_with_the_setting(chat):
    async def never():
        await asyncio.sleep(30)

    settings = limits(timeout=0.05)
    with pytest.raises(EpisodeError, match=r"episode\.timeout"):
        await play(chat, await ready(answer_ids(chat, "a"), before_token=never), settings)


class Greedy(Talker):
    async def step(self, action: Action):
        return StepResult(float("inf"), done=True)


async def test_an_environment_that_always_fails_stops_the_group_with_the_cause(chat):
    engine = await ready(answer_ids(chat, "a"))
    with pytest.raises(ExceptionGroup) as caught:
        await play_lease(make_player(Greedy, engine, chat, SETTINGS, []), 4, 9, (0,))
    assert "a reward must be a finite number, not inf" in str(caught.value.exceptions[0])
    assert "episode.retries = 2" in str(caught.value.exceptions[0])


class Closes(Talker):
    closed = 0

    async def close(self):
        Closes.closed += 1


class ClosesPlainly(Talker):
    def close(self):
        Closes.closed += 1


@pytest.mark.parametrize("kind", [Closes, ClosesPlainly])
@pytest.mark.parametrize("turns", [1, 9])
async def test_an_environment_is_closed_however_the_episode_ends(chat, kind, turns):
    Closes.closed = 0
    engine = await ready(answer_ids(chat, "a"))
    await play(chat, engine, limits(max_turns=turns), kind())
    with pytest.raises(PromptTooLongError):
        await play(chat, engine, limits(max_turns=turns), kind("x" * 100))
    assert Closes.closed == 2


class NeverCloses(Talker):
    """Raises when it is closed, and before that at the turn `fails_at`."""

    def __init__(self, fails_at=0):
        super().__init__()
        self.fails_at = fails_at

    async def step(self, action):
        result = await super().step(action)
        if self.turn == self.fails_at:
            raise ValueError("a wrong step")
        return result

    async def close(self):
        raise RuntimeError("it does not close")


async def test_an_environment_that_does_not_close_costs_no_episode_and_hides_no_error(chat):
    reports = Reports()
    context = PlayContext(await ready(answer_ids(chat, "a", "b", "c")), chat, report_event=reports)
    trajectory = await EpisodePlayer(TASK, NeverCloses(), SETTINGS, context).play_episode()
    assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0]
    ((event, facts),) = reports
    assert event == "environment_close_failed"
    assert facts["environment"].endswith(":NeverCloses")
    assert "it does not close" in facts["error"]
    with pytest.raises(ValueError, match="a wrong step"):
        await EpisodePlayer(TASK, NeverCloses(fails_at=1), SETTINGS, context).play_episode()
    assert len(reports) == 2
