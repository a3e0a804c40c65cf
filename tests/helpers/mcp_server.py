"""An MCP server, for tests: `python mcp_server.py [MODE]` over stdio, `python mcp_server.py http PORT` over HTTP."""

import sys
import time

if sys.argv[1:] == ["dies"]:
    sys.exit("the server's own fault")
if sys.argv[1:] == ["hangs"]:
    time.sleep(600)

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("sums")
known: list[int] = []


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers, and how many sums this server has done."""
    known.append(a + b)
    return f"{a + b} ({len(known)})"


@server.tool()
async def wait(seconds: float) -> str:
    import asyncio

    await asyncio.sleep(seconds)
    return "over"


@server.tool()
def shout(times: int) -> str:
    return "x" * times


@server.tool()
def fail() -> str:
    raise RuntimeError("no luck")


@server.tool()
def greeted(ctx: Context) -> str:
    """Return what the client's request says about its sender."""
    return ctx.request_context.request.headers.get("authorization", "nobody")


if sys.argv[1:2] == ["http"]:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
else:
    server.run("stdio")
