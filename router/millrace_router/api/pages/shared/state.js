"use strict";

/** Colours the dot beside the model's name, and says why: `name` is ready, troubled or nothing. */
function showDot(name, text) {
  const state = document.getElementById("state");
  state.className = `state ${name}`;
  state.title = text;
  state.setAttribute("aria-label", text);
}

/** Shows the name of the model, and of a path its last two parts; returns what is shown. */
function showModel(name) {
  const model = document.getElementById("model");
  const shown = name.startsWith("/") ? name.split("/").filter(Boolean).slice(-2).join("/") : name;
  model.textContent = shown;
  model.title = name;
  return shown;
}

/** Calls `act` at once and then every `seconds()` while the page is seen; returns a function that calls it now. */
function whileVisible(act, seconds) {
  let timer = null;
  let isActing = false;
  const now = async () => {
    clearTimeout(timer);
    if (isActing) return;
    isActing = true;
    try {
      await act();
    } finally {
      isActing = false;
      clearTimeout(timer);
      if (!document.hidden) timer = setTimeout(now, seconds() * 1000);
    }
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) now();
    else clearTimeout(timer);
  });
  now();
  return now;
}
