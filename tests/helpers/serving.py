"""A session's endpoint before a scripted engine, for tests that talk to it as an agent would."""

from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from aiohttp import web

from r3async.config import EpisodeConfig, ServingConfig
from r3async.data.tokens import TokenTable, Trajectory
from r3async.rollout.endpoint import server
from r3async.rollout.endpoint.connections import limit_connections
from r3async.rollout.endpoint.server import AgentServer
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.episode import EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.scripted import ScriptedEngine
from r3async.tools.init_model import build_byte_tokenizer
from r3async.weights.manifest import WeightManifest
from tests.helpers.world import Reports

SETTINGS = EpisodeConfig(max_turns=8, max_new_tokens=96, max_prompt_tokens=900, max_total_tokens=1000, timeout=20)
TASK = EpisodeTask(group_index=3, episode_index=0, task_seed=11)
HERMES = (
    "{% if tools %}<|system|>tools: {{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Template that writes calls differently from how any model would sample them."""
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}


def renderer(template: str | None = None) -> ChatRenderer:
    tokenizer = build_byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


def answer_ids(chat: ChatRenderer, *texts: str, end: bool = True) -> list[list[int]]:
    """Return answers for a script."""
    return [[*chat.encode(text), *([chat.eos_token_id] if end else [])] for text in texts]


def make_scripted_engine(script, **options) -> ScriptedEngine:
    """Return an engine; `before_token` and `before_install` replace the methods of these names."""
    replaced = {name: options.pop(name) for name in ("before_token", "before_install") if name in options}
    engine = ScriptedEngine(script, **options)
    vars(engine).update(replaced)
    return engine


async def ready(script, **options) -> ScriptedEngine:
    engine = make_scripted_engine(script, **options)
    await engine.start()
    await engine.install_version(WeightManifest(version=5, path="", tensors={}, nbytes=0), timeout=1)
    return engine


@asynccontextmanager
async def serving(engine, chat, settings=SETTINGS, **values):
    server = AgentServer(settings, ServingConfig(**values), PlayContext(engine, chat, report_event=Reports()))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def talking(script, template=None, settings=SETTINGS, options=None, **values):
    """Yield `server, session, client` of one episode; `script` may be texts."""
    chat = renderer(template)
    if not callable(script) and script and isinstance(script[0], str):
        script = answer_ids(chat, *script)
    engine = await ready(script, **(options or {}))
    async with serving(engine, chat, settings, **values) as server:
        session = server.open_session(TASK)
        async with client_of(server, session.key) as client:
            yield server, session, client


def client_of(server: AgentServer, key: str, max_retries: int = 0) -> openai.AsyncOpenAI:
    # The endpoint has no TLS, and most of the time to make a client would be that to read certificates.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=server.base_url, api_key=key, max_retries=max_retries, timeout=10, http_client=http
    )


class Connections:
    """The connections of the endpoint that is started next, and those of them that are `admitted`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(server, "limit_connections", self._limit)

    def _limit(self, runner: web.AppRunner, max_connections: int) -> set[web.RequestHandler]:
        self._server, self.admitted = runner.server, limit_connections(runner, max_connections)
        return self.admitted

    @property
    def open(self) -> list[web.RequestHandler]:
        return self._server.connections


def anthropic_client(server: AgentServer, key: str) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    base_url = server.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0, timeout=10, http_client=http)


async def ask(client: openai.AsyncOpenAI, messages, **values):
    """Ask for a chat completion."""
    return await client.chat.completions.create(model="any", messages=messages, **values)


def finished(session: AgentSession) -> Trajectory:
    """End an episode with a reward of 1, and return what it becomes."""
    session.set_reward(1)
    session.close()
    return session.build_trajectory("stop")


def trained_tokens(table: TokenTable) -> list[int]:
    return table["token_ids"][table["loss_mask"]].tolist()


async def handed_out(answer):
    """Return what `AgentSession.answer_chat` or `complete` returns to an agent, received as an agent receives it."""
    async with answer as got:
        return got


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def merging_renderer(template: str | None = None) -> ChatRenderer:
    """Return a renderer whose tokenizer writes `ab`, `ba` and `aa` as one token each; a policy may well sample them as
    two."""
    from tokenizers import models

    tokenizer = build_byte_tokenizer()
    pairs = [("a", "b"), ("b", "a"), ("a", "a")]
    vocabulary = dict(tokenizer.get_vocab())
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    tokenizer.backend_tokenizer.model = models.BPE(vocab=vocabulary, merges=pairs)
    if template is not None:
        tokenizer.chat_template = template
    chat = ChatRenderer(tokenizer)
    assert len(chat.encode("abaa")) == 2
    return chat
