"""What a request to the endpoint may take: bytes, messages, characters, connections, time; and never the event loop."""

import asyncio
import contextlib
import threading

import aiohttp
import pytest

from r3async.config import EpisodeConfig
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.play_context import PlayContext
from tests.helpers.serving import (
    TASK,
    Connections,
    answer_ids,
    ask,
    client_of,
    handed_out,
    ready,
    renderer,
    talking,
    user,
)
from tests.helpers.transport import until

LIMIT = 10.0


@pytest.fixture
def connections(monkeypatch):
    return Connections(monkeypatch)


@pytest.fixture
def short_reads(monkeypatch):
    monkeypatch.setattr("r3async.rollout.endpoint.server.READ_SECONDS", 0.3)


@contextlib.contextmanager
def watched_tokenizer(chat):
    """The threads in which `chat` rendered and encoded."""
    threads: list[int] = []
    encode, encode_plain, render = chat.encode, chat.encode_plain, chat.render

    def watched(function):
        def call(*args, **kwargs):
            threads.append(threading.get_ident())
            return function(*args, **kwargs)

        return call

    chat.encode, chat.encode_plain, chat.render = watched(encode), watched(encode_plain), watched(render)
    try:
        yield threads
    finally:
        chat.encode, chat.encode_plain, chat.render = encode, encode_plain, render


async def post(server, session, path, body, **options):
    headers = {"Authorization": f"Bearer {session.key}", **options.pop("headers", {})}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)) as http,
        http.post(f"{server.base_url}/{path}", json=body, headers=headers, **options) as answer,
    ):
        return answer.status, await answer.json()


async def test_texts_are_rendered_and_tokenised_off_the_event_loop():
    async with talking(["one", "two"]) as (server, session, client):
        with watched_tokenizer(server.context.renderer) as threads:
            await ask(client, [user("a question")])
            await client.completions.create(model="m", prompt="a text")
        assert len(threads) >= 3
        assert threading.get_ident() not in threads
        assert len(set(threads)) == 1  # a tokenizer is not for several threads at once
        assert session.turn_count == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 50_000}] * 2}),
        ("completions", {"prompt": "x" * 100_000}),
        ("completions", {"prompt": [5] * 100_000}),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_tokenised(path, body):
    async with talking(["never"]) as (server, session, _):
        with watched_tokenizer(server.context.renderer) as threads:
            encoded = []
            server.context.renderer.encode = lambda text: encoded.append(text)
            server.context.renderer.decode = lambda ids: encoded.append(ids)
            status, answer = await post(server, session, path, body)
        assert status == 400
        assert "context_length_exceeded" in str(answer["error"])
        assert "episode.max_prompt_tokens" in answer["error"]["message"]
        assert encoded == []
        # To have asked how long it would be is no reason to end.
        assert (session.exceeded_limit, session.turn_count) == ("" if "count" in path else "length", 0)
        assert threading.get_ident() not in threads


async def test_a_text_that_fits_is_never_refused_for_its_characters():
    """As long as can be: of the longest token, as often as the prompt may have tokens."""
    chat = renderer()
    longest = max(chat.tokenizer.get_vocab(), key=len)
    chat.check_length(len(longest) * 900, 900)
    with pytest.raises(ValueError, match="characters are more than 900 tokens"):
        chat.check_length(len(longest) * 900 + 1, 900)


async def test_a_body_messages_and_tools_have_limits(monkeypatch):
    monkeypatch.setattr("r3async.rollout.endpoint.server.MAX_BODY_BYTES", 20_000)
    monkeypatch.setattr("r3async.rollout.endpoint.server.MAX_MESSAGES", 3)
    async with talking(["ok"]) as (server, session, _):
        with watched_tokenizer(server.context.renderer) as threads:
            status, answer = await post(server, session, "chat/completions", {"messages": [user("x" * 30_000)]})
            assert status == 413
            status, answer = await post(server, session, "chat/completions", {"messages": [user("x")] * 4})
            assert (status, answer["error"]["param"]) == (400, "messages")
            assert "4 messages, more than the 3 of a request" in answer["error"]["message"]
            tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(4)]
            status, answer = await post(server, session, "chat/completions", {"messages": [user("x")], "tools": tools})
            assert (status, answer["error"]["param"]) == (400, "tools")
        assert threads == []
        status, _ = await post(server, session, "chat/completions", {"messages": [user("x")] * 3})
        assert status == 200


async def test_a_body_that_is_no_json_or_too_deep_is_refused():
    async with talking(["ok"]) as (server, session, _):
        headers = {"Authorization": f"Bearer {session.key}"}
        async with aiohttp.ClientSession() as http:
            for body in (b"{", b"\xff", b"[" * 100_000):
                async with http.post(f"{server.base_url}/chat/completions", data=body, headers=headers) as answer:
                    assert answer.status == 400
                    assert "the body is not JSON" in (await answer.json())["error"]["message"]


async def connect(server):
    port = int(server.base_url.split(":")[2].split("/")[0])
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), LIMIT)


