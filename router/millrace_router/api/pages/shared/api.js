"use strict";

/** A failure reported by the server; status 0 without an answer. */
class ApiError extends Error {
  constructor(message, { status = 0, type = "", retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.type = type;
    this.retryAfter = retryAfter;
  }
}

/** Asks the server with the key that was given; fails with ApiError, or AbortError. */
async function api(path, { method = "GET", body, signal, headers = {}, keepalive = false } = {}) {
  const key = kept.get(KEY_NAME);
  const all = new Headers(headers);
  if (body !== undefined) all.set("content-type", "application/json");
  try {
    if (key) all.set("authorization", `Bearer ${key}`);
  } catch {
    throw new ApiError("The API key has a character that no header may have.", { status: 401 });
  }
  try {
    return await fetch(new URL(path.replace(/^\//, ""), BASE), { method, body, signal, headers: all, keepalive });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

/** The failure in an answer, in TGI's envelope or OpenAI's. */
async function failureOf(response) {
  const { status } = response;
  const retryAfter = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  const text = await response.text().catch(() => "");
  let told = {};
  try {
    told = JSON.parse(text) ?? {};
  } catch {
    // Not of this server's making: a proxy's page, or nothing.
  }
  const { message, type } = messageOf(told);
  const wanted = kept.get(KEY_NAME) ? "The server does not accept this API key." : "The server wants an API key.";
  const usual = status === 401 ? wanted : `The server answered ${status}.`;
  return new ApiError(message || usual, {
    status,
    type,
    retryAfter: Number.isNaN(retryAfter) ? null : retryAfter,
  });
}

/** The message and type in an error envelope of any kind. */
function messageOf(told) {
  const { error } = told;
  const message = typeof error === "string" ? error : error?.message;
  const reason = typeof told.reason === "string" ? `: ${told.reason}` : "";
  const type = told.error_type ?? error?.type ?? "";
  return { message: typeof message === "string" ? message + reason : "", type: String(type) };
}

/** The text of a body, as it comes. */
async function* piecesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

/** Each server-sent event, as it comes: its `data`, and its `id` if it has one. */
async function* eventsOf(response) {
  let rest = "";
  let data = [];
  let id = null;
  for await (const piece of piecesOf(response)) {
    const lines = (rest + piece).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "" && data.length > 0) {
        yield { id, data: data.join("\n") };
        data = [];
        id = null;
      } else if (line.startsWith("data:")) {
        data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
      } else if (line.startsWith("id:")) {
        id = line.slice(3).trim();
      }
    }
  }
}
