"use strict";

/** The list of conversations beside the chat. */
class ConversationList {
  /** `on` has what its buttons do: `open(id)`, `rename(id, title)` and `remove(id)`. */
  constructor(on) {
    this.on = on;
    this.node = byId("conversations");
    this.current = null;
    this.entries = [];
  }

  /** Reads the list anew; `current` is the id of the conversation that is shown. */
  async refresh(current) {
    this.current = current;
    this.entries = await store.list();
    this.show();
  }

  show() {
    const focused = this.node.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    this.node.replaceChildren(...this.entries.map((entry) => this.entryElement(entry)));
    byId("no-conversations").hidden = this.entries.length > 0;
    byId("export-all").disabled = this.entries.length === 0;
    byId("keeping").textContent = store.isKeeping
      ? "Conversations stay in this browser until you delete them."
      : "This browser keeps nothing: conversations go with the page.";
    if (focused) this.node.querySelector(`[data-focus="${focused}"]`)?.focus();
  }

  entryElement({ id, title, changedAt }) {
    const isCurrent = id === this.current;
    const open = el(
      "button",
      { class: "entry", type: "button", "data-focus": id, "aria-current": isCurrent ? "true" : null },
      el("span", { class: "title" }, title),
      " ",
      el("time", { datetime: new Date(changedAt).toISOString() }, dayOf(changedAt)),
    );
    open.addEventListener("click", () => this.on.open(id));
    if (!isCurrent) return el("li", {}, open);
    const rename = quietButton("Rename", () => this.rename(open, { id, title }));
    const tools = el("div", { class: "entry-tools" }, rename, removeButton(() => this.on.remove(id)));
    return el("li", {}, open, tools);
  }

  /** Puts a field in place of a title. */
  rename(open, { id, title }) {
    const input = el("input", { class: "field", type: "text", maxlength: "80", "aria-label": "Title" });
    input.value = title;
    let isLeft = false;
    const leave = (isSaved) => {
      if (isLeft) return;
      isLeft = true;
      const wanted = input.value.trim();
      if (isSaved && wanted !== "" && wanted !== title) this.on.rename(id, wanted);
      else this.show();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") leave(true);
      if (event.key !== "Escape") return;
      event.preventDefault();
      leave(false);
    });
    input.addEventListener("blur", () => leave(true));
    open.replaceWith(input);
    input.select();
    input.focus();
  }
}

/** A button that asks once more before it removes. */
function removeButton(remove) {
  const button = quietButton("Delete", () => {
    if (button.textContent === "Delete") button.textContent = "Really delete?";
    else remove();
  });
  button.addEventListener("blur", () => {
    button.textContent = "Delete";
  });
  return button;
}

function dayOf(time) {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date().toDateString();
  const form = isToday ? { hour: "2-digit", minute: "2-digit", hourCycle: "h23" } : { day: "numeric", month: "short" };
  return date.toLocaleString("en", form);
}
