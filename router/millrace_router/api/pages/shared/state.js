"use strict";

/** Colours the dot beside the model's name, and says why: `name` is ready, troubled or nothing. */
function showDot(name, text) {
  const state = document.getElementById("state");
  state.className = `state ${name}`;
  state.title = text;
  state.setAttribute("aria-label", text);
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
