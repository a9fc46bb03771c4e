"""Chat templates come with models: they make a prompt, and reach nothing else. Messages are data."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import ChatTemplate
from millrace_testing.router.edge import serving

MARK = "escaped"

# Ways out that sandboxes have known: through types, functions' globals, frames, format strings, filters and tests.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('\\x5f\\x5fmro\\x5f\\x5f') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{{ range.__self__ }}{{ range.__self__.x }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ self.__class__.__base__.x }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages.sort(key=x) }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '%s'|format(raise_exception.__globals__) }}",
    "{{ '{x.__class__.__init__.__globals__}'.format_map({'x': raise_exception}) }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ messages|map('attr', '__class__')|map('attr', '__mro__')|list|first|first }}",
    "{{ [''.__class__]|first|attr('mro')() }}",
    "{% set x = ''.__class__.__base__ %}{{ x.__subclasses__() }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% from '/etc/passwd' import x %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out(source: str) -> None:
    """Refused; where the sandbox stands an undefined name in for a private one, nothing of it is shown."""
    message = {"role": "user", "content": "hi"}
    try:
        shown = ChatTemplate(source, special_tokens={}).render([message])
    except TemplateError:
        pass
    else:
        assert shown.strip("[]' ") == "" or shown == "{0.__class__.__mro__}"
    assert message == {"role": "user", "content": "hi"}


CLIENTS = [
    "{{ 7 * 191 }}",
    "{% raise_exception('" + MARK + "') %}",
    "{{ raise_exception('" + MARK + "') }}",
    "{# hidden #}",
    "{%- set messages = [] -%}",
    "{{ messages[0].__class__ }}",
    "{% raw %}",
    "${7*191}",
    "#{7*191}",
    "%(x)s {0} {x.__class__}",
    "{% endfor %}{{ bos_token }}{% for m in messages %}",
]


@pytest.mark.parametrize("text", CLIENTS)
async def test_what_clients_write_is_never_run(text: str) -> None:
    """Through the whole route: as content, part, name, role, argument and variable."""
    source = (
        "{% for m in messages %}{{ m.role }}|{{ m.name }}|{{ m.content }}|{% endfor %}{{ extra }}"
    )
    call = {"id": text, "function": {"name": text, "arguments": {text: text}}}
    body: dict[str, Any] = {
        "messages": [
            {"role": text, "name": text, "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "user", "tool_calls": [call]},
        ],
        "chat_template_kwargs": {"extra": text, text: text},
    }
    async with serving(template=source) as edge:
        status, answer, _ = await edge.post("/chat_tokenize", body)
    assert status == 200, answer
    prompt = answer["templated_text"]
    assert prompt.startswith(f"{text}|{text}|{text}|user||{text}|user||")
    assert prompt.endswith(text)
    (rendered_call,) = json.loads(prompt.removesuffix(text).rsplit("||", 1)[1].removesuffix("|"))
    assert json.loads(rendered_call["function"]["arguments"]) == {text: text}
    assert "1337" not in prompt


@pytest.mark.parametrize(
    "name", ["range", "namespace", "raise_exception", "strftime_now", "self", "messages", "tools"]
)
def test_a_variable_with_a_function_s_name_harms_only_its_request(name: str) -> None:
    template = ChatTemplate("{{ range(2)|list }}{{ messages[0].content }}", special_tokens={})
    message = [{"role": "user", "content": "hi"}]
    with suppress(TemplateError):
        template.render(message, variables={name: {"__class__": "x"}})
    assert template.render(message) == "[0, 1]hi"
