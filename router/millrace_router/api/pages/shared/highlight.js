"use strict";

// Colours of code. Prism cuts the text into tokens, and elements are made of them one by one.

/** Characters of a text and of its lines above which they get no colours: Prism may take the square of their number. */
const MAX_COLOURED = 10000;
const MAX_COLOURED_LINE = 500;
/** Names that models give to languages, where Prism has another one. */
const LANGUAGE_NAMES = {
  console: "bash",
  zsh: "bash",
  "c++": "cpp",
  "c#": "csharp",
  golang: "go",
  rs: "rust",
  jsonc: "json",
  json5: "json",
  jsonl: "json",
  mjs: "javascript",
  mysql: "sql",
  postgresql: "sql",
  sqlite: "sql",
  patch: "diff",
  ps1: "powershell",
  vue: "markup",
};

/** Code with the name of its language and a button that copies it; `language` chooses the colours. */
function listing(label, text, language = "") {
  const head = el("figcaption", {}, el("span", {}, label), copyButton(() => text));
  const code = el("code", {}, ...coloured(text, language));
  return el("figure", { class: "listing" }, head, el("pre", { tabindex: "0" }, code));
}

/** Text in a language as nodes; plain text where the language is not known. */
function coloured(text, language) {
  const word = language.toLowerCase().split(/[\s,{:]/, 1)[0];
  const name = LANGUAGE_NAMES[word] ?? word;
  const grammar = Object.hasOwn(Prism.languages, name) ? Prism.languages[name] : null;
  if (grammar === null || typeof grammar !== "object" || !isColourable(text)) return [text];
  const work = { code: text, grammar, language: name };
  Prism.hooks.run("before-tokenize", work);
  work.tokens = Prism.tokenize(work.code, work.grammar);
  Prism.hooks.run("after-tokenize", work);
  return tokenNodes(work.tokens);
}

function isColourable(text) {
  return text.length <= MAX_COLOURED && text.split("\n").every((line) => line.length <= MAX_COLOURED_LINE);
}

function tokenNodes(token) {
  if (Array.isArray(token)) return token.flatMap(tokenNodes);
  if (typeof token === "string") return [token];
  return [el("span", { class: ["token", token.type, token.alias].flat().filter(Boolean).join(" ") }, ...tokenNodes(token.content))];
}

/** A JSON value as a listing, if the text is one whole object or array; otherwise null. */
function jsonListing(text, label = "json") {
  const trimmed = text.trim();
  if (!/^(\{.*\}|\[.*\])$/s.test(trimmed)) return null;
  try {
    return listing(label, JSON.stringify(JSON.parse(trimmed), null, 2), "json");
  } catch {
    return null;
  }
}
