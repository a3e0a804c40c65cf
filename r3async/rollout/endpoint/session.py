"""A session of the endpoint: one episode with its key, its turns, and the parser
of its tool calls."""

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
from r3async.data.routes import RoutingError
from r3async.data.tokens import Trajectory
from r3async.envs import MAX_EPISODE_REWARD, THINK_OPEN_TAG, Message
from r3async.rollout.conversation import Conversation, Prompt, PromptPiece
from r3async.rollout.endpoint.protocol import (
    AgentRequest,
    ApiError,
    MessageParser,
    SampledAnswer,
    SampledTexts,
    parse_messages,
)
from r3async.rollout.endpoint.template_args import apply_template_args
from r3async.rollout.endpoint.tool_parser_choice import ParseToolCalls, parse_builtin
from r3async.rollout.engine import EngineError, Generation
from r3async.rollout.episode import EpisodeError, EpisodeTask, RetryingEngine, answer_capacity
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer, TemplateError, TextTooLongError
from r3async.rollout.samples import EpisodeSamples, PendingCall, PrefixMismatchError
from r3async.untrusted import format_value, to_bounded_int, to_finite_float

_TOKENIZER_THREAD = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
"""Thread of the tokenizer. One, because a tokenizer does not support several threads at once, and a
second tokenizer would only take turns with the first."""

PLAIN_REQUEST = AgentRequest(())
"""A request without tools, limits or other options."""
P = ParamSpec("P")
R = TypeVar("R")


