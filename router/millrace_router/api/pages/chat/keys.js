"use strict";

// What keys and buttons of the page do.

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("send").disabled) send(prompt.value.trim());
});
byId("attach").addEventListener("click", () => byId("image-files").click());
byId("image-files").addEventListener("change", async ({ target }) => {
  await attached.add([...target.files]);
  target.value = "";
  prompt.focus();
});
document.addEventListener("paste", (event) => {
  const files = server.images === null ? [] : pastedFiles(event.clipboardData);
  if (files.length === 0) return;
  event.preventDefault();
  attached.add(files);
});
document.addEventListener("dragover", (event) => {
  if (server.images !== null && event.dataTransfer.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (server.images === null || event.dataTransfer.files.length === 0) return;
  event.preventDefault();
  attached.add([...event.dataTransfer.files]);
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
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault();
  useKey();
});
window.addEventListener("pagehide", () => {
  if (conversation.turns.length > 0) store.put(conversation.record());
});
// A page that the browser took out of its memory has lost its connections.
window.addEventListener("pageshow", ({ persisted }) => {
  if (persisted) location.reload();
});
