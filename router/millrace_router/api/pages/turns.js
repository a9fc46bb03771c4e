"use strict";

/** One turn on the page. */
class TurnView {
  /** `on` has what its buttons do: `retry()` and `edit(text)`. */
  constructor(turn, on) {
    this.turn = turn;
    this.on = on;
    this.isLast = false;
    this.isBusy = false;
    this.text = el("div", { class: turn.role === "user" ? "text" : "text md" });
    this.below = el("div", {});
    this.thought = el("div", { class: "words" });
    this.fold = el("details", { class: "thought", hidden: true }, el("summary", {}), this.thought);
    const who = turn.role === "user" ? "You" : "Answer";
    this.node = el("li", { class: `turn ${turn.role}` }, el("span", { class: "visually-hidden" }, who), this.fold, this.text, this.below);
    this.markdown = turn.role === "user" ? null : new Markdown(this.text);
    this.showText();
    this.showBelow();
  }

  /** Says where the turn stands: `isLast` of its speaker, `isBusy` while an answer comes. */
  place({ isLast, isBusy }) {
    if (isLast === this.isLast && isBusy === this.isBusy) return;
    this.isLast = isLast;
    this.isBusy = isBusy;
    this.showBelow();
  }

  showThought() {
    const { content, thought } = this.turn;
    this.fold.hidden = !thought;
    if (!thought) return;
    const isComing = this.isBusy && this.isLast && content === "";
    this.fold.firstChild.textContent = isComing ? "Thinking …" : "Thought";
    if (this.thought.textContent !== thought) this.thought.textContent = thought;
  }

  showText() {
    const { content } = this.turn;
    this.showThought();
    if (this.markdown === null) {
      this.text.textContent = content;
      return;
    }
    if (content !== "") this.markdown.show(content);
    else if (this.isBusy) this.text.replaceChildren(el("span", { class: "waiting" }));
    else this.text.replaceChildren();
  }

  showBelow(stats = this.turn.stats) {
    const { content, role, thought, trouble, isStopped } = this.turn;
    this.showThought();
    const isComing = this.isBusy && this.isLast && role !== "user";
    const parts = [];
    if (trouble) parts.push(troubleElement(trouble, this.isLast && !this.isBusy ? this.on.retry : null));
    const row = isComing ? [] : this.buttons();
    if (role !== "user" && (content !== "" || thought || isStopped)) row.push(metaElement(stats, { isStopped }));
    if (row.length > 0) parts.push(el("div", { class: "actions" }, ...row));
    this.below.replaceChildren(...parts);
    if (this.markdown !== null && content === "") this.showText();
  }

  buttons() {
    const { role, trouble, content } = this.turn;
    if (content === "" || (role === "user" && !this.isLast)) return [];
    const buttons = [copyButton(() => content)];
    if (this.isLast && !this.isBusy && role === "user") {
      buttons.unshift(el("button", { class: "quiet", type: "button", onclick: () => this.edit() }, "Edit"));
    }
    if (this.isLast && !this.isBusy && role !== "user" && !trouble) {
      buttons.push(el("button", { class: "quiet", type: "button", onclick: this.on.retry }, "Retry"));
    }
    return buttons;
  }

  /** Lets the user write the turn anew. */
  edit() {
    const area = el("textarea", { class: "field", rows: "3", "aria-label": "Edit the message" });
    area.value = this.turn.content;
    const leave = () => {
      this.node.classList.remove("editing");
      editor.replaceWith(this.text, this.below);
      this.below.querySelector("button")?.focus();
    };
    const send = () => {
      const text = area.value.trim();
      if (text !== "") this.on.edit(text);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (sends(event)) {
        event.preventDefault();
        send();
      }
    });
    const buttons = el(
      "div",
      { class: "editor-buttons" },
      el("button", { class: "quiet", type: "button", onclick: leave }, "Cancel"),
      el("button", { class: "solid", type: "button", onclick: send }, "Send"),
    );
    const editor = el("div", {}, area, buttons);
    this.node.classList.add("editing");
    this.below.remove();
    this.text.replaceWith(editor);
    area.focus();
  }
}

/** Whether a key sends the message; where fingers type, only the button does. */
function sends(event) {
  const isTouch = matchMedia("(pointer: coarse)").matches;
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch;
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
    if (promptTokens === null) said.push(`${tokens} tokens`);
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
