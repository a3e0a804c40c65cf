"""`verifiers:ID`: tasksets and environments of the package verifiers (its `verifiers.v1`
interface, 0.4 and later).

The rollout of verifiers does the work: hooks, rewards, metrics, tool servers. Only the model is
replaced, by a harness in this process that asks the policy and writes the answer into the trace,
without HTTP. It checks the turn limit and `@stop`s, as verifiers' model server would, and makes the
calls of an answer with verifiers' own MCP client.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from r3async.config import ConfigError, EnvConfig
from r3async.envs import (
    Action,
    EnvironmentFactory,
    EnvironmentFailed,
    Message,
    StepResult,
    sum_episode_metrics,
)
from r3async.envs.factory import import_optional_package
from r3async.envs.seeding import seed_global_generators
from r3async.envs.tool_call_parser import parse_tool_calls, run_tool_calls

TOOL_SECONDS = 120.0
"""Time limit of a tool call."""


class PolicyChannel:
    """A channel between one episode of verifiers, which asks, and one r3async
    episode, which answers.

    Attributes:
        tools: What the policy is offered, in OpenAI's form.
    """

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self.prompts: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.answers: asyncio.Queue[Action] = asyncio.Queue()

    async def request_answer(self, messages: list[Message]) -> Action:
        """Ask the policy and return its answer. This waits as long as the policy takes; the end of
        the episode cancels the wait."""
        self.prompts.put_nowait(messages)
        return await self.answers.get()


class SharedTools:
    """The tool servers that all episodes of a process use (`Taskset.toolsets`). They run from the
    first episode on, until this object is garbage-collected, or the process ends."""

    def __init__(self, toolsets: list[Any]):
        self._toolsets = toolsets
        self._starting: asyncio.Task[Mapping[str, Any]] | None = None

    async def start(self) -> Mapping[str, Any]:
        """Start the servers, unless they run already, and return them by name. Raises
        `EnvironmentFailed`."""
        if not self._toolsets:
            return {}
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self._starting = asyncio.create_task(self._start_servers())
        return await asyncio.shield(self._starting)

    async def _start_servers(self) -> Mapping[str, Any]:
        mcp = importlib.import_module("verifiers.v1.mcp")
        stack = contextlib.AsyncExitStack()
        try:
            servers = await stack.enter_async_context(mcp.serve_shared(self._toolsets))
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed(
                f"the tools of a verifiers taskset did not start: {error}"
            ) from error
        weakref.finalize(self, _close_later, stack, asyncio.get_running_loop()).atexit = False
        return servers


def _close_later(stack: contextlib.AsyncExitStack, loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(stack.aclose()))


class VerifiersEnvironment:
    """An environment that plays an episode of the verifiers environment `env` on the task that the
    seed selects. It is `async`, so it is played in this process's event loop.

    The reward comes with the last answer: the sum of `trace.reward` over the episode's traces, as
    verifiers weights it. With it come the metrics, and each reward as `rewards/NAME`, unweighted. A
    verifiers episode that ended with an error raises `EnvironmentFailed` with its traceback.
    """

    def __init__(self, vf: Any, env: Any, tasks: list[Any], shared: SharedTools):
        self._vf = vf
        self._env = env
        self._tasks = tasks
        self._shared = shared
        self._channel = PolicyChannel()
        self._episode_task: asyncio.Task[StepResult] | None = None

    @property
    def size(self) -> int:
        return len(self._tasks)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._channel.tools

    async def reset(self, task_seed: int) -> list[Message]:
        self.close()
        self._channel = PolicyChannel()
        task = self._tasks[task_seed % self.size]
        shared = await self._shared.start()
        episode = asyncio.create_task(
            run_verifiers_episode(self._vf, self._env, task, self._channel, shared, task_seed)
        )
        self._episode_task = episode
        # Nothing else would end an abandoned episode, which holds a server and a folder
        # while it is open.
        self._finalizer = weakref.finalize(self, _cancel_task, episode, asyncio.get_running_loop())
        self._finalizer.atexit = False
        result = await self._wait_for_prompt()
        if result.done:
            raise EnvironmentFailed("the verifiers episode ended before it asked for an answer")
        return result.messages

    async def step(self, action: Action) -> StepResult:
        if self._episode_task is None:
            raise EnvironmentFailed("an environment has to be reset before it is stepped")
        self._channel.answers.put_nowait(action)
        return await self._wait_for_prompt()

    def close(self) -> None:
        """Cancel the episode that is being played. This also happens when the object is
        garbage-collected."""
        if self._episode_task is not None:
            self._finalizer()
            self._episode_task = None

    async def _wait_for_prompt(self) -> StepResult:
        """Return the messages that the episode asks next, or its result if it ended instead."""
        assert self._episode_task is not None
        question = asyncio.ensure_future(self._channel.prompts.get())
        try:
            await asyncio.wait([question, self._episode_task], return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return StepResult(0.0, question.result())
            return self._episode_task.result()
        finally:
            question.cancel()


def _cancel_task(task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)


async def run_verifiers_episode(
    vf: Any, env: Any, task: Any, channel: PolicyChannel, shared: Any, task_seed: int
) -> StepResult:
    """Play one episode, hooks and scoring included, and return its reward and metrics."""
    traces: list[Any] = []

    def make_agent(name: str, config: Any) -> Any:
        # By default an agent runs in a cloud sandbox and calls a model there; ours does neither.
        nowhere = vf.EvalClientConfig(
            base_url="http://127.0.0.1:9/v1", api_key_var="R3ASYNC_NO_KEY"
        )
        ours = {
            "model": "policy",
            "client": nowhere,
            "runtime": vf.SubprocessConfig(),
            "retries": vf.RetryConfig(),
        }
        config = config.model_copy(update={"harness": vf.HarnessConfig(id="null"), **ours})
        made = define_recording_agent(vf)(config)
        made.harness = make_policy_harness(vf, channel, made.limits, task)
        made.tools = shared
        made.traces = traces
        return made

    agents = vf.Agents(env.config, make_agent)
    info = vf.EnvInfo(id=env.config.env_id)
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    # This is a task of the event loop, which runs after `reset` has waited.
    seed_global_generators(task_seed)
    try:
        await env.setup(agents)
        await env.run(task, agents)
        await env.finalize(task, vf.Episode(env=info, task=about, traces=traces))
    except SystemExit as error:
        # Some parts of verifiers end the process where a setting is missing.
        raise EnvironmentFailed(f"verifiers wanted to exit: {error}") from error
    for trace in traces:
        if not trace.ok:
            fault = trace.last_error
            raise EnvironmentFailed(
                f"verifiers: {fault.type}: {fault.message}\n{fault.traceback or ''}"
            )
    scores = [
        {f"rewards/{name}": each.score for name, each in trace.rewards.items() if each}
        for trace in traces
    ]
    metrics = [
        {name: value for name, value in trace.metrics.items() if value is not None}
        for trace in traces
    ]
    total = sum(trace.reward for trace in traces)
    return StepResult(total, done=True, metrics=sum_episode_metrics([*scores, *metrics]))


def define_recording_agent(vf: Any) -> Any:
    """Return an agent class that keeps the traces of what it plays, in the order in which they
    begin, and uses the shared tools."""

    class RecordingAgent(vf.Agent):
        traces: list[Any]
        tools: Mapping[str, Any]

        def run(self, task: Any, **options: Any) -> Any:
            return super().run(
                task, **{"on_trace": self.traces.append, "tools": self.tools, **options}
            )

        def interaction(self, task: Any, **options: Any) -> Any:
            return super().interaction(
                task, **{"on_trace": self.traces.append, "tools": self.tools, **options}
            )

    return RecordingAgent


def make_policy_harness(vf: Any, channel: PolicyChannel, limits: Any, task: Any) -> Any:
    """Return a harness whose model is the policy at the other end of `channel`. An answer with
    calls is answered by their results; one without ends the segment."""
    graph, session = (
        importlib.import_module("verifiers.v1.graph"),
        importlib.import_module("verifiers.v1.session"),
    )
    mcp = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    ended = vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def find_stop_reason(trace: Any) -> str | None:
        for stop in task.hooks("stop"):
            if await session.call_hook(stop, {vf.Trace: trace}):
                return str(stop.__name__)
        return limits.reached(trace)

    class PolicyHarness(vf.Harness):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            urls: Any,
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = (
                [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
            )
            return await self._play_segment(
                trace, urls, [vf.SystemMessage(content=system), *messages] if system else messages
            )

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
            return await self._play_segment(trace, urls, list(messages))

        async def _play_segment(self, trace: Any, urls: Mapping[str, str], new: list[Any]) -> Any:
            async with contextlib.AsyncExitStack() as stack:
                named = {"mcpServers": {name: {"url": url} for name, url in urls.items()}}
                channel.tools, owners, servers = await mcp.connect_mcp(named, stack)
                # Calls that change the episode's state at once would undo each other.
                one_at_a_time = asyncio.Lock()

                async def call_tool(name: str, arguments: dict[str, Any]) -> str:
                    async with one_at_a_time:
                        said = await mcp.call_mcp(servers, owners, name, arguments)
                    if not isinstance(said, str):
                        raise ValueError("the result has an image, and only text can be read")
                    return said

                while new and not trace.stop_condition:
                    reason = await find_stop_reason(trace)
                    if reason:
                        trace.stop(reason)
                    else:
                        new = await self._ask_policy(trace, new, call_tool)
            return ended

        async def _ask_policy(self, trace: Any, new: list[Any], call_tool: Any) -> list[Any]:
            """Add the policy's answer to the trace, and return the results of its calls."""
            before = trace.branches[-1].messages if trace.branches else []
            action = await channel.request_answer([convert_message(message) for message in new])
            turn = graph.prepare_turn(
                trace, [*before, *new], [vf.Tool(**tool["function"]) for tool in channel.tools]
            )
            text, asked = parse_tool_calls(action.text, channel.tools, thinking=action.thinking)
            calls = [vf.ToolCall(id=call["id"], **call["function"]) for call in asked]
            finish = (
                "tool_calls" if calls else "length" if action.stop_reason == "length" else "stop"
            )
            answer = vf.AssistantMessage(content=text, tool_calls=calls or None)
            turn.commit(
                vf.Response(id="", created=0, model="policy", message=answer, finish_reason=finish)
            )
            if not calls:
                return []
            said = await run_tool_calls(
                action.text,
                channel.tools,
                call_tool,
                seconds=TOOL_SECONDS,
                thinking=action.thinking,
            )
            return [
                vf.ToolMessage(tool_call_id=call.id, content=result.content, name=call.name)
                for call, result in zip(calls, said, strict=True)
            ]

    return PolicyHarness(vf.HarnessConfig(id="null"))


