"""Calls as models of each family write them, by their published chat templates, and as clients put them together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace_router.tool_calls.tool import AnswerParser

Call = tuple[str, Mapping[str, Any]]
"""A name and arguments."""


def _objects(calls: Sequence[Call], name: str = "name", key: str = "arguments") -> list[str]:
    return [
        f'{{"{name}": {json.dumps(called)}, "{key}": {json.dumps(arguments)}}}'
        for called, arguments in calls
    ]


def _raw(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(calls: Sequence[Call], tag: str = "tool_call", pad: str = "\n") -> str:
    blocks = []
    for name, arguments in calls:
        parameters = "".join(
            f"<parameter={key}>{pad}{_raw(value)}{pad}</parameter>\n"
            for key, value in arguments.items()
        )
        blocks.append(f"<{tag}>\n<function={name}>\n{parameters}</function>\n</{tag}>")
    return "\n".join(blocks)


def _glm(calls: Sequence[Call], line: str = "\n") -> str:
    return "\n".join(
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_raw(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _minimax(calls: Sequence[Call]) -> str:
    invocations = "".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_raw(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{invocations}</minimax:tool_call>"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def _cohere(calls: Sequence[Call]) -> str:
    each = [
        f'    {{"tool_call_id": "{index}", "tool_name": {json.dumps(name)}, "parameters": {json.dumps(arguments)}}}'
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(each) + "\n]<|END_ACTION|>"


def _expression(
    calls: Sequence[Call], between: str = ", ", written: Callable[[object], str] = repr
) -> str:
    return between.join(
        f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )


def _olmo3(calls: Sequence[Call]) -> str:
    lines = _expression(
        calls, "\n", lambda value: repr(value) if isinstance(value, str) else json.dumps(value)
    )
    return f"<function_calls>\n{lines}\n</function_calls>"


def _gemma_value(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        members = (f"{key}:{_gemma_value(one, quote)}" for key, one in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(_gemma_value(one, quote) for one in value)}]"
    return json.dumps(value)


def _gemma(calls: Sequence[Call], before: str, behind: str, quote: str) -> str:
    return "".join(
        f"{before}call:{name}{_gemma_value(arguments, quote)}{behind}" for name, arguments in calls
    )


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{one}\n</tool_call>" for one in _objects(calls)
    ),
    "llama": lambda calls: "; ".join(_objects(calls, key="parameters")),
    "json": lambda calls: f"[{', '.join(_objects(calls, key='parameters'))}]",
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(_objects(calls))}]",
    "granite": lambda calls: f"<|tool_call|>[{', '.join(_objects(calls))}]",
    "phi4_mini_json": lambda calls: f"functools[{', '.join(_objects(calls))}]",
    "nemotron_json": lambda calls: f"<TOOLCALL>[{', '.join(_objects(calls))}]</TOOLCALL>",
    "cohere_command3": _cohere,
    "qwen3_coder": _qwen3_coder,
    "seed_oss": lambda calls: _qwen3_coder(calls, "seed:tool_call", ""),
    "glm45": _glm,
    "glm47": lambda calls: _glm(calls, ""),
    "minimax": lambda calls: "\n".join(("<tool_calls>", *_objects(calls), "</tool_calls>")),
    "minimax_m2": _minimax,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi,
    "openai": _harmony,
    "pythonic": lambda calls: f"[{_expression(calls)}]",
    "lfm2": lambda calls: f"<|tool_call_start|>[{_expression(calls)}]<|tool_call_end|>",
    "olmo3": _olmo3,
    "gemma4": lambda calls: _gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": lambda calls: _gemma(
        calls, "<start_function_call>", "<end_function_call>", "<escape>"
    ),
}
"""By the name of a format; `glm47` is the later form of `glm45`."""
TEMPLATES = {"glm47": "<arg_key></arg_key><arg_value>", "mistral": "[TOOL_CALLS]"}
"""Sources of templates that tell the form of a format."""


@dataclass
class Answer:
    """The text and the calls, as (name, arguments), that a client puts together from a stream."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    """Indices of the calls that have ended."""
    written: list[str] = field(default_factory=list)
    """What the model wrote for each call, unless it has ended."""


def read(parser: AnswerParser, pieces: Iterable[str]) -> Answer:
    """Parse an answer that comes in pieces, and check what holds of every answer."""
    answer = Answer()
    for parsed in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        answer.text += parsed.text
        for delta in parsed.calls:
            if delta.id is not None:
                assert delta.name is not None
                assert delta.index == len(answer.calls)
                answer.calls.append((delta.name, ""))
                answer.ids.append(delta.id)
                answer.written.append("")
            assert delta.index not in answer.whole, "nothing follows the end of a call"
            assert delta.index == len(answer.calls) - 1
            called, arguments = answer.calls[-1]
            answer.calls[-1] = called, arguments + delta.arguments
            answer.written[-1] += delta.source
            if delta.is_last:
                answer.whole.add(delta.index)
    again = parser.finish()
    assert (again.text, [*again.calls]) == ("", [])
    assert len(set(answer.ids)) == len(answer.ids)
    return answer
