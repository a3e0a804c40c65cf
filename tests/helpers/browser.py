"""A headless Chromium, driven over its DevTools protocol: what a page requested, complained of, and drew."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

START_SECONDS, CALL_SECONDS = 60.0, 60.0


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. `requests`: requested addresses, without the page's own and inline data; `problems`: console and script
    errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._number = socket, 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told.get("result", told))
            elif told["method"] == "Network.requestWillBeSent":
                address = told["params"]["request"]["url"]
                if not address.startswith(("file:", "data:", "blob:")):
                    self.requests.append(address)
            elif told["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(str(told["params"]["entry"]))
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "warning"):
                self.problems.append(str(told["params"]["args"]))
            elif told["method"] == "Page.loadEventFired":
                self._loaded.set()

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._answers[self._number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        return await asyncio.wait_for(answer, CALL_SECONDS)

    async def open(self, address: str) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), CALL_SECONDS)

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        await self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    async def click(self, x: float, y: float) -> None:
        await self.drag(x, x, y)

    async def drag(self, start: float, end: float, y: float) -> None:
        """Press the mouse at one place, and release it at another of the same height."""
        await self.mouse("Moved", start, y)
        await self.mouse("Pressed", start, y, button="left", clickCount=1)
        if start != end:
            await self.mouse("Moved", end, y, button="left")
        await self.mouse("Released", end, y, button="left", clickCount=1)

    async def value(self, expression: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")


@contextlib.asynccontextmanager
async def browse(chromium: str, address: str) -> AsyncIterator[Page]:
    """Open the page in a browser that ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
            *("--window-size=1280,1000", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await asyncio.to_thread(_port, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json(content_type=None)
                socket_address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(socket_address, max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.open(address)
                    yield page
        finally:
            browser.terminate()
            try:
                await asyncio.wait_for(browser.wait(), 10)
            except TimeoutError:
                browser.kill()
                await browser.wait()


def _port(file: Path) -> int:
    """Return the port from the first line of the file that the browser writes when it is ready."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if file.is_file() and (text := file.read_text()).strip():
            return int(text.split()[0])
        time.sleep(0.1)
    raise TimeoutError(f"Chromium did not start within {START_SECONDS:.0f} s")
