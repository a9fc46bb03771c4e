"""Chat templates with the constructs of well-known models, reduced to conversations with tools."""

from __future__ import annotations

from millrace_testing.text.published import template

CHATML = template("reduced/chatml")
LLAMA_3_1 = template("reduced/llama_3_1")
QWEN_2_5 = template("reduced/qwen_2_5")
QWEN_3 = template("reduced/qwen_3")
HERMES_3_TOOL_USE = template("reduced/hermes_3_tool_use")
MISTRAL_V3 = template("reduced/mistral_v3")
MISTRAL_V13 = template("reduced/mistral_v13")
GEMMA_3 = template("reduced/gemma_3")
SMOL_VLM = template("reduced/smol_vlm")
DEEPSEEK_V3 = template("reduced/deepseek_v3")
