"""Routes of other servers, which clients that were made for them request."""

from __future__ import annotations

CHAT = "any OpenAI client works with /v1/chat/completions"
PLAIN = "/generate continues a text, and any OpenAI client works with /v1/chat/completions"
TIPS: dict[str, str] = {
    "/api/tags": "Ollama's routes are not served; /v1/models lists the models",
    "/api/embed": "Ollama's routes are not served; /v1/embeddings embeds texts",
    "/api/embeddings": "Ollama's routes are not served; /v1/embeddings embeds texts",
    "/api/show": "Ollama's routes are not served; /info describes the model",
    "/api/ps": "Ollama's routes are not served; /info describes the model",
    "/api/version": "Ollama's routes are not served; /info has the version",
    "/api": f"Ollama's routes are not served; {CHAT}",
    "/completion": f"llama.cpp's own routes are not served; {PLAIN}",
    "/completions": f"llama.cpp's own routes are not served; {PLAIN}",
    "/infill": f"llama.cpp's own routes are not served; {PLAIN}",
    "/props": "llama.cpp's own routes are not served; /info describes the server",
    "/slots": "llama.cpp's own routes are not served; /metrics counts the requests",
    "/apply-template": "/chat_tokenize renders and tokenizes a chat",
    "/chat/completions": "the route is /v1/chat/completions; set the client's base URL to end with /v1",
    "/models": "the route is /v1/models; set the client's base URL to end with /v1",
    "/responses": "the route is /v1/responses; set the client's base URL to end with /v1",
    "/embeddings": "the route is /v1/embeddings; set the client's base URL to end with /v1",
    "/embed_all": "of TEI's routes, /embed and /rerank are served",
    "/embed_sparse": "of TEI's routes, /embed and /rerank are served",
    "/predict": "of TEI's routes, /embed and /rerank are served",
    "/similarity": "of TEI's routes, /embed and /rerank are served",
    "/v1/v1": "the client's base URL ends with /v1 twice",
    "/v1/chat/completions/chat/completions": "set the client's base URL to end with /v1",
    "/get_model_info": "SGLang's own routes are not served; /info describes the server",
    "/v1/audio": "it neither hears nor speaks",
    "/v1/images": "it makes no images",
    "/v1/assistants": "OpenAI's assistants are not served; /v1/responses is",
    "/v1/threads": "OpenAI's assistants are not served; /v1/responses is",
    "/v1/files": "files are not kept; `millrace run-batch` works off a batch file",
    "/v1/batches": "batches are not kept; `millrace run-batch` works off a batch file",
    "/v1/fine_tuning": "it trains no models",
    "/v1/moderations": "it does not moderate",
    "/v1/complete": "Anthropic's older route is not served; /v1/messages is",
}
"""What there is instead, by path or its first parts."""


def foreign_route(path: str) -> str | None:
    """Return the tip for a path that is another server's route, or below one; the longest one that fits."""
    prefix = path.rstrip("/")
    while prefix:
        if tip := TIPS.get(prefix):
            return tip
        prefix = prefix.rpartition("/")[0]
    return None
