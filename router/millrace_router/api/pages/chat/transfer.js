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
    const images = imagesOf(content);
    conversation.add({ role, content: text, ...(images.length > 0 ? { images } : {}) });
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

/** The addresses of the images of a content. */
function imagesOf(content) {
  if (!Array.isArray(content)) return [];
  return content
    .map((part) => (part?.type === "image_url" ? (part.image_url?.url ?? part.image_url) : null))
    .filter((url) => typeof url === "string");
}

/** What `read` has beyond the records that are here; a conversation that goes on from one here takes its place. */
function newOnes(read, records) {
  const here = records.map((record) => ({ id: record.id, texts: textsOf(Conversation.of(structuredClone(record))) }));
  return read.filter((conversation) => {
    const texts = textsOf(conversation);
    if (here.some((other) => beginsWith(other.texts, texts))) return false;
    const older = here.find((other) => other.texts.length > 0 && beginsWith(texts, other.texts) && !answers.has(other.id));
    if (older) conversation.id = older.id;
    return true;
  });
}

/** Each message of a conversation as text, to compare it with others. */
function textsOf(conversation) {
  return conversation.messages("").map((message) => JSON.stringify(message));
}

function beginsWith(texts, start) {
  return start.length <= texts.length && start.every((text, at) => text === texts[at]);
}

/** What an import says, of the conversations in the file and those that were here. */
function importText(read, known) {
  const count = read === 1 ? "1 conversation read" : `${read} conversations read`;
  if (known === 0) return `${count}.`;
  return read === known ? `${count}: nothing new.` : `${count}, ${known} of them known already.`;
}

/** Has the browser save a file. */
function saveFile(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const day = new Date().toISOString().slice(0, 10);
  el("a", { href: url, download: `${name}-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
