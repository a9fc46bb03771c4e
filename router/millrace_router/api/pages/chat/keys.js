"use strict";

// What keys and buttons of the page do.

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (text !== "") send(text);
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => {
  running()?.stop();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  const inFront = Object.values(panels).find((panel) => panel.isInFront);
  if (inFront) inFront.close();
  else running()?.stop();
});
byId("reset").addEventListener("click", () => settings.reset());
byId("form").addEventListener("input", () => {
  settings.save();
  settings.showFault(null);
});
byId("form").addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("pagehide", () => {
  if (conversation.turns.length > 0) store.put(conversation.record());
});
// A page that the browser took out of its memory has lost its connections.
window.addEventListener("pageshow", ({ persisted }) => {
  if (persisted) location.reload();
});
