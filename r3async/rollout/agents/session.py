"""One episode that somebody else plays: whole requests come in, in any order; samples come out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from r3async.config import EpisodeConfig
from r3async.data.records import Trajectory
from r3async.data.routes import RoutingError
from r3async.envs import MAX_REWARD, OPENED_THOUGHT, Message
from r3async.rollout.agents.protocol import (
    Asked,
    MessageReader,
    Refused,
    Sampled,
    SpokenMessages,
    read_messages,
)
from r3async.rollout.agents.rendering import rendering
from r3async.rollout.agents.tool_parsers import Parse, builtin
from r3async.rollout.chat import ChatRenderer, Conversation, Piece, Prompt, TemplateError, TextTooLong
from r3async.rollout.engines import Engine, EngineError, Generation
from r3async.rollout.episode import EngineCalls, EpisodeError, EpisodeTask, answer_capacity
from r3async.rollout.samples import EngineCall, EpisodeSamples, PrefixBroken
from r3async.untrusted import finite_number, shown_value, whole_number
from r3async.world.real import REAL

_TOKENIZER = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
"""One: a tokenizer is not for several threads at once, and a second one would only take turns with the first."""

PLAIN = Asked(())
"""Without tools, limits or anything else."""
P = ParamSpec("P")
R = TypeVar("R")


async def in_tokenizer(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What `work` returns or raises, called in the thread that tokenises."""
    return await asyncio.get_running_loop().run_in_executor(_TOKENIZER, functools.partial(work, *args, **kwargs))


REWARD_CALL = 'POST /v1/r3async/reward {"reward": 1.0}'


class _Talk(msgspec.Struct, eq=False):
    """A conversation with the agent. `asked`: its messages, as the agent sent them. `renderer`: with the variables that it asked
    for. `answer`: the last one, in the policy's own words, once a request may continue it; None while it is in flight, and
    after it failed."""

    renderer: ChatRenderer
    conversation: Conversation
    tools: Sequence[Mapping[str, Any]]
    asked: Sequence[Message]
    answer: Message | None = None


