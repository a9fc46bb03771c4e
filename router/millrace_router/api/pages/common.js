"use strict";

/** Where the API is, also behind a proxy that serves it under a path. */
const BASE = new URL(document.documentElement.dataset.root ?? location.pathname.replace(/docs\/?$/, ""), location.origin);
const KEY_NAME = "millrace.key";

/**
 * Makes an element. Functions are listeners (`onclick`), true and false attributes that are there or not.
 * Children are elements, or text that stays text.
 */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

for (const link of document.querySelectorAll("[data-path]")) link.href = new URL(link.dataset.path, BASE);

/** What is kept until the tab is closed; a browser that keeps nothing is no error. */
const kept = {
  get(name) {
    try {
      return sessionStorage.getItem(name);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(name, value);
    } catch {
      // Full, or forbidden: the page works on, and forgets.
    }
  },
};

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
async function api(path, { method = "GET", body, signal, headers = {} } = {}) {
  const key = kept.get(KEY_NAME);
  const all = new Headers(headers);
  if (body !== undefined) all.set("content-type", "application/json");
  try {
    if (key) all.set("authorization", `Bearer ${key}`);
  } catch {
    throw new ApiError("The API key has a character that no header may have.", { status: 401 });
  }
  try {
    return await fetch(new URL(path.replace(/^\//, ""), BASE), { method, body, signal, headers: all });
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
  const usual = status === 401 ? "The server wants an API key." : `The server answered ${status}.`;
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

/** The data of each server-sent event, as it comes. */
async function* eventsOf(response) {
  let rest = "";
  let data = [];
  for await (const piece of piecesOf(response)) {
    const lines = (rest + piece).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "" && data.length > 0) {
        yield data.join("\n");
        data = [];
      } else if (line.startsWith("data:")) {
        data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
      }
    }
  }
}

/** Puts text on the clipboard; over plain HTTP browsers allow that only to a selection. */
async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = el("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** A button that copies what `source` returns, and says that it has. */
function copyButton(source, label = "Copy") {
  const button = el("button", { class: "quiet", type: "button" }, label);
  button.addEventListener("click", async () => {
    const copied = await copyText(source()).then(
      () => "Copied",
      () => "Not allowed",
    );
    button.textContent = copied;
    setTimeout(() => {
      button.textContent = label;
    }, 1500);
  });
  return button;
}
