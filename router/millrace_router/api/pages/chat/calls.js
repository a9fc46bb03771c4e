"use strict";

/** The calls of tools in a turn, with fields for their results. */
class CallsView {
  /** `send` is called when every call has its result. */
  constructor(turn, send) {
    this.turn = turn;
    this.send = send;
    this.shown = "";
    this.node = el("div", { class: "calls" });
  }

  /** Shows them; with `canAnswer` the results can be written. */
  show(canAnswer) {
    const calls = this.turn.calls ?? [];
    const state = JSON.stringify([calls, canAnswer]);
    // What is written into a field stays there while nothing changes.
    if (state === this.shown) return;
    this.shown = state;
    const open = calls.filter(({ result }) => result === undefined);
    const nodes = calls.map((call) => callElement(call));
    if (canAnswer && open.length > 0) nodes.push(this.form(open));
    this.node.replaceChildren(...nodes);
  }

  form(open) {
    const areas = open.map((call) => {
      const area = el("textarea", { class: "field code", rows: "2", spellcheck: "false" });
      return { call, area, label: el("label", {}, `Result of ${call.name}`, area) };
    });
    const submit = (event) => {
      event.preventDefault();
      for (const { call, area } of areas) call.result = area.value;
      this.send();
    };
    const button = el("button", { class: "solid", type: "submit" }, areas.length > 1 ? "Send results" : "Send result");
    return el("form", { class: "results", onsubmit: submit }, ...areas.map(({ label }) => label), button);
  }
}

function callElement({ name, arguments: text, result }) {
  const summary = el("summary", {}, "Calls ", el("code", {}, name));
  const parts = [jsonListing(text, "arguments") ?? listing("arguments", text)];
  if (result !== undefined) parts.push(jsonListing(result, "result") ?? listing("result", result));
  return el("details", { class: "call", open: true }, summary, ...parts);
}
