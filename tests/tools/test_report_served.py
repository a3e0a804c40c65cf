"""`r3async report --serve`: who is answered, what follows a run, its episodes; and the page in a real browser."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from r3async.tools.cli import app
from r3async.tools.live import MAX_CONNECTIONS, RESPONSE_HEADERS, LivePageServer, _is_loopback
from r3async.views.live import LiveRun
from tests.helpers.browser import browse, find_chromium
from tests.tools.test_report import Page, write_run

TOKEN = "the-token"
EVIL = "<script>document.title='owned'</script>{{ title }}'\"&amp;"


@contextlib.asynccontextmanager
async def served(*runs: Path) -> AsyncIterator[str]:
    """The address of the pages, without a query."""
    runner = await LivePageServer(runs, TOKEN).start(0)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def get(address: str, path: str = "/", *, host: str | None = None, **query: object) -> tuple[int, str]:
    words = {"token": TOKEN, **{name: str(value) for name, value in query.items()}}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
        async with session.get(address + path, params=words, headers={"Host": host} if host else {}) as answer:
            assert {
                name: answer.headers[name] for name in RESPONSE_HEADERS if name != "Cache-Control"
            }.items() <= RESPONSE_HEADERS.items()
            return answer.status, await answer.text()


def read(text: str, tmp_path: Path) -> Page:
    (tmp_path / "page.html").write_text(text)
    return Page(tmp_path / "page.html")


def cursor(text: str) -> str:
    return text.split("data-cursor='")[1].split("'")[0]


def row(step: int, **figures: object) -> str:
    return (
        json.dumps({"step": step, "version": step, "time": 1000.0 + step, "reward/mean": step / 100, **figures}) + "\n"
    )


def said(step: int, number: int = 0, user: str = "u", reward: float = 0.5, **more: object) -> str:
    line = {"step": step, "trajectory": f"g{step:08d}e{number:04d}", "reward": reward, **more}
    return json.dumps({**line, "turns": [{"user": user, "assistant": EVIL, "reward": reward}]}) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


# --- who is answered


async def test_only_who_has_the_token_and_names_loopback_is_answered(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    async with served(run) as address:
        for path in ("/", "/page", "/episodes", "/episode", "/uplot.js", "/report.js", "/live.js", "/elsewhere"):
            assert (await get(address, path, token=""))[0] == 403
            assert (await get(address, path, token=TOKEN[:-1]))[0] == 403
            assert (await get(address, path, host="evil.example"))[0] == 403, "its name was rebound to loopback"
        assert (await get(address, host="localhost:1"))[0] == 200, "through a tunnel, ports differ"
        assert (await get(address, "/elsewhere"))[0] == 404
        assert (await get(address, "/report.js"))[0] == 200
        assert "demo" not in (await get(address, token="ä"))[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost", "[::1]:9", "[::1]"])
def test_names_of_loopback(host: str) -> None:
    assert _is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "localhost.evil.example", "10.0.0.1:80", "127.0.0.1.evil.example:80", "[::2]", "::"]
)
def test_other_names(host: str) -> None:
    assert not _is_loopback(host)


@pytest.mark.parametrize(
    ("path", "words", "code"),
    [
        ("/", {"run": 9}, 404),
        ("/page", {"run": "x"}, 404),
        ("/episodes", {"reward_min": "x"}, 400),
        ("/episodes", {"order": "odd"}, 400),
        ("/episodes", {"page": -1}, 400),
        ("/episodes", {"other": 1}, 400),
        ("/episode", {"key": "1.nobody"}, 404),
        ("/episode", {}, 404),
        ("/page", {"cursor": "no cursor"}, 200),
    ],
)
async def test_what_cannot_be_answered_is_said(tmp_path: Path, path: str, words: dict, code: int) -> None:
    async with served(write_run(tmp_path)) as address:
        assert (await get(address, path, **words))[0] == code


async def test_strangers_take_a_limited_number_of_connections_and_are_not_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with served(write_run(tmp_path)) as address:
        host, port = "127.0.0.1", int(address.rpartition(":")[2])
        strangers = [await asyncio.open_connection(host, port) for _ in range(MAX_CONNECTIONS + 20)]
        for _, writer in strangers[-5:]:
            writer.write(b"this is no HTTP\r\n\r\n")
        assert (await get(address))[0] == 200, "who has the token is served"
        closed = aborted = 0
        for reader, writer in strangers[:20]:
            try:
                closed += await asyncio.wait_for(reader.read(), 120) == b""
            except ConnectionError:
                aborted += 1
            writer.close()
        assert closed + aborted == 20, "the oldest connections made way"
        for _, writer in strangers[20:]:
            writer.close()
    assert "Traceback" not in capfd.readouterr().err
    assert not caplog.records


async def test_a_page_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: LiveRun) -> int:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(LiveRun, "read_new", fail)
    said: list[str] = []
    runner = await LivePageServer([write_run(tmp_path)], TOKEN, said.append).start(0)
    try:
        status, text = await get(f"http://127.0.0.1:{runner.addresses[0][1]}", "/")
    finally:
        await runner.cleanup()
    assert (status, "a defect" in text) == (500, True)
    assert said == ["/ could not be made: ZeroDivisionError('a defect')"]


# --- a run that goes on


async def test_a_page_is_sent_again_only_when_the_run_has_gone_on(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    async with served(run) as address:
        _, text = await get(address)
        scripts = [f"{name}.js?token={TOKEN}" for name in ("uplot", "report", "live")]
        assert read(text, tmp_path).fetched == [f"?run=0&token={TOKEN}", *scripts], "all of it from here"
        assert (await get(address, "/page", cursor=cursor(text)))[0] == 204
        append(run / "metrics.jsonl", row(13)[:-9])
        assert (await get(address, "/page", cursor=cursor(text)))[0] == 204, "half a line"
        append(run / "metrics.jsonl", row(13)[-9:])
        status, after = await get(address, "/page", cursor=cursor(text))
        assert status == 200
        assert json.loads(read(after, tmp_path).data)["series"]["x/step"] == list(range(1, 14))
        shutil.rmtree(run)
        _, gone = await get(address, "/page", cursor=cursor(after))
        assert "The directory of demo is not there any more" in gone
        assert json.loads(read(gone, tmp_path).data)["series"]["x/step"] == list(range(1, 14))


async def test_nobody_looks_and_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    look = LiveRun.read_new
    monkeypatch.setattr(LiveRun, "read_new", lambda run: (looks.append(run.run_dir), look(run))[1])
    run = write_run(tmp_path)
    async with served(run) as address:
        append(run / "metrics.jsonl", row(13))
        await asyncio.sleep(0.3)
        assert looks == []
        await get(address)
        assert looks == [run]


def test_a_resume_takes_steps_back(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(row(step) for step in range(1, 9)))
    assert run.read_new() == 1
    assert run.read_new() == 1
    path.write_text("".join(row(step) for step in range(1, 6)) + row(6, again=1.0))
    assert run.read_new() == 2
    assert [(line["step"], line.get("again")) for line in run.make_record().rows] == [
        *((step, None) for step in range(1, 6)),
        (6, 1.0),
    ]
    run.close()


def test_a_run_without_files_is_followed_from_its_first_line(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "soon")
    assert (run.read_new(), run.is_gone) == (1, True)
    (tmp_path / "soon").mkdir()
    (tmp_path / "soon" / "events.jsonl").write_text('{"event": "run_failed", "error": "why", "time": 1.0}\n[]\n{to')
    assert (run.read_new(), run.is_gone) == (2, False)
    assert run.make_record().make_summary().reason == "why"
    run.close()


async def test_several_runs_are_compared_and_each_has_a_page(tmp_path: Path) -> None:
    one, other = write_run(tmp_path, "one"), write_run(tmp_path, "other", 5)
    async with served(one, other) as address:
        _, text = await get(address)
        page = read(text, tmp_path)
        assert "one against other" in page.text
        assert "1:x/tokens" in json.loads(page.data)["series"]
        assert (await get(address, "/page", cursor=cursor(text)))[0] == 204
        append(other / "metrics.jsonl", row(6))
        assert (await get(address, "/page", cursor=cursor(text)))[0] == 200
        _, single = await get(address, run=1)
        assert "id='looking'" in single
        assert (await get(address, "/episodes"))[0] == 400
        assert (await get(address, "/episodes", run=1))[0] == 200


# --- the command


def test_a_missing_run_a_taken_port_and_a_file_are_refused_in_a_line(tmp_path: Path) -> None:
    run = str(write_run(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, reason in (
            (["none-such"], "no run 'none-such'"),
            ([run, "--port", port], f"port {port} of 127.0.0.1 cannot be opened"),
            ([run, "-o", "x.html"], "--serve writes no file"),
        ):
            result = CliRunner().invoke(app, ["report", "--serve", *words])
            assert result.exit_code == 2, result.output
            assert reason in " ".join(result.output.split())
            assert "Traceback" not in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "r3async.tools.cli", "report", "--serve", str(write_run(tmp_path))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "", "")


# --- in a browser

WRITER = """
import shutil, sys, time
from pathlib import Path
source, run = Path(sys.argv[1]), Path(sys.argv[2])
files = {name: (source / name).read_text().splitlines(True) for name in ("metrics.jsonl", "episodes.jsonl")}
for step in range(10, 60):
    for name, lines in files.items():
        with (run / name).open("a") as file:
            file.write(lines[step][:20]); file.flush()
            file.write(lines[step][20:])
    time.sleep(0.1)
