"use strict";

const UNTITLED = "New chat";
const MAX_TITLE = 80;

/**
 * Turns of a user and of the model: `{role, content}`; for a user's `images`, the addresses of those before its text; for the model's: `thought`; `calls` of tools, each
 * `{id, name, arguments, result}`; `stats` once it has ended; `trouble` if it failed; `isStopped` if the user did not
 * want more of it; `isGuided` if it has to fit a schema; `pending`, the request, while its answer comes.
 */
class Conversation {
  constructor() {
    this.id = randomName();
    this.title = UNTITLED;
    this.turns = [];
    /** Whether text is continued as it stands, because the model has no chat template. */
    this.isPlain = false;
    this.changedAt = Date.now();
  }

  /** The conversation of a record. */
  static of(record) {
    const conversation = Object.assign(new Conversation(), record);
    for (const turn of conversation.turns) {
      // The page was left while it came.
      if (turn.role === "assistant" && !turn.stats && !turn.trouble && !turn.pending) turn.isStopped = true;
    }
    return conversation;
  }

  /** What is kept of it. */
  record() {
    return { ...this };
  }

  get last() {
    return this.turns.at(-1);
  }

  add(turn) {
    this.turns.push(turn);
    if (this.title === UNTITLED && turn.role === "user") this.title = titleOf(turn.content);
    this.changedAt = Date.now();
  }

  /** Messages for a chat; turns of one speaker in a row, as failures leave them, become one. */
  messages(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { role, content, images, thought, calls } of this.turns) {
      if (content === "" && !calls && !images) continue;
      const last = messages.at(-1);
      const message = { role, content: contentOf(content, images), ...(thought ? { reasoning_content: thought } : {}) };
      if (calls) messages.push({ ...message, tool_calls: calls.map(callOf) }, ...resultsOf(calls));
      else if (last?.role === role && !last.tool_calls) last.content = joined(last.content, message.content);
      else messages.push(message);
    }
    return messages;
  }

  get hasImages() {
    return this.turns.some(({ images }) => images);
  }

  /** The text that a model without a chat template goes on with. */
  prompt(system) {
    return this.messages(system)
      .map(({ content }) => content)
      .join("\n");
  }
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line || UNTITLED;
}

/** A text, or the parts of images and a text. */
function contentOf(text, images) {
  if (!images) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text === "" ? parts : [...parts, { type: "text", text }];
}

/** The content of two turns as one. */
function joined(one, other) {
  if (typeof one === "string" && typeof other === "string") return `${one}\n\n${other}`;
  return [one, other].flatMap((content) => (typeof content === "string" ? [{ type: "text", text: content }] : content));
}

/** A call in the form of a message. */
function callOf({ id, name, arguments: text }) {
  return { id, type: "function", function: { name, arguments: text } };
}

/** Messages of the results that there are. */
function resultsOf(calls) {
  return calls
    .filter(({ result }) => result !== undefined)
    .map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
}

/** A name that nothing else has; `crypto.randomUUID` is there over HTTPS only. */
function randomName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
