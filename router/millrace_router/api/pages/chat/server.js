"use strict";

const DEMO = "millrace/demo";
const STARTERS = {
  [DEMO]: ["What is prefill?", "What is continuous batching?", "What can you do?"],
  other: ["What is a millrace?", "Write a haiku about water", "Explain recursion to a child"],
};
const CHECK_SECONDS = 10;
/** While an answer comes, or the server is not ready. */
const SOON_SECONDS = 1;
const RECOVERING = "The server is recovering; your answer will go on.";

/** What is known of the server. */
const server = {
  /** The name of the model, once it is known. */
  model: "",
  /** Whether it keeps a stream for a page that comes back. */
  resumes: false,
  /** The limits of images, if the model reads them. */
  images: null,
  isReady: null,
  /** Whether what `/info` said may be out of date: nothing is known yet, or the server was away. */
  isStale: true,

  /** Reads `/readyz`, and `/info` where that may have changed. */
  async check() {
    try {
      const response = await api("readyz");
      const failure = response.ok ? null : await failureOf(response);
      if (server.isStale) await server.describe();
      if (failure === null) server.show(null);
      else server.show(`The server is not ready: ${failure.message}`, /recovering/.test(failure.message) ? RECOVERING : null);
    } catch (error) {
      server.show(error.message);
      if (server.model === "") byId("limits").textContent = error.message;
    }
  },

  /** Reads what is served; fails with ApiError. */
  async describe() {
    const response = await api("info");
    if (!response.ok) throw await failureOf(response);
    const info = await response.json();
    server.isStale = false;
    server.model = info.model_id;
    server.resumes = (info.resume_grace ?? 0) > 0;
    server.images = info.images ?? null;
    byId("attach").hidden = server.images === null;
    document.title = `${showModel(info.model_id)} · Millrace`;
    showLimits(info);
    showDefaults(info);
    showStarters();
  },

  /** Shows whether the server is ready: `trouble` says why not, `note` what becomes of answers that come. */
  show(trouble, note = null) {
    if (trouble !== null) server.isStale = true;
    server.isReady = trouble === null;
    showDot(server.isReady ? "ready" : "troubled", trouble ?? "The server is ready");
    for (const answer of answers.values()) answer.note(note);
  },
};

function showLimits({ max_input_tokens: input, max_total_tokens: total, default_max_new_tokens: usual }) {
  byId("limits").textContent =
    `Prompts of up to ${input.toLocaleString("en")} tokens, ${total.toLocaleString("en")} with the answer.` +
    (usual ? ` An answer ends after ${usual.toLocaleString("en")} tokens unless you ask for more.` : "");
}

/** Puts the values that the server takes for empty settings where a value would stand. */
function showDefaults(info) {
  const model = info.sampling_defaults ?? {};
  const usual = info.default_max_new_tokens ?? model.max_new_tokens;
  const most = info.max_new_tokens_limit ?? info.max_total_tokens;
  const values = { ...model, max_tokens: usual ?? `Up to ${most}` };
  for (const id of NUMBERS) byId(id).placeholder = String(shortened(values[id] ?? NEUTRAL[id]));
  byId("max_tokens").max = most;
  byId("advanced").hidden = byId("of-tools").hidden = !info.grammars;
  byId("without-tools").hidden = info.chat_template_tools !== false;
}

/** A number of the precision that models are told: 0.6 rather than 0.6000000238418579. */
function shortened(value) {
  return typeof value === "number" ? Number(value.toPrecision(6)) : value;
}

function showStarters() {
  const buttons = (STARTERS[server.model] ?? STARTERS.other).map((text) =>
    el("button", { type: "button", onclick: () => send(text) }, text),
  );
  byId("starters").replaceChildren(...buttons);
}