def convert_message(message: Any) -> Message:
    return Message(
        message.role, extract_message_text(message), name=getattr(message, "name", None) or ""
    )


def extract_message_text(message: Any) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = [part.text for part in message.content or [] if getattr(part, "type", "") == "text"]
    if len(parts) != len(message.content or []):
        raise EnvironmentFailed(
            "this verifiers task shows images, and a policy of ours reads text only"
        )
    return "".join(parts)


def make_verifiers(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of verifiers environments.

    The id is the taskset's, as verifiers finds it: a module that exports its `Taskset` (and an
    `Env`, if it has one) in `__all__`.

    In `env.args`, `tasks` is the number of the taskset's tasks that are played (default 1000);
    the rest is the verifiers environment's own configuration, for example
    `taskset = { difficulty = 3 }`. Tasksets that a single policy cannot play are refused:
    those with several agents, interceptors or containers, and those that stop at single
    requests or responses.
    """
    vf = import_optional_package("verifiers.v1", config)
    args = config.reveal_args()
    count = args.pop("tasks", 1000)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"`env.args.tasks` = {count!r} must be a whole number of at least 1")
    try:
        settings = vf.resolve_env_config(
            {**args, "taskset": {**args.get("taskset", {}), "id": target}}
        )
        env = vf.load_environment(settings)
        tasks = list(itertools.islice(env.taskset, count))
    except Exception as error:  # the taskset is user code and may raise anything
        raise ConfigError(
            f"`env.name` = {config.name!r} with `env.args` = {config.args} cannot be "
            f"loaded: {error}"
        ) from error
    if not tasks:
        raise ConfigError(f"`env.name` = {config.name!r} has no tasks")
    check_taskset_supported(vf, env, tasks[0], config)
    shared = SharedTools(env.taskset.toolsets(env.taskset.config))
    return lambda: VerifiersEnvironment(vf, env, tasks, shared)


def check_taskset_supported(vf: Any, env: Any, task: Any, config: EnvConfig) -> None:
    decorators = importlib.import_module("verifiers.v1.utils.decorators")
    session = importlib.import_module("verifiers.v1.session")
    roles = [name for name, value in env.config if isinstance(value, vf.AgentConfig)]
    problem = ""
    if len(roles) != 1:
        problem = f"has several agents ({', '.join(roles)})"
    elif task.NEEDS_CONTAINER:
        problem = "needs a container"
    elif decorators.discover_decorated(task, "intercept"):
        problem = "intercepts model calls"
    elif any(
        session.hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in task.hooks("stop")
    ):
        problem = "stops at single requests or responses"
    if problem:
        raise ConfigError(
            f"`env.name` = {config.name!r} {problem}: only one policy with its user and "
            "tools is supported"
        )
    for toolset in [*env.taskset.toolsets(env.taskset.config), *task.toolsets(task.config)]:
        if not toolset.config.url and not is_found_by_processes(type(toolset).__module__):
            raise ConfigError(
                f"`env.name` = {config.name!r}: its tools run in processes of their own, which "
                f"do not find the module {type(toolset).__module__!r}: install it, or put its "
                "folder into PYTHONPATH"
            )


def is_found_by_processes(module: str) -> bool:
    """Return True if a new Python process elsewhere finds the module, without which a tool server
    fails minutes later."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return (
        subprocess.run(
            [sys.executable, "-c", find, module], cwd="/", capture_output=True
        ).returncode
        == 0
    )
