"""A checkpoint that says what a test wants, turn by turn: real weights, and no chance in them.

The chat template looks for `script:NAME` and a blank in the messages, counts the assistant's turns behind it, and
ends the prompt with a token for that turn. Each token of a turn has exactly one successor, so the model says the turn's
text and ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

CERTAINTY = 30.0
"""Weight of a token's successor: beside it, no other token has a chance."""
MAX_TOKENS = 131_072
"""Of a prompt and its answer: agents begin with tens of thousands."""
TEMPLATE = """\
{%- set scripts = SCRIPTS -%}
{%- set found = namespace(name='', turn=0) -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages -%}
{%- set content = message.content or '' -%}
<|{{ message.role }}|>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% if message.role == 'assistant' %}{% set found.turn = found.turn + 1 %}{% endif -%}
{%- for name in scripts if 'script:' ~ name ~ ' ' in content -%}
{%- set found.name = name %}{% set found.turn = 0 -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt and found.name -%}
<turn:{{ found.name }}:{{ [found.turn, scripts[found.name] - 1] | min }}>
{%- endif -%}
"""


def write_scripted_model(
    folder: Path, scripts: Mapping[str, Sequence[str]], *, tokenizer: Path, end: str
) -> None:
    """Write the model of `scripts`, the texts of turns by name, with a tokenizer's file whose last token is `end`."""
    folder.mkdir(parents=True)
    known = Tokenizer.from_file(str(tokenizer))
    chains = _chains(scripts)
    known.add_special_tokens(
        [AddedToken(chain[0], special=True, normalized=False) for chain in chains]
    )
    known.add_tokens(
        [AddedToken(piece, normalized=False) for chain in chains for piece in chain[1:]]
    )
    known.save(str(folder / "tokenizer.json"))
    vocabulary = known.get_vocab()
    ids = [[vocabulary[piece] for piece in chain] for chain in chains]
    _model(ids, vocabulary[end], num_tokens=len(vocabulary)).save_pretrained(folder)
    numbers = json.dumps({name: len(turns) for name, turns in scripts.items()})
    config = {"eos_token": end, "chat_template": TEMPLATE.replace("SCRIPTS", numbers)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _chains(scripts: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The token of each turn, and the pieces of its text: several, unless another turn has one of them."""
    made: list[list[str]] = []
    seen: set[str] = set()
    for name, turns in scripts.items():
        for index, text in enumerate(turns):
            third = len(text) // 3
            pieces = [text[:third], text[third : 2 * third], text[2 * third :]]
            if seen.intersection(pieces) or len(set(pieces)) < len(pieces) or not third:
                pieces = [text]
            assert not seen.intersection(pieces), f"two turns say {text!r}"
            seen.update(pieces)
            made.append([f"<turn:{name}:{index}>", *pieces])
    return made


def _model(chains: Sequence[Sequence[int]], end: int, *, num_tokens: int) -> LlamaForCausalLM:
    """Every token of a chain has a direction of its own, which points at its successor; all others share one."""
    num_directions = 1 + sum(map(len, chains))
    hidden = -(-num_directions // 16) * 16
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    embeddings = torch.zeros(num_tokens, hidden)
    embeddings[:, 0] = 1.0
    head = torch.zeros(num_tokens, hidden)
    head[end, 0] = CERTAINTY
    direction = 0
    for chain in chains:
        for id_, successor in zip(chain, [*chain[1:], end], strict=True):
            direction += 1
            embeddings[id_, 0] = 0.0
            embeddings[id_, direction] = 1.0
            head[successor, direction] = CERTAINTY
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model
