"use strict";

// Conversations as files: JSON with messages in OpenAI's form.

/** Writes one conversation: enough to ask again. */
function exportedOne(conversation, { model, fields, system }) {
  const { title } = conversation;
  const about = { title, model, exported: new Date().toISOString(), parameters: fields };
  return JSON.stringify({ ...about, messages: conversation.messages(system) }, null, 2);
}

/** Writes all conversations of the store. */
function exportedAll(records) {
  const conversations = records
    .sort((one, other) => other.changedAt - one.changedAt)
    .map((record) => {
      const { title, changedAt } = record;
      const messages = Conversation.of(structuredClone(record)).messages("");
      return { title, changed: new Date(changedAt).toISOString(), messages };
    });
  return JSON.stringify({ exported: new Date().toISOString(), conversations }, null, 2);
}

/** Reads what either of them wrote, and any file with `messages`; fails with TypeError or SyntaxError. */
function imported(text) {
  const told = JSON.parse(text);
  const several = Array.isArray(told) ? told : (told?.conversations ?? [told]);
  if (!Array.isArray(several)) throw new TypeError("`conversations` is no list");
  return several.map(conversationOf);
}

function conversationOf({ messages, title, changed }, index) {
  if (!Array.isArray(messages)) throw new TypeError(`conversation ${index + 1} has no \`messages\``);
  const conversation = new Conversation();
  for (const message of messages) addMessage(conversation, message, index);
  if (typeof title === "string" && title.trim() !== "") conversation.title = titleOf(title);
  conversation.changedAt = Date.parse(changed) || Date.now();
  return conversation;
}

function addMessage(conversation, message, index) {
  const { role, content, reasoning_content: thought, tool_calls: calls, tool_call_id: id } = message ?? {};
  if (role === "system" || role === "developer") return;
  const text = textOf(content);
  if (role === "tool") {
    const call = conversation.turns.flatMap((turn) => turn.calls ?? []).findLast((one) => one.id === id);
    if (call) call.result = text;
  } else if (role === "user") {
    conversation.add({ role, content: text });
  } else if (role === "assistant") {
    const turn = { role, content: text, stats: null };
    if (typeof thought === "string") turn.thought = thought;
    if (Array.isArray(calls) && calls.length > 0) turn.calls = calls.map(importedCall);
    conversation.add(turn);
  } else {
    throw new TypeError(`conversation ${index + 1} has a message of the role ${JSON.stringify(role)}`);
  }
}

function importedCall(call) {
  const { name, arguments: given } = call?.function ?? {};
  const text = typeof given === "string" ? given : JSON.stringify(given ?? {});
  return { id: String(call?.id ?? randomName()), name: String(name), arguments: text };
}

/** The text of a content, which may be in parts. */
function textOf(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  return content.map((part) => (typeof part?.text === "string" ? part.text : "")).join("");
}

/** Has the browser save a file. */
function saveFile(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const day = new Date().toISOString().slice(0, 10);
  el("a", { href: url, download: `${name}-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
