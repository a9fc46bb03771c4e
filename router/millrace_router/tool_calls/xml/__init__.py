"""Formats that write each parameter in tags: Qwen3-Coder, GLM, MiniMax.

Entry points: `formats`' classes.
May import: tool_calls.blocks, tool_calls.parameters and below.
"""
