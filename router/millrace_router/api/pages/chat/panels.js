"use strict";

/** A panel beside the conversation where there is room, otherwise in front of it. */
class Panel {
  /** `button` opens it, `done` closes it where it is in front; `wide` matches where there is room. */
  constructor(id, { button, done, wide }) {
    this.node = byId(id);
    this.button = byId(button);
    this.done = byId(done);
    this.wide = wide;
    this.name = `millrace.${id}-open`;
    this.button.addEventListener("click", () => this.toggle());
    this.done.addEventListener("click", () => this.close());
    wide.addEventListener("change", () => this.open(this.isUsual));
    this.open(this.isUsual);
  }

  get isOpen() {
    return !this.node.hidden;
  }

  /** Whether it is in front of the conversation. */
  get isInFront() {
    return this.isOpen && !this.wide.matches;
  }

  /** Whether it is open when nobody asks. */
  get isUsual() {
    return this.wide.matches && kept.get(this.name) !== "no";
  }

  open(isOpen) {
    this.node.hidden = !isOpen;
    this.node.classList.toggle("in-front", !this.wide.matches);
    this.button.setAttribute("aria-expanded", String(isOpen));
    byId("main").inert = document.querySelector(".panel.in-front:not([hidden])") !== null;
  }

  toggle() {
    const isOpen = !this.isOpen;
    this.open(isOpen);
    if (this.wide.matches) kept.set(this.name, isOpen ? "yes" : "no");
    else if (isOpen) this.done.focus();
  }

  close() {
    this.open(false);
    this.button.focus();
  }
}
