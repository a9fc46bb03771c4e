"use strict";

const WIDE = matchMedia("(min-width: 60rem)");
const OPEN_NAME = "millrace.settings-open";
const SAVE_MS = 500;
const NEAR_END_PX = 80;

const log = byId("log");
const prompt = byId("prompt");
let conversation = Conversation.load();
let previous = null;
let views = [];
/** The AbortController of the answer that comes, if one does. */
let running = null;

settings.load();
settings.save();
openSettings(WIDE.matches && kept.get(OPEN_NAME) !== "no");
showAll();
describeServer();
if (!matchMedia("(pointer: coarse)").matches) prompt.focus();

function showAll() {
  const on = { retry, edit };
  views = conversation.turns.map((turn) => new TurnView(turn, on));
  byId("turns").replaceChildren(...views.map((view) => view.node));
  place();
  log.scrollTop = log.scrollHeight;
}

/** Sets the place of every turn, and whether the conversation is empty. */
function place() {
  const isBusy = running !== null;
  const lastUser = views.findLastIndex((view) => view.turn.role === "user");
  views.forEach((view, index) => {
    const isLast = view.turn.role === "user" ? index === lastUser : index === views.length - 1;
    view.place({ isLast, isBusy });
  });
  byId("empty").hidden = views.length > 0;
  byId("restore").hidden = previous === null;
  byId("plain").hidden = !conversation.isPlain;
  byId("new").disabled = byId("export").disabled = views.length === 0;
  byId("stop").hidden = !isBusy;
  byId("send").hidden = isBusy;
  byId("send").disabled = prompt.value.trim() === "";
  log.setAttribute("aria-busy", String(isBusy));
}

function add(turn) {
  conversation.turns.push(turn);
  const view = new TurnView(turn, { retry, edit });
  views.push(view);
  byId("turns").append(view.node);
  return view;
}

function send(text) {
  if (running !== null) return;
  const fields = fieldsOrFault();
  if (fields === null) return;
  prompt.value = "";
  fit();
  add({ role: "user", content: text });
  answer(fields);
}

/** Has the last answer given anew. */
function retry() {
  const fields = running === null ? fieldsOrFault() : null;
  if (fields === null) return;
  if (conversation.turns.at(-1)?.role === "assistant") {
    conversation.turns.pop();
    views.pop().node.remove();
  }
  answer(fields);
}

/** Puts other words into the user's last turn, and forgets what followed it. */
function edit(text) {
  const fields = running === null ? fieldsOrFault() : null;
  if (fields === null) return;
  const at = conversation.turns.findLastIndex((turn) => turn.role === "user");
  conversation.turns.length = at;
  for (const view of views.splice(at)) view.node.remove();
  add({ role: "user", content: text });
  prompt.focus();
  answer(fields);
}

function fieldsOrFault() {
  try {
    const fields = settings.fields();
    settings.showFault(null);
    return fields;
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    openSettings(true);
    settings.showFault(error);
    byId(error.id).focus();
    say(error.message);
    return null;
  }
}

/** Streams the model's answer to what was said last. */
async function answer(fields) {
  const turn = { role: "assistant", content: "" };
  const asked = new Conversation();
  asked.turns = [...conversation.turns];
  asked.isPlain = conversation.isPlain;
  const view = add(turn);
  const progress = new Progress();
  const controller = (running = new AbortController());
  const { signal } = controller;
  const saving = setInterval(() => conversation.save(), SAVE_MS);
  const shown = new Shown(view, progress);
  place();
  log.scrollTop = log.scrollHeight;
  say("Answering");
  const take = (name) => (text) => {
    turn[name] = (turn[name] ?? "") + text;
    shown.soon();
  };
  const on = { text: take("content"), thought: take("thought") };
  try {
    await ask(asked, { model, system: settings.system, fields, progress, signal, on });
  } catch (error) {
    if (error.name === "AbortError") turn.isStopped = true;
    else if (error instanceof ApiError) showTrouble(turn, error);
    else throw error;
  } finally {
    clearInterval(saving);
    if (progress.pieces > 0 || progress.usage) turn.stats = progress.stats();
    conversation.isPlain = asked.isPlain;
    if (running === controller) running = null;
    shown.last();
    follow(() => {
      place();
      view.showBelow();
    });
    conversation.save();
    // Trouble announces itself.
    say(turn.trouble ? "" : turn.isStopped ? "Stopped" : turn.content);
  }
}

function showTrouble(turn, { message, type, status, retryAfter }) {
  turn.trouble = { message, type, status, retryAfter };
  if (status === 401) {
    openSettings(true);
    byId("key").focus();
  }
  if (status === 0 || status === 503) showState();
}

/** Brings an answer to the page once a frame, however fast it comes. */
class Shown {
  constructor(view, progress) {
    this.view = view;
    this.progress = progress;
    this.frame = null;
  }

  soon() {
    this.frame ??= requestAnimationFrame(() => this.now());
  }

  now() {
    this.frame = null;
    follow(() => {
      this.view.showText();
      this.view.showBelow(this.progress.stats());
    });
  }

  /** Shows what is left. */
  last() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.now();
  }
}

/** Changes the conversation, and stays at its end if that is where the reader is. */
function follow(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function say(text) {
  byId("status").textContent = text.slice(0, 1000);
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  byId("send").disabled = prompt.value.trim() === "";
}

/** Beside the conversation where there is room, otherwise in front of it. */
function openSettings(isOpen) {
  byId("settings").hidden = !isOpen;
  byId("toggle").setAttribute("aria-expanded", String(isOpen));
  byId("main").inert = isOpen && !WIDE.matches;
}

function closeSettings() {
  openSettings(false);
  byId("toggle").focus();
}

function startAnew(next) {
  running?.abort();
  previous = conversation.turns.length > 0 ? conversation : null;
  conversation = next;
  showAll();
  conversation.save();
  prompt.focus();
}

function download() {
  let fields = {};
  try {
    fields = settings.fields();
  } catch {
    // Without them, then.
  }
  const file = new Blob([conversation.exported(model, fields, settings.system)], { type: "application/json" });
  const url = URL.createObjectURL(file);
  const day = new Date().toISOString().slice(0, 10);
  el("a", { href: url, download: `millrace-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (text !== "") send(text);
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (sends(event)) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (!byId("settings").hidden && !WIDE.matches) closeSettings();
  else running?.abort();
});
byId("toggle").addEventListener("click", () => {
  const isOpen = byId("settings").hidden;
  openSettings(isOpen);
  if (WIDE.matches) kept.set(OPEN_NAME, isOpen ? "yes" : "no");
  else byId("done").focus();
});
byId("done").addEventListener("click", closeSettings);
WIDE.addEventListener("change", () => openSettings(WIDE.matches && kept.get(OPEN_NAME) !== "no"));
byId("new").addEventListener("click", () => startAnew(new Conversation()));
byId("restore").addEventListener("click", () => {
  const back = previous;
  startAnew(back);
  previous = null;
});
byId("export").addEventListener("click", download);
byId("reset").addEventListener("click", () => settings.reset());
byId("form").addEventListener("input", () => {
  settings.save();
  settings.showFault(null);
});
byId("form").addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("pagehide", () => conversation.save());
