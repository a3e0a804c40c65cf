"""An MCP server with a table of prices and a calculator, over stdio. It knows nothing of r3async."""

from mcp.server.mcpserver import MCPServer

PRICES = {"pen": 3, "book": 12, "lamp": 25, "desk": 80, "chair": 45}
server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    """The price of an item of the shop."""
    return str(PRICES[item.strip().lower()])


@server.tool()
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return str(a * b)


if __name__ == "__main__":
    server.run()
