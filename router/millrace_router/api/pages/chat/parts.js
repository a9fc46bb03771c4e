"use strict";

// Small parts of a turn.

function quietButton(label, act) {
  return el("button", { class: "quiet", type: "button", onclick: act }, label);
}

function troubleElement({ message, type, status, retryAfter }, retry) {
  const details = [status ? `HTTP ${status}` : null, type || null];
  if (retryAfter !== null && retryAfter !== undefined) details.push(`try again in ${retryAfter} s`);
  const small = el("small", {}, details.filter(Boolean).join(" · "));
  const button = retry && el("button", { class: "solid", type: "button", onclick: retry }, "Retry");
  return el("div", { class: "trouble", role: "alert" }, el("p", {}, message, small), button);
}

function metaElement(stats, { isStopped }) {
  const said = [];
  if (stats) {
    const { tokens, promptTokens, cachedTokens, firstTokenSeconds, tokensPerSecond, finish } = stats;
    if (tokensPerSecond !== null) said.push(`${number(tokensPerSecond)} tokens/s`);
    if (firstTokenSeconds !== null) said.push(`first token ${duration(firstTokenSeconds)}`);
    if (promptTokens === null) said.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    else said.push(`${promptTokens} tokens in${cachedTokens ? ` (${cachedTokens} cached)` : ""}, ${tokens} out`);
    if (finish === "length") said.push("cut at max tokens");
  }
  if (isStopped) said.push("stopped");
  return el("div", { class: "meta" }, ...said.map((one) => el("span", {}, one)));
}

function number(value) {
  return value < 100 ? value.toFixed(1) : value.toFixed(0);
}

function duration(seconds) {
  return seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
}

/** A field and two buttons in place of a text; Enter sends it, Escape leaves it. */
function editorElement(text, { send, leave, mayBeEmpty }) {
  const area = el("textarea", { class: "field", rows: "3", "aria-label": "Edit the message" });
  area.value = text;
  const submit = () => {
    if (mayBeEmpty || area.value.trim() !== "") send(area.value.trim());
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      leave();
    }
    if (sends(event)) {
      event.preventDefault();
      submit();
    }
  });
  const save = el("button", { class: "solid", type: "button", onclick: submit }, "Send");
  return el("div", {}, area, el("div", { class: "editor-buttons" }, quietButton("Cancel", leave), save));
}

/** Whether a key sends the message; where fingers type, only the button does. */
function sends(event) {
  const isTouch = matchMedia("(pointer: coarse)").matches;
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch;
}