async def ended(reader) -> bytes:
    """What comes until the other end closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.wait_for(reader.read(65536), LIMIT):
            received += data
    return received


async def answer_to(server, sent: bytes) -> bytes:
    """What comes for these bytes until the other end closes the connection."""
    reader, writer = await connect(server)
    writer.write(sent)
    received = await ended(reader)
    writer.close()
    return received


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA: "])
@pytest.mark.usefixtures("short_reads")
async def test_a_connection_that_does_not_say_what_it_wants_is_closed(connections, sent):
    async with talking(["ok"]) as (server, _, _):
        assert await answer_to(server, sent) == b""
        assert not connections.open


@pytest.mark.usefixtures("short_reads")
async def test_a_connection_that_is_idle_after_an_answer_is_closed_and_a_long_answer_is_not():
    async with talking(["ok"]) as (server, session, _):
        generate, release = server.context.engine.generate, asyncio.Event()

        async def slow(request):
            await release.wait()
            return await generate(request)

        server.context.engine.generate = slow
        asking = asyncio.create_task(post(server, session, "chat/completions", {"messages": [user("x")]}))
        await asyncio.sleep(0.8)
        assert not asking.done()
        release.set()
        assert (await asking)[0] == 200
        assert (await answer_to(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 401")


@pytest.mark.usefixtures("short_reads")
async def test_a_body_that_does_not_come_is_not_waited_for():
    async with talking(["ok"]) as (server, session, _):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        received = await answer_to(server, f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert received.startswith(b"HTTP/1.1 408")
        assert b"the body took longer than 0.3 s" in received


def asking(key, path="models"):
    return f"GET /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode(
        "utf-8", "surrogateescape"
    )


async def answered(reader) -> bytes:
    """The status line of an answer, which is read whole."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT)
    (length,) = (int(line.split()[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    await asyncio.wait_for(reader.readexactly(length), LIMIT)
    return head.splitlines()[0]


async def test_of_too_many_connections_those_go_first_that_have_shown_no_key(connections):
    async with talking(["ok"], max_connections=3) as (server, session, _):
        agent, writer = await connect(server)
        writer.write(asking(session.key))
        assert b" 200 " in await answered(agent)
        silent = [await connect(server) for _ in range(4)]
        for reader, _ in silent[:2]:
            assert await ended(reader) == b""
        # Whoever comes now has a place: strangers who say nothing keep nobody out.
        assert (await post(server, session, "chat/completions", {"messages": [user("x")]}))[0] == 200
        writer.write(asking(session.key))
        assert b" 200 " in await answered(agent)
        # Where all have a key, the newest has no place.
        for reader, newest in silent[2:]:
            newest.close()
            await ended(reader)
        await until(lambda: len(connections.open) == 1)
        more = [await connect(server) for _ in range(2)]
        for reader, other in more:
            other.write(asking(session.key))
            assert b" 200 " in await answered(reader)
        late, last = await connect(server)
        assert await ended(late) == b""
        for other in (writer, last, *(w for _, w in more)):
            other.close()
        await until(lambda: not connections.open)
        assert not connections.admitted


@pytest.mark.parametrize("key", ["guess", "\udcff", "", "r3-" + "x" * 4000], ids=["guess", "no text", "none", "long"])
@pytest.mark.parametrize("path", ["models", "r3async/session", "r3async/sessions"])
async def test_whoever_is_refused_loses_his_connection_and_writes_no_event(key, path, caplog):
    async with talking(["ok"], enabled=True) as (server, _, _):
        reports = server.context.report_event
        method = b"POST" if path == "r3async/sessions" else b"GET"
        assert (await answer_to(server, asking(key, path).replace(b"GET", method))).startswith(b"HTTP/1.1 401")
        for wrong in (b"GET /v1/nowhere HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n"):
            assert b" 40" in (await answer_to(server, wrong)).splitlines()[0]
    assert reports == []
    assert caplog.records == []


@pytest.mark.parametrize(
    "headers", [{"X-Long": "x" * 10_000}, {f"X-{i}": "x" for i in range(200)}], ids=["one long", "many"]
)
async def test_headers_have_limits(headers):
    async with talking(["ok"]) as (server, session, _):
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        request = asking(session.key).removesuffix(b"\r\n") + lines + b"\r\n"
        assert b" 400 " in (await answer_to(server, request)).splitlines()[0]
        async with client_of(server, session.key) as client:
            assert (await client.models.list()).data


async def test_an_answer_counts_once_also_before_its_caller_has_it():
    chat = renderer()
    engine = await ready(answer_ids(chat, "a", "b"))
    answered, generate = asyncio.Event(), engine.generate

    async def answer(request):
        generation = await generate(request)
        answered.set()  # whoever waits for it runs before the caller of this one
        return generation

    engine.generate = answer
    settings = EpisodeConfig(max_turns=2, max_new_tokens=8, max_prompt_tokens=64, max_total_tokens=128)
    session = AgentSession(TASK, settings, PlayContext(engine, chat))

    async def ask_after_the_first():
        await answered.wait()
        return await handed_out(session.answer_completion([*b"second"]))

    async with asyncio.timeout(LIMIT):
        await asyncio.gather(handed_out(session.answer_completion([*b"first"])), ask_after_the_first())
    assert session.turn_count == 2
