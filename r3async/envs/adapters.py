"""Adapters for environments of other libraries: `reasoning-gym:TASK`, `gymnasium:ID`, `textarena:ID`, `verifiers:ID`.
All are played in the pool.

Each package is imported where it is used, so users of other environments need not install it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import itertools
import random
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs import Action, EnvironmentFactory, EnvironmentFailed, Message, StepResult
from r3async.envs.factory import build_class_factory, import_for_setting, import_optional_package
from r3async.envs.pool import make_pooled_factory

MAX_OPPONENT_MOVES = 100
OpponentPolicy = Callable[[str, random.Random], str]


class ReasoningGymEnvironment:
    """An environment for one task of the procedural data set `task`, made with the task seed.

    The answer is the text in `<answer>...</answer>`, or the whole text. The reward is the package's own score, in
    `0..1`. The oracle is the package's own answer, which some tasks score below 1 because they accept many answers.

    Args:
        settings: Fields of the task's configuration class.
    """

    def __init__(self, task: str, system: str = "", **settings: Any):
        import reasoning_gym

        self._package: Any = reasoning_gym
        self._task, self._system, self._settings = task, system, settings
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, task_seed: int) -> list[Message]:
        # Tasks add an index to the seed, and some give it to numpy, which takes 32 bits.
        self._dataset = self._package.create_dataset(self._task, seed=task_seed % 2**31, size=1, **self._settings)
        self._entry = self._dataset[0]
        asked = [Message("user", self._entry["question"])]
        return [Message("system", self._system), *asked] if self._system else asked

    def oracle(self) -> str:
        return str(self._entry["answer"] or "")

    def step(self, action: Action) -> StepResult:
        marked = self._package.utils.extract_answer(action.text)
        answer = marked if marked is not None else action.text.strip()
        return StepResult(float(self._dataset.score_answer(answer, self._entry)), done=True)


def make_reasoning_gym(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of reasoning-gym environments. They run in the pool, as some tasks take seconds to make.
    `env.args` holds the task's own settings and `system`."""
    import_optional_package("reasoning_gym", config)
    known = import_optional_package("reasoning_gym.factory", config).DATASETS
    if target not in known:
        hint = did_you_mean(target, known, f"it has {len(known)}, such as chain_sum.")
        raise ConfigError(f"`env.name` = {config.name!r}: reasoning-gym has no task {target!r}; {hint}")
    settings = {name: value for name, value in config.reveal_args().items() if name != "system"}
    fields = known[target][1].__dataclass_fields__
    for name in settings:
        if name not in fields or name in ("seed", "size"):
            own = [field for field in fields if field not in ("seed", "size")]
            raise ConfigError(
                f"`env.args.{name}`: {target!r} has no such setting; {did_you_mean(name, own)} it has {', '.join(own)}"
            )
    try:
        settings_class = known[target][1](**settings)
        if hasattr(settings_class, "validate"):
            settings_class.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"`env.args` do not fit {config.name!r}: {error}") from error
    return make_pooled_factory(
        f"{__name__}:ReasoningGymEnvironment", {"task": target, **config.reveal_args()}, config, has_oracle=True
    )


