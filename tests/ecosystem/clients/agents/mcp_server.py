"""An MCP server with the mill's tools, on standard input and output."""

from __future__ import annotations

import mill
from mcp.server.mcpserver import MCPServer

server = MCPServer("mill")
server.add_tool(mill.wind)
server.add_tool(mill.grind)
server.run("stdio")
