"""LangGraph: a graph of a model and its tools, over chats and over responses."""

from __future__ import annotations

import mill
from cases import run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from scripts import FLOUR

TOOLS = [tool(mill.wind), tool(mill.grind)]


def conversation(base_url: str, name: str, *, has_responses: bool) -> None:
    chat = ChatOpenAI(
        model="tgi",
        base_url=f"{base_url}/v1",
        api_key="-",
        max_retries=0,
        use_responses_api=has_responses,
    ).bind_tools(TOOLS)
    graph = StateGraph(MessagesState)
    graph.add_node("chat", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "chat")
    graph.add_conditional_edges("chat", tools_condition)
    graph.add_edge("tools", "chat")
    asked = {"messages": [("system", "You run a mill."), ("user", f"script:{name} Grind rye.")]}
    told = graph.compile().invoke(asked)["messages"]
    assert told[-1].text == f"{name}: {FLOUR}", told[-1]
    assert [message.type for message in told[2:]] == ["ai", "tool", "ai", "tool", "ai"]
    mill.check_calls()


def chats(base_url: str) -> None:
    conversation(base_url, "langgraph", has_responses=False)


def responses(base_url: str) -> None:
    conversation(base_url, "langgraph_responses", has_responses=True)


run(globals())
