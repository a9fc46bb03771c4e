"""A server that answers by arithmetic, and can be configured to change repeated answers."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

BLOCK = 16
VOCAB = 1000


def tokens_of(text: str) -> list[int]:
    """One token for each character."""
    return [ord(letter) % VOCAB for letter in text]


def generated(ids: Sequence[int], count: int, seed: int) -> list[tuple[int, float]]:
    """A continuation that depends on the whole prompt and the seed."""
    state, found = hash((tuple(ids), seed)), []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        logprob = struct.unpack("<f", struct.pack("<f", -(state % 10_007) / 1000))[0]
        found.append((state % VOCAB, float(logprob)))
    return found


@dataclass
class FakeServer:
    """A server that remembers prompts; its faults change answers to repeated ones."""

    deterministic: bool = True
    dtype: str = "float32"
    again_adds: float = 0.0
    """Added to the third log probability of a repeated answer."""
    again_adds_to: Literal["token", "candidate", "prompt"] = "token"
    """The log probability that changes: of a token, of a candidate beside it, or of the prompt."""
    again_changes_tokens: bool = False
    caches: bool = True
    grammars: bool = True
    attention: str = "cpu"
    activations: str = "exact"
    fails: bool = False
    refuses: int = 0
    """The number of requests that get 429 first."""
    draft_tokens: tuple[int, int] = (0, 0)
    """Draft tokens of each answer, and accepted ones."""
    num_answers: int = 0
    adapters: tuple[str, ...] = ()
    repeats_lose_adapters: bool = False
    """A fault: a repeated request for an adapter gets the base's answer."""
    ignores_adapters: bool = False
    seen: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    url: str = ""
    keys: list[str | None] = field(default_factory=list)

    def info(self) -> dict[str, Any]:
        return {
            "model_id": "fake/model",
            "model_dtype": f"torch.{self.dtype}",
            "model_device_type": "cpu",
            "version": "0",
            "deterministic": self.deterministic,
            "num_shard": 1,
            "block_size": BLOCK,
            "max_input_tokens": 500,
            "max_total_tokens": 600,
            "max_concurrent_requests": 32,
            "max_batch_total_tokens": 6000,
            "prefix_caching": "on",
            "grammars": self.grammars,
            "attention": self.attention,
            "quantize_activations": self.activations,
            "max_top_n_tokens": 5,
        }

    def models(self) -> dict[str, Any]:
        base: dict[str, Any] = {"id": "fake/model", "parent": None}
        return {"data": [base, *({"id": name, "parent": "fake/model"} for name in self.adapters)]}

    def metrics(self) -> str:
        drafted, accepted = (self.num_answers * number for number in self.draft_tokens)
        return (
            '# HELP a A\na{reason="x y"} 3\nb 4.5\n'
            f"millrace_speculation_drafted_tokens_total {drafted}\n"
            f"millrace_speculation_accepted_tokens_total {accepted}\n"
        )

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of `/generate_stream`."""
        parameters = body["parameters"]
        ids = tuple(tokens_of(body["inputs"])[-parameters["truncate"] :])
        count = parameters["max_new_tokens"]
        drawn = self._draw(ids, count, parameters.get("seed", 0), parameters.get("adapter_id", ""))
        for index, (id_, logprob) in enumerate(drawn.tokens, start=1):
            if self.fails and index == 2:
                yield {"error": "it broke", "error_type": "generation"}
                return
            last = index == count
            top = drawn.candidates(index - 1, parameters.get("top_n_tokens", 0))
            yield {
                "index": index,
                "token": {"id": id_, "text": "x", "logprob": logprob, "special": False},
                **(
                    {"top_tokens": [{"id": i, "logprob": value} for i, value in top]} if top else {}
                ),
                "generated_text": "x" * count if last else None,
                "details": {"finish_reason": "length", "cached_tokens": drawn.num_cached}
                if last
                else None,
            }

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of `/v1/completions`."""
        ids, count = tuple(body["prompt"]), body["max_tokens"]
        drawn = self._draw(ids, count, body.get("seed", 0), body.get("model", ""))
        prompt = [(id_, -0.25) for id_ in ids]
        if drawn.prompt_adds and len(ids) > 2:
            prompt[2] = (ids[2], -0.25 + drawn.prompt_adds)
        yield {"choices": [_choice("x" * len(ids), prompt)]}
        for index, token in enumerate(drawn.tokens):
            if self.fails and index == 1:
                yield {"error": {"message": "it broke", "type": "generation"}}
                return
            choice = _choice("x", [token], drawn.candidates(index, body["logprobs"]))
            if index < count - 1:
                yield {"choices": [choice]}
                continue
            usage = {
                "prompt_tokens": len(ids),
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            yield {"choices": [{**choice, "finish_reason": "length"}], "usage": usage}

    def _draw(self, ids: tuple[int, ...], count: int, seed: int, adapter: str) -> Drawn:
        is_again = (adapter, ids) in self.seen
        self.seen.add((adapter, ids))
        if self.ignores_adapters or (is_again and self.repeats_lose_adapters):
            adapter = ""
        self.num_answers += 1
        found = generated(ids, count, seed + sum(adapter.encode()))
        added = self.again_adds if is_again else 0.0
        if count > 2 and self.again_adds_to == "token":
            found[2] = (found[2][0], found[2][1] + added)
        if is_again and self.again_changes_tokens:
            found[0] = ((found[0][0] + 1) % VOCAB, found[0][1])
        return Drawn(
            found,
            num_cached=len(ids) // BLOCK * BLOCK if is_again and self.caches else 0,
            candidate_adds=added if self.again_adds_to == "candidate" else 0.0,
            prompt_adds=added if self.again_adds_to == "prompt" else 0.0,
        )


@dataclass
class Drawn:
    """An answer with the configured faults."""

    tokens: list[tuple[int, float]]
    num_cached: int
    candidate_adds: float
    prompt_adds: float

    def candidates(self, place: int, count: int) -> list[tuple[int, float]]:
        """`count` candidates, the token first."""
        id_, logprob = self.tokens[place]
        adds = self.candidate_adds if place == 2 else 0.0
        return [((id_ + i) % VOCAB, logprob - i + adds * bool(i)) for i in range(count)]


def _choice(
    text: str, tokens: list[tuple[int, float]], candidates: Sequence[tuple[int, float]] = ()
) -> dict[str, Any]:
    """A chunk of a text completion; the text of a token is its id."""
    named = {f"<{id_}>": logprob for id_, logprob in candidates}
    columns = {
        "tokens": [f"<{id_}>" for id_, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": [{**named, f"<{id_}>": logprob} for id_, logprob in tokens],
        "text_offset": list(range(len(tokens))),
    }
    return {"index": 0, "text": text, "logprobs": columns, "finish_reason": None}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.keys.append(self.headers.get("Authorization"))
        answers = {
            "/info": json.dumps(self.fake.info()),
            "/metrics": self.fake.metrics(),
            "/v1/models": json.dumps(self.fake.models()),
            "/readyz": "",
        }
        known = self.path in answers
        self._send(answers.get(self.path, '{"error": "no such thing"}'), 200 if known else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(json.dumps([{"id": id_} for id_ in tokens_of(body["inputs"])]))
            return
        if self.fake.refuses:
            self.fake.refuses -= 1
            self._send('{"error": "Model is overloaded"}', 429, retry_after="0")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_completion = self.path == "/v1/completions"
        for event in self.fake.chunks(body) if is_completion else self.fake.events(body):
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        if is_completion:
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _send(self, text: str, status: int = 200, *, retry_after: str | None = None) -> None:
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


class Server(ThreadingHTTPServer):
    """Allows many connections at once; the kernel would reset those beyond the usual queue of 5."""

    request_queue_size = 128


@contextmanager
def fake_server(port: int = 0, **settings: Any) -> Iterator[FakeServer]:
    """Serve on `port`, or a free one, for the length of the block."""
    fake = FakeServer(**settings)
    handler = type("BoundHandler", (Handler,), {"fake": fake})
    server = Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
