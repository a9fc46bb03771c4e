"use strict";

const CONVERSATION_NAME = "millrace.conversation";
/** An answer that comes in less was read in one piece, and says nothing of the server's speed. */
const SHORTEST_RATED_SECONDS = 0.05;

/**
 * Turns of a user and of the model: `{role, content}`, and for the model's `thought` if it wrote one, `stats` once it
 * has ended, `trouble` if it failed, `isStopped` if the user did not want more of it.
 */
class Conversation {
  constructor() {
    this.turns = [];
    /** Whether text is continued as it stands, because the model has no chat template. */
    this.isPlain = false;
  }

  static load() {
    const conversation = new Conversation();
    try {
      const { turns, isPlain } = JSON.parse(kept.get(CONVERSATION_NAME)) ?? {};
      conversation.turns = (turns ?? []).filter(({ content }) => typeof content === "string");
      conversation.isPlain = Boolean(isPlain);
      // The page was left while it came.
      const last = conversation.turns.at(-1);
      if (last?.role === "assistant" && !last.stats && !last.trouble) last.isStopped = true;
    } catch {
      // Of another version: begin anew.
    }
    return conversation;
  }

  save() {
    kept.set(CONVERSATION_NAME, JSON.stringify({ turns: this.turns, isPlain: this.isPlain }));
  }

  /** Messages for a chat; turns of one speaker in a row, as failures leave them, become one. */
  messages(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { role, content, thought } of this.turns) {
      if (content === "") continue;
      const last = messages.at(-1);
      if (last?.role === role) last.content += `\n\n${content}`;
      else messages.push({ role, content, ...(thought ? { reasoning_content: thought } : {}) });
    }
    return messages;
  }

  /** The text that a model without a chat template goes on with. */
  prompt(system) {
    return this.messages(system)
      .map(({ content }) => content)
      .join("\n");
  }

  /** What is written to a file: enough to ask again. */
  exported(model, fields, system) {
    return JSON.stringify(
      { model, exported: new Date().toISOString(), parameters: fields, messages: this.messages(system) },
      null,
      2,
    );
  }
}

/** Times and counts of one answer, while it comes and afterwards. */
class Progress {
  constructor() {
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.pieces = 0;
    this.usage = null;
    this.finish = null;
  }

  piece() {
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.pieces += 1;
  }

  stats() {
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return {
      tokens,
      promptTokens: this.usage?.prompt_tokens ?? null,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
      firstTokenSeconds: this.firstAt === null ? null : (this.firstAt - this.startedAt) / 1000,
      tokensPerSecond: tokens > 1 && seconds > SHORTEST_RATED_SECONDS ? (tokens - 1) / seconds : null,
      finish: this.finish,
    };
  }
}

/**
 * Requests the model's answer; `on.text` gets each piece, and `on.thought` each piece of a thought before it. Fails with ApiError, or AbortError.
 * A model without a chat template continues the text instead, now and for the rest of the conversation.
 */
async function ask(conversation, { model, system, fields, progress, signal, on }) {
  const common = { model, stream: true, stream_options: { include_usage: true }, ...fields };
  if (!conversation.isPlain) {
    const body = JSON.stringify({ ...common, messages: conversation.messages(system) });
    const response = await api("v1/chat/completions", { method: "POST", body, signal });
    if (response.ok) return readAnswer(response, progress, on);
    const failure = await failureOf(response);
    if (failure.type !== "template_error" || !/not found|not valid/.test(failure.message)) throw failure;
    conversation.isPlain = true;
  }
  const body = JSON.stringify({ ...common, prompt: conversation.prompt(system) });
  const response = await api("v1/completions", { method: "POST", body, signal });
  if (!response.ok) throw await failureOf(response);
  return readAnswer(response, progress, on);
}

async function readAnswer(response, progress, on) {
  try {
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") return;
      readChunk(JSON.parse(data), progress, on);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection was lost.");
  }
  throw new ApiError("The connection was lost.");
}

function readChunk(chunk, progress, on) {
  if (chunk.error) {
    const { message, type } = messageOf(chunk);
    throw new ApiError(message, { type, status: chunk.error.http_status_code ?? 0 });
  }
  const choice = chunk.choices?.[0];
  progress.usage = chunk.usage ?? progress.usage;
  progress.finish = choice?.finish_reason ?? progress.finish;
  const thought = choice?.delta?.reasoning_content;
  const text = choice?.delta?.content ?? choice?.text;
  if (thought || text) progress.piece();
  if (thought) on.thought(thought);
  if (text) on.text(text);
}
