"""Hooks of schemathesis: streams have an end, and on request only what is accepted is sent.

With `MILLRACE_ACCEPTED` in the environment the document is narrowed to requests that this server answers with 200:
what is generated from the whole document is nearly always refused, and says little of answers.
"""

import os

import schemathesis

EVENTS = "text/event-stream"
END = "[DONE]"
ENDED = ("/v1/chat/completions", "/v1/completions")
"""Whose streams have an end that is no JSON."""
TEXT = {"type": "string", "minLength": 1, "maxLength": 100, "pattern": "^[a-z ]+$"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2}
# Not ranges: 3.0 is an integer to JSON schema, and not to TGI. Few: 20 events of a stream are read, and no more.
FEW = {"enum": [1, 2, 3]}
SEED = {"enum": [0, 7, 2**63]}
NUCLEUS = {"type": "number", "minimum": 0.1, "maximum": 0.9}
COMMON = {"seed": SEED, "stop": {"type": "array", "items": TEXT, "maxItems": 2}, "top_p": NUCLEUS}
OPENAI = {**COMMON, "max_tokens": FEW, "stream": None, "stream_options": None, "model": None}
OPENAI["n"] = {"enum": [1, 2]}
NARROWED = {
    "GenerateParameters": (
        {
            **COMMON,
            "max_new_tokens": FEW,
            "details": None,
            "do_sample": None,
            "return_full_text": None,
            "top_k": FEW,
            "top_n_tokens": FEW,
        },
        ["max_new_tokens"],
    ),
    "GenerateRequest": ({"inputs": TEXT, "parameters": None}, ["inputs", "parameters"]),
    "GenerateVertexInstance": ({"inputs": TEXT, "parameters": None}, ["inputs", "parameters"]),
    "VertexRequest": (
        {
            "instances": {
                "type": "array",
                "items": {
                    "anyOf": [
                        {"$ref": f"#/components/schemas/{name}"}
                        for name in ("GenerateVertexInstance", "ChatRequest")
                    ]
                },
                "minItems": 1,
                "maxItems": 2,
            }
        },
        ["instances"],
    ),
    "KserveRequest": ({"inputs": None, "parameters": None}, ["inputs", "parameters"]),
    "KserveInput": ({"name": TEXT, "data": TEXTS}, ["name", "data"]),
    "CompatGenerateRequest": (
        {"inputs": TEXT, "parameters": None, "stream": None},
        ["inputs", "parameters"],
    ),
    "ChatRequest": (
        {**OPENAI, "messages": None, "logprobs": {"const": True}, "top_logprobs": FEW},
        # `top_logprobs` needs it.
        ["messages", "max_tokens", "logprobs"],
    ),
    "Message": (
        {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
        ["role", "content"],
    ),
    "CompletionRequest": (
        {
            **OPENAI,
            "prompt": {"anyOf": [TEXT, TEXTS]},
        },
        ["prompt", "max_tokens"],
    ),
    "ResponsesRequest": (
        {"input": TEXT, "max_output_tokens": FEW, "stream": None, "top_p": NUCLEUS},
        ["input", "max_output_tokens"],
    ),
    "MessagesRequest": (
        {
            "messages": None,
            "max_tokens": FEW,
            "stop_sequences": COMMON["stop"],
            "stream": None,
            "system": None,
            "top_p": NUCLEUS,
        },
        ["messages", "max_tokens"],
    ),
    "CountTokensRequest": ({"messages": None, "system": None}, ["messages"]),
    "MessagesTurn": (
        {"role": {"enum": ["user", "system"]}, "content": TEXT},
        ["role", "content"],
    ),
    "EmbeddingsRequest": ({"input": TEXT, "encoding_format": None}, ["input"]),
    "EmbedRequest": ({"inputs": TEXT, "normalize": None}, ["inputs"]),
    "RerankRequest": (
        {"query": TEXT, "documents": TEXTS, "return_documents": None, "top_n": FEW},
        ["query", "documents"],
    ),
    "ScoreRequest": ({"text_1": TEXT, "text_2": TEXT}, ["text_1", "text_2"]),
    "DetokenizeRequest": ({"tokens": {"type": "array", "items": FEW}}, ["tokens"]),
}
"""Schemas by name: their properties, narrowed or as they are, and those that must be there."""


@schemathesis.hook
def before_load_schema(context, document):
    """Narrow the document, if asked."""
    if "MILLRACE_ACCEPTED" in os.environ:
        for name, (properties, required) in NARROWED.items():
            schema = document["components"]["schemas"][name]
            schema["properties"] = {
                key: narrowed or schema["properties"][key] for key, narrowed in properties.items()
            }
            schema["required"] = required
            schema["additionalProperties"] = False
        for path in document["paths"].values():
            for operation in path.values():
                # They speak of requests that have been sent before.
                operation["parameters"] = [
                    parameter
                    for parameter in operation.get("parameters", [])
                    if parameter["name"] not in {"idempotency-key", "last-event-id"}
                ]


@schemathesis.check
def streams_end(context, response, case):
    """Each event is a `data:` line and ends, and chats and completions have a last one; the document says the rest."""
    if not response.headers.get("content-type", [""])[0].startswith(EVENTS):
        return
    blocks = response.content.decode().split("\n\n")
    assert blocks.pop() == "", "the last event is not finished"
    lines = [block.split("\n")[-1] for block in blocks if block != ":"]
    assert all(line.startswith("data: ") for line in lines), blocks
    data = [line.removeprefix("data: ") for line in lines]
    if case.operation.path in ENDED:
        assert data.pop() == END, "no end"
    assert data, "no event"


@schemathesis.check
def narrowed_is_accepted(context, response, case):
    """Nothing but overload refuses what the narrowed document allows, save that only one prompt can be estimated."""
    narrowed = "MILLRACE_ACCEPTED" in os.environ and case.operation.method == "post"
    if narrowed and case.operation.path != "/v1/estimate":
        assert response.status_code in {200, 429}, response.text
