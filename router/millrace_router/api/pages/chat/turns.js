"use strict";

/** One turn on the page. */
class TurnView {
  /** `on` has what its buttons do: `retry()`, `proceed()`, `results()` and `edit(text)`. */
  constructor(turn, on) {
    this.turn = turn;
    this.on = on;
    this.isLast = false;
    this.isBusy = false;
    this.isUser = turn.role === "user";
    this.text = el("div", { class: this.isUser ? "text" : "text md" });
    this.below = el("div", {});
    this.note = el("p", { class: "note", role: "status", hidden: true });
    this.thought = el("div", { class: "words" });
    this.fold = el("details", { class: "thought", hidden: true }, el("summary", {}), this.thought);
    this.calls = new CallsView(turn, () => on.results());
    const who = el("span", { class: "visually-hidden" }, this.isUser ? "You" : "Answer");
    const parts = [imagesElement(turn.images), this.fold, this.text, this.calls.node, this.note, this.below];
    this.node = el("li", { class: `turn ${turn.role}` }, who, ...parts);
    this.markdown = this.isUser ? null : new Markdown(this.text);
    this.showText();
    this.showBelow();
  }

  /** Says where the turn stands: `isLast` of its speaker, `isBusy` while an answer comes. */
  place({ isLast, isBusy }) {
    if (isLast === this.isLast && isBusy === this.isBusy) return;
    this.isLast = isLast;
    this.isBusy = isBusy;
    this.showText();
    this.showBelow();
  }

  get isComing() {
    return this.isBusy && this.isLast && !this.isUser;
  }

  showThought() {
    const { content, thought, calls } = this.turn;
    this.fold.hidden = !thought;
    if (!thought) return;
    this.fold.firstChild.textContent = this.isComing && content === "" && !calls ? "Thinking …" : "Thought";
    if (this.thought.textContent !== thought) this.thought.textContent = thought;
  }

  showText() {
    const { content, calls, isGuided } = this.turn;
    this.showThought();
    this.calls.show(this.isLast && !this.isBusy);
    if (this.isUser) {
      this.text.textContent = content;
      return;
    }
    const json = content === "" ? null : jsonListing(content);
    if (json) this.markdown.replace(json);
    else if (isGuided && content !== "") this.markdown.replace(listing("json", content));
    else if (content !== "") this.markdown.show(content);
    else if (this.isComing && !calls) this.markdown.replace(el("span", { class: "waiting" }));
    else this.markdown.replace();
  }

  /** Says something while the answer comes; null says nothing. */
  showNote(text) {
    this.note.hidden = text === null;
    if (this.note.textContent !== (text ?? "")) this.note.textContent = text ?? "";
  }

  showBelow(stats = this.turn.stats) {
    const { content, thought, trouble, isStopped, calls } = this.turn;
    this.showThought();
    const parts = [];
    if (trouble) parts.push(troubleElement(trouble, this.isLast && !this.isBusy ? this.on.retry : null));
    const row = this.isComing ? [] : this.buttons();
    const hasMore = content !== "" || thought || isStopped || calls;
    if (!this.isUser && hasMore) row.push(metaElement(stats, { isStopped }));
    if (row.length > 0) parts.push(el("div", { class: "actions" }, ...row));
    this.below.replaceChildren(...parts);
  }

  buttons() {
    const { trouble, content } = this.turn;
    const isNow = this.isLast && !this.isBusy;
    if (this.isUser && !this.isLast) return [];
    const buttons = content === "" ? [] : [copyButton(() => content)];
    if (this.isUser && isNow) buttons.unshift(quietButton("Edit", () => this.edit()));
    if (!this.isUser && isNow && this.canProceed) buttons.push(quietButton("Continue", this.on.proceed));
    if (!this.isUser && isNow && !trouble) buttons.push(quietButton("Retry", this.on.retry));
    return buttons;
  }

  /** Whether the model can go on with the text where it was cut off. */
  get canProceed() {
    const { content, calls, isGuided, isStopped, stats, trouble } = this.turn;
    if (content.trim() === "" || calls || isGuided) return false;
    return isStopped || Boolean(trouble) || stats?.finish === "length";
  }

  /** Lets the user write the turn anew. */
  edit() {
    const leave = () => {
      this.node.classList.remove("editing");
      editor.replaceWith(this.text, this.below);
      this.below.querySelector("button")?.focus();
    };
    const mayBeEmpty = Boolean(this.turn.images);
    const editor = editorElement(this.turn.content, { send: this.on.edit, leave, mayBeEmpty });
    this.node.classList.add("editing");
    this.below.remove();
    this.text.replaceWith(editor);
    editor.querySelector("textarea").focus();
  }
}
