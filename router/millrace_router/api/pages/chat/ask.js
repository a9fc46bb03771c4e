"use strict";

// Requests for an answer, and the stream of it. A stream that breaks off is resumed where the server keeps it.

const CHATS = "v1/chat/completions";
const COMPLETIONS = "v1/completions";
/** Pauses before each attempt to go on with a stream that broke off. */
const RESUME_MS = [0, 500, 1000, 2000, 4000];

/**
 * Requests the model's answer, and puts it into `turn`; `changed` is called after each piece. Fails with ApiError, or AbortError.
 * A model without a chat template continues the text instead, now and for the rest of the conversation.
 */
async function ask(answer, { system, fields, isContinuing }) {
  const { conversation, turn } = answer;
  const common = { model: server.model, stream: true, stream_options: { include_usage: true }, ...fields };
  const messages = conversation.messages(system);
  const goingOn = isContinuing ? { add_generation_prompt: false, continue_final_message: true } : {};
  turn.isGuided = "response_format" in fields;
  if (!conversation.isPlain) {
    turn.pending = pendingOf(CHATS, { ...common, messages, ...goingOn });
    try {
      return await readAnswer(answer, await post(answer));
    } catch (error) {
      const isWithout = error.type === "template_error" && /not found|not valid/.test(error.message);
      // A text has no place for images.
      if (!isWithout || conversation.hasImages) throw error;
      conversation.isPlain = true;
    }
  }
  const { tools, tool_choice: _, ...plain } = common;
  turn.pending = pendingOf(COMPLETIONS, { ...plain, prompt: conversation.prompt(system) });
  return readAnswer(answer, await post(answer));
}

/** A request that can be sent again: the server knows it by its key. */
function pendingOf(path, body) {
  return { path, body: JSON.stringify(body), key: server.resumes ? randomName() : null, lastId: null };
}

/** Goes on with an answer that the page was left in. */
async function resume(answer) {
  answer.progress.isResumed = true;
  return readAnswer(answer, await post(answer));
}

/** Ends the request on the server, which would wait for the page otherwise. */
function endPending({ key }) {
  if (key !== null) api(`v1/requests/${key}`, { method: "DELETE", keepalive: true }).catch(() => {});
}

async function post({ turn, signal }) {
  const { path, body, key, lastId } = turn.pending;
  const headers = {};
  if (key !== null) headers["idempotency-key"] = key;
  if (lastId !== null) headers["last-event-id"] = lastId;
  const response = await api(path, { method: "POST", body, signal, headers });
  if (!response.ok) throw await failureOf(response);
  return response;
}

/** Reads a stream to its end, over as many connections as it takes. */
async function readAnswer(answer, first) {
  let response = first;
  for (;;) {
    if (await readStream(answer, response)) return;
    response = await reconnected(answer);
  }
}

/** Whether the stream came to its end. */
async function readStream(answer, response) {
  try {
    for await (const { id, data } of eventsOf(response)) {
      if (data === "[DONE]") return true;
      readChunk(JSON.parse(data), answer);
      // Text and place are kept together, so that no piece is lost or shown twice.
      if (id !== null) answer.turn.pending.lastId = id;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
  }
  return false;
}

async function reconnected(answer) {
  const { pending } = answer.turn;
  const lost = new ApiError("The connection was lost.");
  if (pending.key === null || pending.lastId === null) throw lost;
  answer.progress.isResumed = true;
  for (const pause of RESUME_MS) {
    await waited(pause, answer.signal);
    try {
      return await post(answer);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      // Without a status the server was not reached, and may be on its way back.
      if (error.status !== 0) throw error.type === "not_resumable" ? lost : error;
    }
  }
  throw lost;
}

/** Waits, or fails with AbortError. */
function waited(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}

function readChunk(chunk, { turn, progress, changed }) {
  if (chunk.error) {
    const { message, type } = messageOf(chunk);
    throw new ApiError(message, { type, status: chunk.error.http_status_code ?? 0 });
  }
  const choice = chunk.choices?.[0];
  progress.usage = chunk.usage ?? progress.usage;
  progress.finish = choice?.finish_reason ?? progress.finish;
  const thought = choice?.delta?.reasoning_content;
  const text = choice?.delta?.content ?? choice?.text;
  const calls = [choice?.delta?.tool_calls ?? []].flat();
  if (!thought && !text && calls.length === 0) return;
  progress.piece();
  if (thought) turn.thought = (turn.thought ?? "") + thought;
  if (text) turn.content += text;
  for (const call of calls) addToCall(turn, call);
  changed();
}

/** Puts a piece of a call where it belongs. */
function addToCall(turn, { index = 0, id, function: { name, arguments: text } = {} }) {
  turn.calls ??= [];
  const call = (turn.calls[index] ??= { id: id ?? randomName(), name: "", arguments: "" });
  if (id) call.id = id;
  if (name) call.name = name;
  call.arguments += text ?? "";
}