"""


async def until(page, expression: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not await page.value(expression):
        assert time.monotonic() < deadline, f"{expression}; {page.problems}"
        await asyncio.sleep(0.1)


@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium (apt-get install chromium)")
@pytest.mark.long
async def test_a_growing_run_is_followed_for_60_steps_and_an_episode_is_found_and_opened(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", steps=60)
    (whole / "episodes.jsonl").write_text("".join(said(step, user=f"number {step}") for step in range(1, 61)))
    run = shutil.copytree(whole, tmp_path / "demo")
    for name in ("metrics.jsonl", "episodes.jsonl"):
        (run / name).write_text("".join((whole / name).read_text().splitlines(True)[:10]))
    points = "plots.get('chart-0').data[0].length"
    async with served(run) as address:
        async with browse(str(find_chromium()), f"{address}/?token={TOKEN}") as page:
            assert await page.value(points) == 10
            writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, str(whole), str(run))
            seen = set()
            while writer.returncode is None:
                seen.add(await page.value(points))
                await asyncio.sleep(0.2)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(writer.wait(), 0.01)
            await until(page, f"{points} === 60")
            assert len(seen) >= 2, "it grew while it was written"
            assert writer.returncode == 0
            await page.value("document.querySelector('input[value=time]').click()")
            assert await page.value("plots.get('chart-0').axes[0].label") == "time since the start"
            # From a point of a curve to its episodes, and into one.
            x, y = await page.value(
                "(() => { const u = plots.get('chart-0'), box = u.over.getBoundingClientRect();"
                " return [box.x + u.valToPos(u.data[0][41], 'x'), box.y + box.height / 2]; })()"
            )
            await page.click(x, y)
            await until(page, "document.querySelectorAll('#found tr[data-key]').length === 1")
            assert "number 42" in await page.value("document.querySelector('#found tr[data-key]').textContent")
            await page.value("document.querySelector('#found tr[data-key] button').click()")
            await until(page, "!!document.querySelector('#opened [data-opened]')")
            told = await page.value("document.querySelector('#opened .say.policy').textContent")
            assert told.strip() == EVIL
            assert await page.value("document.title") == "demo · r3async", "nothing that a model said has run"
            assert "episode=42.g" in await page.value("location.hash")
            assert all(asked.startswith(address) for asked in page.requests)
            assert page.problems == []
