"use strict";

/** Where the API is, also behind a proxy that serves it under a path. */
const BASE = new URL(document.documentElement.dataset.root ?? location.pathname.replace(/(docs\/?|status)$/, ""), location.origin);
const KEY_NAME = "millrace.key";

/**
 * Makes an element. Functions are listeners (`onclick`), true and false attributes that are there or not.
 * Children are elements, or text that stays text.
 */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const byId = (id) => document.getElementById(id);

for (const link of document.querySelectorAll("[data-path]")) link.href = new URL(link.dataset.path, BASE);

/** What is kept until the tab is closed; a browser that keeps nothing is no error. */
const kept = {
  get(name) {
    try {
      return sessionStorage.getItem(name);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(name, value);
    } catch {
      // Full, or forbidden: the page works on, and forgets.
    }
  },
};

/** Puts text on the clipboard; over plain HTTP browsers allow that only to a selection. */
async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = el("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** A button that copies what `source` returns, and says that it has. */
function copyButton(source, label = "Copy") {
  const button = el("button", { class: "quiet", type: "button" }, label);
  button.addEventListener("click", async () => {
    const copied = await copyText(source()).then(
      () => "Copied",
      () => "Not allowed",
    );
    button.textContent = copied;
    setTimeout(() => {
      button.textContent = label;
    }, 1500);
  });
  return button;
}