async def run_in_tokenizer(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `work` in the tokenizer's thread, and return its result or raise its exception."""
    return await asyncio.get_running_loop().run_in_executor(
        _TOKENIZER_THREAD, functools.partial(work, *args, **kwargs)
    )


REWARD_CALL_EXAMPLE = 'POST /v1/r3async/reward {"reward": 1.0}'


class _AgentConversation(msgspec.Struct, eq=False):
    """A conversation with the agent.

    Attributes:
        renderer: The renderer with the template variables that the agent requested.
        agent_messages: The messages as the agent sent them.
        last_answer: The last answer as it was sampled, once a request may continue it; None while
            it is in flight, and after it failed.
    """

    renderer: ChatRenderer
    conversation: Conversation
    tools: Sequence[Mapping[str, Any]]
    agent_messages: Sequence[Message]
    last_answer: Message | None = None


class AgentSession:
    """One episode that an agent plays through the endpoint, with the requests that carry its `key`.

    A request is a whole conversation. Earlier answers that it repeats keep their sampled tokens. A
    prompt that extends a recorded sample continues it, and any other prompt branches
    (`EpisodeSamples`). An answer becomes a turn once the agent has it: an answer that could not be
    delivered is no turn, and its prompt may be sent again. Requests may overlap. A session belongs
    to one event loop.
    """

    def __init__(
        self,
        task: EpisodeTask,
        settings: EpisodeConfig,
        context: PlayContext,
        *,
        default_reward: float | None = None,
        parse_tool_calls: ParseToolCalls = parse_builtin,
    ):
        self.key = f"r3-{secrets.token_urlsafe(32)}"
        self.task = task
        self.settings = settings
        self.renderer = context.renderer
        self.closed = asyncio.Event()
        """Event that is set when the agent has ended the episode, or it was taken from the agent.
        No request is answered after that."""
        self.exceeded_limit = ""
        """Limit for which a request was refused for good: `turns` or `length`; "" if none was."""
        self.engine_failure: Exception | None = None
        """Error of the engine after it failed too often; None otherwise."""
        self.stored_conversations: dict[str, Sequence[Mapping[str, Any]]] = {}
        """Conversations that a request may continue, by the id of their last answer."""
        self._context = context
        self._default_reward = default_reward
        self._parse_tool_calls = parse_tool_calls
        self._samples = EpisodeSamples(
            context.engine.routing, settings.rows, settings.truncates_sampling
        )
        self._retrying_engine = RetryingEngine(task.trajectory_id, settings, context)
        self._conversations: list[_AgentConversation] = []
        """Conversations in the order of their last answers. Used by the tokenizer's thread only."""
        self._answer_pieces: dict[str, list[PromptPiece]] = {}
        self._message_parser = MessageParser()
        self._sampled_texts = SampledTexts()
        self._completions: list[tuple[str, list[int]]] = []
        """Text and tokens of each completion, prompt and answer together,
        without the stop token."""
        self._running_calls: set[asyncio.Task[Any]] = set()
        self._pending_count = 0
        """Number of requests whose answers are not delivered yet."""
        self._answer_numbers = itertools.count()
        self._turn_by_answer: dict[str, int] = {}
        """Turn of each delivered answer, by the answer's name."""
        self._episode_reward: float | None = None
        self._turn_rewards: dict[int, float] = {}
        self._preview: list[dict[str, str]] = []
        self._started_at = context.clock()

    @property
    def turn_count(self) -> int:
        """The number of answers so far."""
        return self._samples.turn_count

    # -- requests ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def answer_chat(
        self, messages: Sequence[Message], request: AgentRequest = PLAIN_REQUEST
    ) -> AsyncIterator[tuple[SampledAnswer, dict[str, Any]]]:
        """Answer a chat request, yielding the sampled answer and its message.

        They must be delivered within the block (`_sample_answer`). `messages` are the messages of
        `request` after `parse_messages`. Raises `ApiError`. Cancelling aborts the request.
        """
        try:
            # Rendering and tokenising take a second per MiB, so they run off the event loop.
            talk, prompt = await run_in_tokenizer(
                self._open_conversation, messages, request.tools, request.template_args
            )
        except TextTooLongError as error:
            raise self._refuse_length(f"{error.characters} characters") from error
        async with self._sample_answer(prompt, request.max_tokens, request.stop_strings) as sampled:
            content, calls = await self._parse_answer(sampled.text, request, prompt.opens_thought)
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            yield sampled, message
        self._sampled_texts.add(
            sampled.sampled_text,
            Message("assistant", content, tool_calls=_parse_call_objects(calls)),
        )
        self._add_preview(messages[-1].role, messages[-1].content, sampled.sampled_text)
        # The next request waits for this in the tokenizer's thread, even if this request
        # is cancelled now.
        await asyncio.shield(run_in_tokenizer(self._record_answer, talk, sampled))

    async def _parse_answer(
        self, text: str, request: AgentRequest, opens_thought: bool
    ) -> tuple[str, list[dict[str, Any]]]:
        # The prompt already has the opening tag, but the parser has to see that a
        # thought has begun.
        opened = THINK_OPEN_TAG if opens_thought else ""
        try:
            content, calls = await self._parse_tool_calls(opened + text, request.tools)
        except (EngineError, TimeoutError) as error:
            self.engine_failure = error
            raise ApiError(
                f"the engine failed: {error!r}", status=500, error_type="server_error"
            ) from error
        if self.closed.is_set():
            raise build_closed_error()
        return content.removeprefix(opened), calls[:1] if request.single_tool_call else calls

    def parse_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Parse the messages of a request as `protocol.parse_messages` does, but only
        those that are new."""
        return self._message_parser.parse_messages(messages)

    async def count_prompt_tokens(self, request: AgentRequest) -> int:
        """Return the number of tokens of a prompt, as if none of it had been sampled here.
        Raises `ApiError`."""
        messages = parse_messages(request.messages)

        def counted() -> int:
            renderer = apply_template_args(self.renderer, request.template_args)
            text = renderer.render(messages, request.tools)
            renderer.check_length(len(text), self.settings.max_prompt_tokens)
            return len(renderer.encode(text))

        try:
            return await run_in_tokenizer(counted)
        except TextTooLongError as error:
            raise self._build_length_error(f"{error.characters} characters") from error
        except TemplateError as error:
            raise ApiError(str(error), param="messages") from error

    def _open_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any],
    ) -> tuple[_AgentConversation, Prompt]:
        """Find or begin the conversation of a request and build its prompt. Runs in the
        tokenizer's thread."""
        renderer = apply_template_args(self.renderer, template_args)
        talk = self._find_continued(messages, tools, renderer)
        if talk is not None:
            talk.last_answer = None
            talk.conversation.add_messages(
                [
                    self._sampled_texts.restore_sampled_text(m)
                    for m in messages[len(talk.agent_messages) + 1 :]
                ]
            )
            with contextlib.suppress(TemplateError):
                prompt = talk.conversation.build_prompt()
                talk.agent_messages = messages
                return talk, prompt
        own_words = [self._sampled_texts.restore_sampled_text(message) for message in messages]
        try:
            return self._begin_conversation(messages, own_words, tools, renderer)
        except TemplateError as error:
            # Some templates require the parsed tool call before its result.
            if own_words == list(messages):
                raise ApiError(str(error), param="messages") from error
        try:
            return self._begin_conversation(messages, messages, tools, renderer)
        except TemplateError as error:
            raise ApiError(str(error), param="messages") from error

    def _find_continued(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        renderer: ChatRenderer,
    ) -> _AgentConversation | None:
        """Return the conversation that these messages repeat, with its answer, and continue; None
        if there is none."""
        for talk in reversed(self._conversations):
            known = len(talk.agent_messages)
            if (
                talk.last_answer is not None
                and known < len(messages)
                and talk.agent_messages[-1] == messages[known - 1]
                and talk.agent_messages == messages[:known]
                and talk.last_answer == self._sampled_texts.restore_sampled_text(messages[known])
                and talk.tools == tools
                and talk.renderer is renderer
            ):
                return talk
        return None

    def _begin_conversation(
        self,
        agent_messages: Sequence[Message],
        template_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        renderer: ChatRenderer,
    ) -> tuple[_AgentConversation, Prompt]:
        """Begin a conversation in which the agent sent `agent_messages` and the template gets
        `template_messages`."""
        most = self.settings.max_prompt_tokens
        conversation = Conversation(renderer, template_messages, tools, most, self._answer_pieces)
        conversation.adopt_closest([talk.conversation for talk in self._conversations])
        return _AgentConversation(
            renderer, conversation, tools, agent_messages
        ), conversation.build_prompt()

    def _record_answer(self, conversation: _AgentConversation, sampled: SampledAnswer) -> None:
        """Add the answer to its conversation as it was sampled, so that it can be continued.

        Runs in the tokenizer's thread.
        """
        text = conversation.conversation.add_answer(
            sampled.token_ids, turn=self.find_turn(sampled.answer_name)
        )
        conversation.last_answer = Message("assistant", text)
        self._conversations = [
            *(other for other in self._conversations if other is not conversation),
            conversation,
        ]

    @contextlib.asynccontextmanager
    async def answer_completion(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> AsyncIterator[SampledAnswer]:
        """Continue a text, or token ids, yielding the answer to deliver within the block.

        A text that begins with an earlier prompt and its answer keeps their tokens. Any other
        begins as the tokenizer begins texts; token ids are taken as they are.
        """
        most = self.settings.max_prompt_tokens
        if isinstance(prompt, str):
            by_length = sorted(self._completions, key=lambda known: len(known[0]), reverse=True)
            text, ids = next(
                (known for known in by_length if prompt.startswith(known[0])), ("", [])
            )
            try:
                self.renderer.check_length(len(prompt), most)
            except TextTooLongError as error:
                raise self._refuse_length(f"{error.characters} characters") from error
            encode = self.renderer.encode if ids else self.renderer.encode_plain
            ids = [*ids, *await run_in_tokenizer(encode, prompt[len(text) :])]
        else:
            if len(prompt) > most:
                raise self._refuse_length(f"{len(prompt)} tokens")
            ids = list(prompt)
        if not ids or min(ids) < 0 or max(ids) >= len(self.renderer.tokenizer):
            raise ApiError(
                f"the prompt must be text or ids of 0..{len(self.renderer.tokenizer) - 1}",
                param="prompt",
            )
        if not isinstance(prompt, str):
            prompt = self.renderer.decode(ids)
        async with self._sample_answer(
            Prompt(np.asarray(ids, np.int32)), max_tokens, stop
        ) as sampled:
            yield sampled
        ended = sampled.token_ids[-1] in self.renderer.stop_token_ids
        spoken = sampled.token_ids[:-1] if ended else sampled.token_ids
        self._completions.append((prompt + sampled.sampled_text, [*ids, *spoken]))
        self._add_preview("user", prompt, sampled.sampled_text)

    def _add_preview(self, role: str, content: str, answer: str) -> None:
        if self.task.episode_index == 0:
            self._preview += [
                {"role": role, "content": content},
                {"role": "assistant", "content": answer},
            ]

    @contextlib.asynccontextmanager
    async def _sample_answer(
        self, prompt: Prompt, max_tokens: int | None, stop: Sequence[str]
    ) -> AsyncIterator[SampledAnswer]:
        """Sample an answer and yield it, to be delivered within the block.

        An exception in the block means that it could not be delivered: then the episode is as if
        there had been no request.
        """
        capacity = self._require_capacity(len(prompt.token_ids), max_tokens)
        try:
            call = self._samples.start_call(
                prompt.token_ids, prompt.shared_turn, prompt.shared_tokens
            )
        except PrefixMismatchError as error:
            raise ApiError(str(error), code="prefix_broken") from error
        self._pending_count += 1
        sampled = None
        try:
            generation = await self._call_engine(call, capacity, stop)
            sampled = self._build_answer(len(prompt.token_ids), generation, stop)
            yield sampled
        except BaseException as error:
            self._samples.cancel_call(call)
            if sampled is not None and not isinstance(error, ApiError) and not self.closed.is_set():
                self._context.report_event(
                    "answer_undelivered",
                    episode=self.task.trajectory_id,
                    tokens=len(sampled.token_ids),
                )
            raise
        finally:
            self._pending_count -= 1
        try:
            self._turn_by_answer[sampled.answer_name] = self._samples.finish_call(call, generation)
        except RoutingError as error:
            # The agent has its answer already, so that no error can be returned.
            self.engine_failure = error

    async def _call_engine(
        self, call: PendingCall, capacity: int, stop: Sequence[str]
    ) -> Generation:
        asking = asyncio.ensure_future(self._retrying_engine.generate_answer(call, capacity, stop))
        self._running_calls.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            if self.closed.is_set():
                raise build_closed_error() from None
            raise
        except Exception as error:
            self.engine_failure = error
            raise ApiError(
                f"the engine failed: {error}", status=500, error_type="server_error"
            ) from error
        finally:
            self._running_calls.discard(asking)

    def _build_answer(
        self, prompt_tokens: int, generation: Generation, stop: Sequence[str]
    ) -> SampledAnswer:
        ids = generation.token_ids.tolist()
        text = self.renderer.decode_answer(ids)
        places = sorted((text.find(one), one) for one in stop if one in text)
        return SampledAnswer(
            answer_name=f"{self.task.trajectory_id}-{next(self._answer_numbers)}",
            prompt_tokens=prompt_tokens,
            token_ids=ids,
            logprobs=generation.logprobs,
            sampled_text=text,
            finish_reason=generation.stop_reason,
            stop_string=places[0][1] if places else "",
        )

    def _require_capacity(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the number of tokens that may be sampled. Raises `ApiError` if no capacity or
        no turn is left."""
        if self.closed.is_set():
            raise build_closed_error()
        if max_tokens is not None and max_tokens < 1:
            raise ApiError(f"max_tokens = {max_tokens} must be at least 1", param="max_tokens")
        settings = self.settings
        if self.turn_count + self._pending_count >= settings.max_turns:
            self.exceeded_limit = "turns"
            raise ApiError(
                f"this episode has had its episode.max_turns = {settings.max_turns} answers",
                code="max_turns_exceeded",
            )
        capacity = answer_capacity(prompt_tokens, settings)
        if not capacity:
            raise self._refuse_length(f"{prompt_tokens} tokens")
        return capacity if max_tokens is None else min(capacity, max_tokens)

    def _refuse_length(self, what: str) -> ApiError:
        self.exceeded_limit = "length"
        return self._build_length_error(what)

    def _build_length_error(self, what: str) -> ApiError:
        most = min(self.settings.max_prompt_tokens, self.settings.max_total_tokens - 1)
        return ApiError(
            f"This model's maximum context length is {most} tokens of prompt "
            "(episode.max_prompt_tokens, episode.max_total_tokens). However, your messages "
            f"resulted in {what}.",
            code="context_length_exceeded",
            param="messages",
        )

    # -- rewards and the trajectory ----------------------------------------------------------------

    def set_reward(self, reward: float, turn: int | None = None) -> None:
        """Set the reward of the whole episode, or of the answer `turn`.

        Both kinds add up; setting the same reward again replaces it.

        The reward of the episode is credited at its last answer. Raises `ValueError` for a reward
        that is not a finite number, for rewards that together exceed `MAX_EPISODE_REWARD`, and for
        an unknown turn.
        """
        try:
            if isinstance(reward, bool):
                raise TypeError(f"must be a finite number, not {reward}")
            earned = to_finite_float(reward, MAX_EPISODE_REWARD)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a reward {error}") from error
        try:
            turn = None if turn is None else to_bounded_int(turn, 0, self.turn_count - 1)
        except ValueError as error:
            raise ValueError(
                f"there is no turn {format_value(turn)}: the episode has {self.turn_count} so "
                "far, counted from 0"
            ) from error
        if turn is None:
            whole = earned
            by_turn = {}
        else:
            whole = self._episode_reward or 0.0
            by_turn = {turn: earned}
        total = abs(whole) + sum(map(abs, {**self._turn_rewards, **by_turn}.values()))
        if total > MAX_EPISODE_REWARD:
            raise ValueError(
                f"a reward of {earned:g} makes {total:g} together, and "
                f"{MAX_EPISODE_REWARD:g} is the most"
            )
        if turn is None:
            self._episode_reward = earned
        else:
            self._turn_rewards[turn] = earned

    @property
    def is_rewarded(self) -> bool:
        return self._episode_reward is not None or bool(self._turn_rewards)

    @property
    def has_effective_reward(self) -> bool:
        """True if there is a reward, or `serving.unrewarded` stands for it."""
        return self.is_rewarded or self._default_reward is not None

    @property
    def total_reward(self) -> float:
        return (self._episode_reward or 0.0) + sum(self._turn_rewards.values())

    def find_turn(self, name: str) -> int:
        """Return the turn of the answer with that name (`SampledAnswer`); -1 if no such
        answer was delivered."""
        return self._turn_by_answer.get(name, -1)

    def close(self) -> None:
        """Close the session: no request is answered any more, and running ones are aborted."""
        self.closed.set()
        for call in self._running_calls:
            call.cancel()

    def build_trajectory(self, stop_reason: str) -> Trajectory:
        """Return the trajectory of a closed session; call it once. Raises `EpisodeError` without an
        answer or a reward.

        If time ran out (`timeout`) before the whole episode was rewarded, answers after the last
        one that has its own reward are left out, as their rewards are unknown.
        """
        name = self.task.trajectory_id
        turns = self.turn_count
        if not turns:
            raise EpisodeError(
                f"the agent of episode {name} got no answer from the model: it made no "
                "request that was served"
            )
        reward = self._episode_reward
        if not self.is_rewarded:
            reward = self._default_reward
            if reward is None:
                refused = (
                    f" (its last request was refused: {self.exceeded_limit})"
                    if self.exceeded_limit
                    else ""
                )
                raise EpisodeError(
                    f"the agent of episode {name} gave no reward{refused}: return it from "
                    'play(), print it in the last line as {"reward": 1.0}, or call '
                    f"{REWARD_CALL_EXAMPLE}; or set serving.unrewarded to what such an "
                    "episode is worth"
                )
        for turn, value in self._turn_rewards.items():
            self._samples.add_reward(turn, value)
        if reward is not None:
            self._samples.add_reward(turns - 1, reward)
        elif stop_reason == "timeout":
            turns = max(self._turn_rewards) + 1
        samples, described = self._samples.build_samples(name, self.settings.temperature, turns)
        return self.task.build_trajectory(
            generator_id=self._context.generator_id,
            stop_reason=stop_reason,
            turns=described,
            samples=samples,
            started_at=self._started_at,
            finished_at=self._context.clock(),
            preview=self._preview,
        )


def build_closed_error() -> ApiError:
    return ApiError(
        "Incorrect API key provided: there is no episode of this key, or it has ended",
        status=401,
        code="invalid_api_key",
        error_type="authentication_error",
    )


def _parse_call_objects(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls as `parse_messages` will read them when they come back."""
    return parse_messages([{"role": "assistant", "tool_calls": list(calls)}])[0].tool_calls
