"use strict";

const DEMO = "millrace/demo";
const STARTERS = {
  [DEMO]: ["What is prefill?", "What is continuous batching?", "What can you do?"],
  other: ["What is a millrace?", "Write a haiku about water", "Explain recursion to a child"],
};

/** The name of the model that is served, once it is known. */
let model = "";

async function describeServer() {
  try {
    const response = await api("info");
    if (!response.ok) throw await failureOf(response);
    const info = await response.json();
    model = info.model_id;
    byId("model").textContent = model;
    byId("model").title = model;
    document.title = `${model} · Millrace`;
    byId("max_tokens").max = info.max_total_tokens;
    byId("limits").textContent =
      `Prompts of up to ${info.max_input_tokens.toLocaleString("en")} tokens, ` +
      `${info.max_total_tokens.toLocaleString("en")} with the answer.`;
    byId("advanced").hidden = !info.grammars;
    showStarters();
  } catch (error) {
    byId("limits").textContent = error.message;
  }
  await showState();
}

async function showState() {
  const state = byId("state");
  const say = (name, text) => {
    state.className = `state ${name}`;
    state.title = text;
    state.setAttribute("aria-label", text);
  };
  try {
    const response = await api("readyz");
    if (response.ok) say("ready", "The server is ready");
    else say("troubled", `The server is not ready: ${(await failureOf(response)).message}`);
  } catch (error) {
    say("troubled", error.message);
  }
}

function showStarters() {
  const buttons = (STARTERS[model] ?? STARTERS.other).map((text) =>
    el("button", { type: "button", onclick: () => send(text) }, text),
  );
  byId("starters").replaceChildren(...buttons);
}