class Session:
    """Everything that one key caused.

    A request is a whole conversation. What it repeats of earlier answers keeps the tokens that were sampled; what extends a
    recorded sample continues it, and everything else branches (`EpisodeSamples`). An answer is of the episode once somebody has
    it: one that nobody could be given is no turn of it, and its prompt may be asked again. Requests may overlap. `key`
    authenticates requests for this episode. Belongs to one event loop.
    """

    def __init__(
        self,
        task: EpisodeTask,
        engine: Engine,
        renderer: ChatRenderer,
        settings: EpisodeConfig,
        *,
        generator_id: str = "",
        unrewarded: float | None = None,
        parse: Parse = builtin,
        clock: Callable[[], float] = REAL.clock.time,
        report: Callable[..., object] = lambda event, **fields: None,
    ):
        self.key = f"r3-{secrets.token_urlsafe(32)}"
        self.task, self.settings, self.renderer = task, settings, renderer
        self.closed = asyncio.Event()
        """The agent ended it, or the episode was taken from it. No request is answered any more."""
        self.limit = ""
        """Why a request was refused, if one was for good: `turns` or `length`."""
        self.failure: Exception | None = None
        """What the engine failed with, too often."""
        self.remembered: dict[str, Sequence[Mapping[str, Any]]] = {}
        """Conversations that a request may go on from by the id of their last answer."""
        self._generator_id, self._clock, self._report = generator_id, clock, report
        self._unrewarded, self._parse = unrewarded, parse
        self._samples = EpisodeSamples(engine.routing, settings.rows, settings.keeps_mask)
        name = task.trajectory_id
        self._engine = EngineCalls(name, engine, settings, renderer.stop_token_ids, report)
        self._talks: list[_Talk] = []
        """Of the tokenizer's thread. The one that was answered last is the last."""
        self._answers: dict[str, list[Piece]] = {}
        self._reader = MessageReader()
        self._spoken = SpokenMessages()
        self._texts: list[tuple[str, list[int]]] = []
        """What was completed, prompt and answer together, without its stop token."""
        self._calls: set[asyncio.Task[Any]] = set()
        self._unanswered = 0
        """Requests whose answers nobody has yet."""
        self._numbers = itertools.count()
        self._turns: dict[str, int] = {}
        """Of answers that somebody has, by their names."""
        self._reward: float | None = None
        self._turn_rewards: dict[int, float] = {}
        self._preview: list[dict[str, str]] = []
        self._started = clock()

    @property
    def turns(self) -> int:
        """Answers so far."""
        return self._samples.turns

    # -- requests ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def chat(
        self, messages: Sequence[Message], asked: Asked = PLAIN
    ) -> AsyncIterator[tuple[Sampled, dict[str, Any]]]:
        """The answer to the `messages` that `read` made of those of `asked`, and the message that it is handed out as, which has
        to happen within the block (`_answer`). Raises `Refused`. Cancelling it aborts the request."""
        try:
            # Rendering and tokenising take a second a MiB: off the event loop, which others wait for too.
            talk, prompt = await in_tokenizer(self._conversation, messages, asked.tools, asked.template_args)
        except TextTooLong as error:
            raise self._too_long(f"{error.characters} characters") from error
        async with self._answer(prompt, asked.limit, asked.stop) as sampled:
            content, calls = await self._parsed(sampled.text, asked, prompt.thinking)
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            yield sampled, message
        self._spoken.add(sampled.own_words, Message("assistant", content, tool_calls=_with_objects(calls)))
        self._show(messages[-1].role, messages[-1].content, sampled.own_words)
        # The next request waits for it in that thread, also where this one is cancelled now.
        await asyncio.shield(in_tokenizer(self._answered, talk, sampled))

    async def _parsed(self, text: str, asked: Asked, thinking: bool) -> tuple[str, list[dict[str, Any]]]:
        # Its prompt wrote the tag, and a parser has to see that a thought has begun.
        opened = OPENED_THOUGHT if thinking else ""
        try:
            content, calls = await self._parse(opened + text, asked.tools)
        except (EngineError, TimeoutError) as error:
            self.failure = error
            raise Refused(f"the engine failed: {error!r}", status=500, kind="server_error") from error
        if self.closed.is_set():
            raise closed_refusal()
        return content.removeprefix(opened), calls[:1] if asked.one_call else calls

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Those of a request; see `read_messages`."""
        return self._reader.read(messages)

    async def count(self, asked: Asked) -> int:
        """Tokens of a prompt, as if nothing of it had been said here. Raises `Refused`."""
        messages = read_messages(asked.messages)

        def counted() -> int:
            renderer = rendering(self.renderer, asked.template_args)
            text = renderer.render(messages, asked.tools)
            renderer.check_length(len(text), self.settings.max_prompt_tokens)
            return len(renderer.encode(text))

        try:
            return await in_tokenizer(counted)
        except TextTooLong as error:
            raise self._exceeds(f"{error.characters} characters") from error
        except TemplateError as error:
            raise Refused(str(error), param="messages") from error

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
    ) -> tuple[_Talk, Prompt]:
        """In the tokenizer's thread."""
        renderer = rendering(self.renderer, template_args)
        talk = self._continued(messages, tools, renderer)
        if talk is not None:
            talk.answer = None
            talk.conversation.observe([self._spoken.restored(m) for m in messages[len(talk.asked) + 1 :]])
            with contextlib.suppress(TemplateError):
                prompt = talk.conversation.prompt()
                talk.asked = messages
                return talk, prompt
        own_words = [self._spoken.restored(message) for message in messages]
        try:
            return self._begin(messages, own_words, tools, renderer)
        except TemplateError as error:
            # Some templates insist on seeing the call before its result.
            if own_words == list(messages):
                raise Refused(str(error), param="messages") from error
        try:
            return self._begin(messages, messages, tools, renderer)
        except TemplateError as error:
            raise Refused(str(error), param="messages") from error

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], renderer: ChatRenderer
    ) -> _Talk | None:
        """The conversation that these messages repeat with its answer, and go on with."""
        for talk in reversed(self._talks):
            known = len(talk.asked)
            if (
                talk.answer is not None
                and known < len(messages)
                and talk.asked[-1] == messages[known - 1]
                and talk.asked == messages[:known]
                and talk.answer == self._spoken.restored(messages[known])
                and talk.tools == tools
                and talk.renderer is renderer
            ):
                return talk
        return None

    def _begin(
        self,
        asked: Sequence[Message],
        shown: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        renderer: ChatRenderer,
    ) -> tuple[_Talk, Prompt]:
        """The agent `asked` this, and the template is `shown` that."""
        most = self.settings.max_prompt_tokens
        conversation = Conversation(renderer, shown, tools, most, self._answers)
        conversation.begin_like([talk.conversation for talk in self._talks])
        return _Talk(renderer, conversation, tools, asked), conversation.prompt()

    def _answered(self, talk: _Talk, sampled: Sampled) -> None:
        """In the tokenizer's thread. The answer may be continued if the template is shown it in the policy's own words."""
        text = talk.conversation.answered(sampled.token_ids, turn=self.turn_of(sampled.name))
        talk.answer = Message("assistant", text)
        self._talks = [*(other for other in self._talks if other is not talk), talk]

    @contextlib.asynccontextmanager
    async def complete(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> AsyncIterator[Sampled]:
        """Continue a text, or token ids; what is sampled has to be handed out within the block. What a text repeats from its
        beginning, with its answer, keeps its tokens."""
        most = self.settings.max_prompt_tokens
        if isinstance(prompt, str):
            by_length = sorted(self._texts, key=lambda known: len(known[0]), reverse=True)
            text, ids = next((known for known in by_length if prompt.startswith(known[0])), ("", []))
            try:
                self.renderer.check_length(len(prompt), most)
            except TextTooLong as error:
                raise self._too_long(f"{error.characters} characters") from error
            ids = [*ids, *await in_tokenizer(self.renderer.encode, prompt[len(text) :])]
        else:
            if len(prompt) > most:
                raise self._too_long(f"{len(prompt)} tokens")
            ids = list(prompt)
        if not ids or min(ids) < 0 or max(ids) >= len(self.renderer.tokenizer):
            raise Refused(f"the prompt must be text or ids of 0..{len(self.renderer.tokenizer) - 1}", param="prompt")
        if not isinstance(prompt, str):
            prompt = self.renderer.decode(ids)
        async with self._answer(Prompt(np.asarray(ids, np.int32)), max_tokens, stop) as sampled:
            yield sampled
        ended = sampled.token_ids[-1] in self.renderer.stop_token_ids
        spoken = sampled.token_ids[:-1] if ended else sampled.token_ids
        self._texts.append((prompt + sampled.own_words, [*ids, *spoken]))
        self._show("user", prompt, sampled.own_words)

    def _show(self, role: str, content: str, answer: str) -> None:
        if self.task.episode_index == 0:
            self._preview += [{"role": role, "content": content}, {"role": "assistant", "content": answer}]

    @contextlib.asynccontextmanager
    async def _answer(self, prompt: Prompt, max_tokens: int | None, stop: Sequence[str]) -> AsyncIterator[Sampled]:
        """An answer, to be handed out within the block. Whoever leaves that by an exception has nobody to give it to: then the
        episode is as if nothing had been asked."""
        capacity = self._capacity(len(prompt.token_ids), max_tokens)
        try:
            call = self._samples.begin(prompt.token_ids, prompt.turn, prompt.shared)
        except PrefixBroken as error:
            raise Refused(str(error), code="prefix_broken") from error
        self._unanswered += 1
        sampled = None
        try:
            generation = await self._generated(call, capacity, stop)
            sampled = self._sampled(len(prompt.token_ids), generation, stop)
            yield sampled
        except BaseException as error:
            self._samples.cancel(call)
            if sampled is not None and not isinstance(error, Refused) and not self.closed.is_set():
                self._report("answer_undelivered", episode=self.task.trajectory_id, tokens=len(sampled.token_ids))
            raise
        finally:
            self._unanswered -= 1
        try:
            self._turns[sampled.name] = self._samples.end(call, generation)
        except RoutingError as error:
            self.failure = error  # whoever asked has his answer, and cannot be told any more

    async def _generated(self, call: EngineCall, capacity: int, stop: Sequence[str]) -> Generation:
        asking = asyncio.ensure_future(self._engine.answer(call, capacity, stop))
        self._calls.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            if self.closed.is_set():
                raise closed_refusal() from None
            raise
        except Exception as error:
            self.failure = error
            raise Refused(f"the engine failed: {error}", status=500, kind="server_error") from error
        finally:
            self._calls.discard(asking)

    def _sampled(self, prompt_tokens: int, generation: Generation, stop: Sequence[str]) -> Sampled:
        ids = generation.token_ids.tolist()
        text = self.renderer.text(ids)
        places = sorted((text.find(one), one) for one in stop if one in text)
        return Sampled(
            name=f"{self.task.trajectory_id}-{next(self._numbers)}",
            prompt_tokens=prompt_tokens,
            token_ids=ids,
            logprobs=generation.logprobs,
            own_words=text,
            finish=generation.stop_reason,
            stop=places[0][1] if places else "",
        )

    def _capacity(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens that may be sampled. Raises `Refused` where there is no capacity, or no turn, left."""
        if self.closed.is_set():
            raise closed_refusal()
        if max_tokens is not None and max_tokens < 1:
            raise Refused(f"max_tokens = {max_tokens} must be at least 1", param="max_tokens")
        settings = self.settings
        if self.turns + self._unanswered >= settings.max_turns:
            self.limit = "turns"
            raise Refused(
                f"this episode has had its episode.max_turns = {settings.max_turns} answers", code="max_turns_exceeded"
            )
        capacity = answer_capacity(prompt_tokens, settings)
        if not capacity:
            raise self._too_long(f"{prompt_tokens} tokens")
        return capacity if max_tokens is None else min(capacity, max_tokens)

    def _too_long(self, what: str) -> Refused:
        self.limit = "length"
        return self._exceeds(what)

    def _exceeds(self, what: str) -> Refused:
        most = min(self.settings.max_prompt_tokens, self.settings.max_total_tokens - 1)
        return Refused(
            f"This model's maximum context length is {most} tokens of prompt (episode.max_prompt_tokens, "
            f"episode.max_total_tokens). However, your messages resulted in {what}.",
            code="context_length_exceeded",
            param="messages",
        )

    # -- what it was worth ---------------------------------------------------------------------------------------

    def reward(self, reward: float, turn: int | None = None) -> None:
        """What the episode earned in the end, or what the answer `turn` earned. They add up; saying either again replaces it.

        What the episode earned is credited at its last answer. Raises `ValueError` for a reward that is not a finite number, for
        rewards that are beyond `MAX_REWARD` together, and for a turn that there is not.
        """
        try:
            if isinstance(reward, bool):
                raise TypeError(f"must be a finite number, not {reward}")
            earned = finite_number(reward, MAX_REWARD)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a reward {error}") from error
        try:
            turn = None if turn is None else whole_number(turn, 0, self.turns - 1)
        except ValueError as error:
            raise ValueError(
                f"there is no turn {shown_value(turn)}: the episode has {self.turns} so far, counted from 0"
            ) from error
        whole, by_turn = (earned, {}) if turn is None else (self._reward or 0.0, {turn: earned})
        if (total := abs(whole) + sum(map(abs, {**self._turn_rewards, **by_turn}.values()))) > MAX_REWARD:
            raise ValueError(f"a reward of {earned:g} makes {total:g} together, and {MAX_REWARD:g} is the most")
        if turn is None:
            self._reward = earned
        else:
            self._turn_rewards[turn] = earned

    @property
    def rewarded(self) -> bool:
        return self._reward is not None or bool(self._turn_rewards)

    @property
    def worth_known(self) -> bool:
        """Whether there is a reward, or `serving.unrewarded` stands for it."""
        return self.rewarded or self._unrewarded is not None

    @property
    def total_reward(self) -> float:
        return (self._reward or 0.0) + sum(self._turn_rewards.values())

    def turn_of(self, name: str) -> int:
        """Of the answer of that name (`Sampled`); -1 if nobody was given one."""
        return self._turns.get(name, -1)

    def close(self) -> None:
        """Answer nothing more; running requests are aborted."""
        self.closed.set()
        for call in self._calls:
            call.cancel()

    def trajectory(self, stop_reason: str) -> Trajectory:
        """What was played, once it is closed; to be taken once. Raises `EpisodeError` if nothing was, or nobody rewarded it.

        If time ran out (`timeout`) before the episode was rewarded as a whole, answers after the last one that has a reward of
        its own are left out: nobody knows what they are worth.
        """
        name, turns = self.task.trajectory_id, self.turns
        if not turns:
            raise EpisodeError(
                f"the agent of episode {name} got no answer from the model: it made no request that was served"
            )
        reward = self._reward
        if not self.rewarded:
            reward = self._unrewarded
            if reward is None:
                refused = f" (its last request was refused: {self.limit})" if self.limit else ""
                raise EpisodeError(
                    f"the agent of episode {name} gave no reward{refused}: return it from play(), print it in the last line as "
                    f'{{"reward": 1.0}}, or call {REWARD_CALL}; or set serving.unrewarded to what such an episode is worth'
                )
        for turn, value in self._turn_rewards.items():
            self._samples.reward(turn, value)
        if reward is not None:
            self._samples.reward(turns - 1, reward)
        elif stop_reason == "timeout":
            turns = max(self._turn_rewards) + 1
        samples, described = self._samples.build(name, self.settings.temperature, turns)
        return self.task.trajectory(
            generator_id=self._generator_id,
            stop_reason=stop_reason,
            turns=described,
            samples=samples,
            started_at=self._started,
            finished_at=self._clock(),
            preview=self._preview,
        )


def closed_refusal() -> Refused:
    return Refused(
        "Incorrect API key provided: there is no episode of this key, or it has ended",
        status=401,
        code="invalid_api_key",
        kind="authentication_error",
    )


def _with_objects(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls as `read_messages` will read them when they come back."""
    return read_messages([{"role": "assistant", "tool_calls": list(calls)}])[0].tool_calls