class GymnasiumEnvironment:
    """A Gymnasium environment, `gymnasium.make(id, **settings)`, with one message per step.

    An observation is shown as `render()` draws it with `render_mode = "ansi"` (coloured places in brackets), a text as
    it is, and anything else as Python writes it.

    An action is the text of a `Text` space, the number of a `Discrete` action, or its name if `actions` names them in
    order. An invalid answer is refused in a message, earns `invalid_reward`, and does not move the game.

    The reward is the environment's own, unchanged; terminated and truncated both end the episode. The task seed is the
    seed of the reset.

    Args:
        prompt: Text before the first observation.
        actions: Names of the discrete actions, in order.
        invalid_reward: Reward of an invalid answer.
        invalid_limit: Number of invalid answers after which the episode ends.
    """

    def __init__(
        self,
        id: str,
        prompt: str = "",
        actions: list[str] | None = None,
        invalid_reward: float = 0.0,
        invalid_limit: int = 3,
        **settings: Any,
    ):
        import gymnasium

        self._game: Any = gymnasium.make(id, **settings)
        spaces, space = gymnasium.spaces, self._game.action_space
        if isinstance(space, spaces.Discrete):
            self._first_action = int(space.start)
            self._action_names = actions or [str(self._first_action + index) for index in range(int(space.n))]
            if len(self._action_names) != space.n:
                raise ValueError(f"actions names {len(self._action_names)} actions, {id} has {space.n}")
        elif isinstance(space, spaces.Text):
            self._action_names = []
            if actions:
                raise ValueError(f"{id} takes any text, so there are no actions to name")
        else:
            raise ValueError(
                f"the actions of {id} are {space}; only Discrete and Text ones can be written as an answer"
            )
        self._prompt, self._renders_ansi = prompt, self._game.render_mode == "ansi"
        self._invalid_reward, self._invalid_limit, self._invalid_count = invalid_reward, invalid_limit, 0

    def reset(self, task_seed: int) -> list[Message]:
        self._invalid_count = 0
        seed = task_seed % 2**31
        observation, _ = self._game.reset(seed=seed)
        return [Message("user", "\n".join(filter(None, [self._prompt, self._render_observation(observation)])))]

    def step(self, action: Action) -> StepResult:
        text = action.text.strip()
        if (self._action_names and text not in self._action_names) or (
            not self._action_names and text not in self._game.action_space
        ):
            self._invalid_count += 1
            wanted = (
                f"one of: {', '.join(self._action_names)}"
                if self._action_names
                else f"a text of {self._game.action_space}"
            )
            ends = self._invalid_count >= self._invalid_limit
            return StepResult(self._invalid_reward, [] if ends else [Message("user", f"answer with {wanted}")], ends)
        move = self._first_action + self._action_names.index(text) if self._action_names else text
        observation, reward, terminated, truncated, _ = self._game.step(move)
        done = bool(terminated or truncated)
        return StepResult(float(reward), [] if done else [Message("user", self._render_observation(observation))], done)

    def close(self) -> None:
        self._game.close()

    def _render_observation(self, observation: Any) -> str:
        drawn = self._game.render() if self._renders_ansi else observation
        if isinstance(drawn, str):
            # A game that is drawn for a terminal marks its place by colour, which a policy cannot see.
            return re.sub(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0m", r"[\1]", drawn, flags=re.DOTALL).strip()
        return str(_to_python_values(drawn))


def _to_python_values(value: Any) -> Any:
    """Return `value` with NumPy numbers and arrays converted to Python's."""
    if isinstance(value, tuple):
        return tuple(_to_python_values(part) for part in value)
    if isinstance(value, dict):
        return {name: _to_python_values(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def make_gymnasium(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of Gymnasium environments. An id of the form `module:ID` first imports the module that registers
    it."""
    gymnasium = import_optional_package("gymnasium", config)
    module, _, name = target.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"`env.name` = {config.name!r} cannot be loaded: {error}") from error
    except gymnasium.error.Error as error:
        hint = did_you_mean(name, gymnasium.registry)
        raise ConfigError(f"`env.name` = {config.name!r}: {error} {hint}") from error
    return build_class_factory(GymnasiumEnvironment, f"{__name__}:GymnasiumEnvironment", config, id=target)


def choose_random_move(observation: str, rng: random.Random) -> str:
    """Return a random one of the bracketed moves that the game last listed as available; without such a list, one from
    the last line that contains any."""
    _, listed, moves = observation.rpartition("Available")
    lines = [moves] if listed else reversed(observation.splitlines())
    for line in lines:
        found = [move for move in re.findall(r"\[[^\[\]\n]+\]", line) if not re.match(r"\[(GAME|Player)", move)]
        if found:
            return rng.choice(found)
    return ""


class TextArenaEnvironment:
    """A TextArena game, `textarena.make(id, **settings)`, in which the policy is player `seat`.

    Messages are what the game shows the policy and has not shown it before. The reward comes with the last answer and
    is the game's own for the policy, -1..1 in most games; an answer that the game refuses for good loses. Games use the
    process's random numbers, so each game has its own random stream here, begun from the task seed.

    Args:
        players: Number of players; 0 for the fewest with which the game can be played.
        seat: Number of the policy among the players.
        opponent: Policy of all other players: `random`, or `module:function(observation, rng) -> move`.
    """

    def __init__(self, id: str, players: int = 0, seat: int = 0, opponent: str = "random", **settings: Any):
        import textarena

        if players < 0 or seat < 0 or (players and seat >= players):
            raise ValueError(f"seat must be in 0..players-1, got seat {seat} of {players} players")
        self._opponent: OpponentPolicy = (
            choose_random_move if opponent == "random" else import_for_setting(opponent, "env.args.opponent")
        )
        self._make_game = lambda: textarena.make(id, **settings)
        self._id, self._players, self._seat = id, players, seat
        self._rng, self._random_state = random.Random(0), random.Random(0).getstate()
        self._game: Any = None
        self._shown_text = ""
        with self._swap_random_state():
            self._make_game()  # wrong settings are an error now

    def reset(self, task_seed: int) -> list[Message]:
        self._rng, self._random_state, self._shown_text = (
            random.Random(f"opponent {task_seed}"),
            random.Random(task_seed).getstate(),
            "",
        )
        with self._swap_random_state():
            self._game = self._start_game(task_seed % 2**31)
            if self._play_opponents():
                raise EnvironmentFailed(f"{self._id} was over before the policy could move")
            return self._render_new_text()

    def step(self, action: Action) -> StepResult:
        with self._swap_random_state():
            done, _ = self._game.step(action=action.text)
            if not done and not self._play_opponents():
                return StepResult(0.0, self._render_new_text())
            rewards, _ = self._game.close()
            return StepResult(float((rewards or {}).get(self._seat, 0.0)), done=True)

    def _start_game(self, seed: int) -> Any:
        """Start a game with as few players as it accepts. Raises `ValueError` if none of the numbers is accepted."""
        refused = ""
        for players in [self._players] if self._players else range(self._seat + 1, 16):
            game = self._make_game()
            try:
                game.reset(num_players=players, seed=seed)
                return game
            except AssertionError as error:
                refused = str(error)
        raise ValueError(f"{self._id} cannot be played by {self._players or 'so many'} players: {refused}")

    def _play_opponents(self) -> bool:
        """Play the opponents' moves until it is the policy's turn. Returns True if the game ended before that."""
        for _ in range(MAX_OPPONENT_MOVES):
            player, observation = self._game.get_observation()
            if player == self._seat:
                self._observed_text = str(observation)
                return False
            done, _ = self._game.step(action=self._opponent(str(observation), self._rng))
            if done:
                return True
        raise EnvironmentFailed(f"the opponent moved {MAX_OPPONENT_MOVES} times in {self._id}: is every move refused?")

    def _render_new_text(self) -> list[Message]:
        """Return what the game shows now without what it showed before: most games repeat the whole history every
        time."""
        seen, self._shown_text = self._shown_text, self._observed_text
        return [Message("user", self._observed_text.removeprefix(seen).strip() or "your move")]

    @contextlib.contextmanager
    def _swap_random_state(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._random_state)
        try:
            yield
        finally:
            self._random_state = random.getstate()
            random.setstate(before)


def make_textarena(target: str, config: EnvConfig) -> EnvironmentFactory:
    import_optional_package("textarena", config)
    games = import_optional_package("textarena.envs.registration", config).ENV_REGISTRY
    if target not in games:
        raise ConfigError(
            f"`env.name` = {config.name!r}: textarena has no game {target!r}; {did_you_mean(target, games)}"
        )
    opponent = config.args.get("opponent", "random")
    if opponent != "random":
        function = import_for_setting(str(opponent), "env.args.opponent")
        try:
            inspect.signature(function).bind("", random.Random(0))
        except TypeError as error:
            raise ConfigError(f"`env.args.opponent` = {opponent!r} must take (observation, rng): {error}") from error
    return build_class_factory(TextArenaEnvironment, f"{__name__}:TextArenaEnvironment", config, id=target)


# `verifiers:ID`: tasksets and environments of the package verifiers (its `verifiers.v1` interface, 0.4 and later).
#
# The rollout of verifiers does the work: hooks, rewards, metrics. Only the model is replaced, by a harness in this
# process that asks the policy and writes the answer into the trace, without HTTP. It checks the turn limit and
# `@stop`s, as verifiers' model server would.


class PolicyChannel:
    """A channel between one episode of verifiers, which asks, and one r3async episode, which answers."""

    def __init__(self) -> None:
        self.prompts: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.answers: asyncio.Queue[Action] = asyncio.Queue()

    async def request_answer(self, messages: list[Message]) -> Action:
        """Ask the policy and return its answer. This waits as long as the policy takes; the end of the episode cancels
        the wait."""
        self.prompts.put_nowait(messages)
        return await self.answers.get()


class VerifiersEnvironment:
    """An environment that plays an episode of the verifiers environment `env` on the task that the seed selects. It is
    `async`, so it is played in this process's event loop.

    The reward comes with the last answer: the sum of `trace.reward` over the episode's traces, as verifiers weights it.
    A verifiers episode that ended with an error raises `EnvironmentFailed` with its traceback.
    """

    def __init__(self, vf: Any, env: Any, tasks: list[Any]):
        self._vf, self._env, self._tasks = vf, env, tasks
        self._channel = PolicyChannel()
        self._episode_task: asyncio.Task[Any] | None = None

    @property
    def size(self) -> int:
        return len(self._tasks)

    async def reset(self, task_seed: int) -> list[Message]:
        self.close()
        self._channel = PolicyChannel()
        task = self._tasks[task_seed % self.size]
        episode = asyncio.create_task(run_verifiers_episode(self._vf, self._env, task, self._channel))
        self._episode_task = episode
        # Nothing else would end an abandoned episode, which holds a server and a folder while it is open.
        self._finalizer = weakref.finalize(self, _cancel_episode, episode, asyncio.get_running_loop())
        self._finalizer.atexit = False
        messages, _ = await self._wait_for_prompt()
        if messages is None:
            raise EnvironmentFailed("the verifiers episode ended before it asked for an answer")
        return messages

    async def step(self, action: Action) -> StepResult:
        if self._episode_task is None:
            raise EnvironmentFailed("an environment has to be reset before it is stepped")
        self._channel.answers.put_nowait(action)
        messages, reward = await self._wait_for_prompt()
        return StepResult(reward, done=True) if messages is None else StepResult(0.0, messages)

    def close(self) -> None:
        """Cancel the episode that is being played. This also happens when the object is garbage-collected."""
        if self._episode_task is not None:
            self._finalizer()
            self._episode_task = None

    async def _wait_for_prompt(self) -> tuple[list[Message] | None, float]:
        """Return the messages that the episode asks next and 0, or None and its reward if it ended instead."""
        assert self._episode_task is not None
        question = asyncio.ensure_future(self._channel.prompts.get())
        try:
            await asyncio.wait([question, self._episode_task], return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return question.result(), 0.0
            return None, self._episode_task.result()
        finally:
            question.cancel()


def _cancel_episode(episode: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(episode.cancel)


async def run_verifiers_episode(vf: Any, env: Any, task: Any, channel: PolicyChannel) -> float:
    """Play one episode, hooks and scoring included, and return its reward."""
    traces: list[Any] = []

    def make_agent(name: str, config: Any) -> Any:
        # By default an agent runs in a cloud sandbox and calls a model there; ours does neither.
        nowhere = vf.EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="R3ASYNC_NO_KEY")
        ours = {"model": "policy", "client": nowhere, "runtime": vf.SubprocessConfig(), "retries": vf.RetryConfig()}
        config = config.model_copy(update={"harness": vf.HarnessConfig(id="null"), **ours})
        made = define_recording_agent(vf)(config)
        made.traces, made.harness = traces, make_policy_harness(vf, channel, made.limits, task)
        return made

    agents = vf.Agents(env.config, make_agent)
    info = vf.EnvInfo(id=env.config.env_id)
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    try:
        await env.setup(agents)
        await env.run(task, agents)
        await env.finalize(task, vf.Episode(env=info, task=about, traces=traces))
    except SystemExit as error:  # some parts of verifiers end the process where a setting is missing
        raise EnvironmentFailed(f"verifiers wanted to exit: {error}") from error
    for trace in traces:
        if not trace.ok:
            fault = trace.last_error
            raise EnvironmentFailed(f"verifiers: {fault.type}: {fault.message}\n{fault.traceback or ''}")
    return float(sum(trace.reward for trace in traces))


def define_recording_agent(vf: Any) -> Any:
    """Return an agent class that keeps the traces of what it plays, in the order in which they begin."""

    class RecordingAgent(vf.Agent):
        traces: list[Any]

        def run(self, task: Any, **options: Any) -> Any:
            return super().run(task, **{"on_trace": self.traces.append, **options})

        def interaction(self, task: Any, **options: Any) -> Any:
            return super().interaction(task, **{"on_trace": self.traces.append, **options})

    return RecordingAgent


def make_policy_harness(vf: Any, channel: PolicyChannel, limits: Any, task: Any) -> Any:
    """Return a harness whose model is the policy at the other end of `channel`. It gives one answer per segment and has
    no tools."""
    graph, session = importlib.import_module("verifiers.v1.graph"), importlib.import_module("verifiers.v1.session")
    ended = vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def find_stop_reason(trace: Any) -> str | None:
        for stop in task.hooks("stop"):
            if await session.call_hook(stop, {vf.Trace: trace}):
                return str(stop.__name__)
        return limits.reached(trace)

    class PolicyHarness(vf.Harness):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
            return await self._ask_policy(trace, [vf.SystemMessage(content=system), *messages] if system else messages)

        async def resume(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            urls: Any,
            data: Any,
            messages: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            return await self._ask_policy(trace, list(messages))

        async def _ask_policy(self, trace: Any, new: list[Any]) -> Any:
            if reason := await find_stop_reason(trace):
                trace.stop(reason)
                return ended
            before = trace.branches[-1].messages if trace.branches else []
            action = await channel.request_answer([Message(m.role, extract_message_text(m)) for m in new])
            turn = graph.prepare_turn(trace, [*before, *new])
            answer = vf.AssistantMessage(content=action.text)
            finish = "length" if action.stop_reason == "length" else "stop"
            turn.commit(vf.Response(id="", created=0, model="policy", message=answer, finish_reason=finish))
            return ended

    return PolicyHarness(vf.HarnessConfig(id="null"))


def extract_message_text(message: Any) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = [part.text for part in message.content or [] if getattr(part, "type", "") == "text"]
    if len(parts) != len(message.content or []):
        raise EnvironmentFailed("this verifiers task shows images, and a policy of ours reads text only")
    return "".join(parts)


def make_verifiers(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of verifiers environments.

    The id is the taskset's, as verifiers finds it: a module that exports its `Taskset` (and an `Env`, if it has one) in
    `__all__`.

    In `env.args`, `tasks` is the number of the taskset's tasks that are played (default 1000); the rest is the
    verifiers environment's own configuration, for example `taskset = { difficulty = 3 }`. Tasksets that a single policy
    cannot play are refused: those with several agents, tools, interceptors or containers, and those that stop at
    single requests or responses.
    """
    vf = import_optional_package("verifiers.v1", config)
    args = config.reveal_args()
    count = args.pop("tasks", 1000)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"`env.args.tasks` = {count!r} must be a whole number of at least 1")
    try:
        settings = vf.resolve_env_config({**args, "taskset": {**args.get("taskset", {}), "id": target}})
        env = vf.load_environment(settings)
        tasks = list(itertools.islice(env.taskset, count))
    except Exception as error:  # the taskset is user code and may raise anything
        raise ConfigError(
            f"`env.name` = {config.name!r} with `env.args` = {config.args} cannot be loaded: {error}"
        ) from error
    if not tasks:
        raise ConfigError(f"`env.name` = {config.name!r} has no tasks")
    check_taskset_supported(vf, env, tasks[0], config)
    return lambda: VerifiersEnvironment(vf, env, tasks)


def check_taskset_supported(vf: Any, env: Any, task: Any, config: EnvConfig) -> None:
    decorators = importlib.import_module("verifiers.v1.utils.decorators")
    session = importlib.import_module("verifiers.v1.session")
    roles = [name for name, value in env.config if isinstance(value, vf.AgentConfig)]
    problem = ""
    if len(roles) != 1:
        problem = f"has several agents ({', '.join(roles)})"
    elif env.taskset.toolsets(env.taskset.config) or task.toolsets(task.config):
        problem = "has tools"
    elif task.NEEDS_CONTAINER:
        problem = "needs a container"
    elif decorators.discover_decorated(task, "intercept"):
        problem = "intercepts model calls"
    elif any(session.hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in task.hooks("stop")):
        problem = "stops at single requests or responses"
    if problem:
        raise ConfigError(
            f"`env.name` = {config.name!r} {problem}: only text between one policy and its user is supported"
        )
