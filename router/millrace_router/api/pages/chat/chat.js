"use strict";

const WIDE = matchMedia("(min-width: 60rem)");
const CURRENT_NAME = "millrace.current";
const NEAR_END_PX = 80;

const log = byId("log");
const prompt = byId("prompt");
const store = new ConversationStore();
const list = new ConversationList({
  open: (id) => openConversation(id),
  rename: (id, title) => rename(id, title),
  remove: (id) => remove(id),
});
const panels = {
  chats: new Panel("chats", { button: "toggle-chats", done: "chats-done", wide: matchMedia("(min-width: 78rem)") }),
  settings: new Panel("settings", { button: "toggle", done: "done", wide: WIDE }),
};
const ON_TURN = { retry, proceed, results: () => answer(newAnswer()), edit };
const attached = new AttachedImages(byId("attached"), { changed: showSend, refused: showRefused });
let conversation = new Conversation();
let views = [];

settings.load();
settings.save();
showAll();
const check = whileVisible(server.check, () => (answers.size > 0 || !server.isReady ? SOON_SECONDS : CHECK_SECONDS));
start();
if (!matchMedia("(pointer: coarse)").matches) prompt.focus();

/** Shows the conversation that the tab had. */
async function start() {
  const id = kept.get(CURRENT_NAME);
  const record = id && (await store.get(id));
  if (record && conversation.turns.length === 0) show(Conversation.of(record));
  else await list.refresh(conversation.id);
}

/** The answer to the conversation that is shown, if one comes. */
function running() {
  return answers.get(conversation.id) ?? null;
}

/** Shows a conversation, and goes on with the answer that the page was left in. */
function show(next) {
  conversation = next;
  kept.set(CURRENT_NAME, conversation.id);
  showAll();
  list.refresh(conversation.id);
  const { last } = conversation;
  if (last?.pending && running() === null) answerIn(last, resume);
}

function showAll() {
  views = conversation.turns.map((turn) => new TurnView(turn, ON_TURN));
  for (const one of answers.values()) one.view = one.conversation === conversation ? views.at(-1) : null;
  byId("turns").replaceChildren(...views.map((view) => view.node));
  place();
  log.scrollTop = log.scrollHeight;
}

/** Sets the place of every turn, and whether the conversation is empty. */
function place() {
  const isBusy = running() !== null;
  const lastUser = views.findLastIndex((view) => view.isUser);
  views.forEach((view, index) => {
    view.place({ isLast: index === (view.isUser ? lastUser : views.length - 1), isBusy });
  });
  byId("empty").hidden = views.length > 0;
  byId("plain").hidden = !conversation.isPlain;
  byId("new").disabled = byId("export").disabled = views.length === 0;
  byId("stop").hidden = !isBusy;
  byId("send").hidden = isBusy;
  showSend();
  log.setAttribute("aria-busy", String(isBusy));
}

function add(turn) {
  conversation.add(turn);
  const view = new TurnView(turn, ON_TURN);
  views.push(view);
  byId("turns").append(view.node);
}

function send(text) {
  const fields = fieldsOrFault();
  if (fields === null) return;
  const images = attached.take();
  prompt.value = "";
  fit();
  add({ role: "user", content: text, ...(images.length > 0 ? { images } : {}) });
  answer(newAnswer(), fields);
}

/** Has the last answer given anew. */
function retry() {
  const fields = fieldsOrFault();
  if (fields === null) return;
  if (conversation.last?.role === "assistant") {
    conversation.turns.pop();
    views.pop().node.remove();
  }
  answer(newAnswer(), fields);
}

/** Takes the key that was written, and asks anew what was refused without it. */
function useKey() {
  settings.save();
  if (panels.settings.isInFront) panels.settings.close();
  prompt.focus();
  if (conversation.last?.trouble?.status === 401) retry();
  else check();
}

/** Has the model go on with an answer that was cut off. */
function proceed() {
  const fields = fieldsOrFault();
  if (fields === null) return;
  const turn = conversation.last;
  // Templates cut blanks at the end, and the model writes them again.
  turn.content = turn.content.trimEnd();
  answer(turn, fields, true);
}

/** Puts other words into the user's last turn, and forgets what followed it. */
function edit(text) {
  const fields = fieldsOrFault();
  if (fields === null) return;
  const at = conversation.turns.findLastIndex((turn) => turn.role === "user");
  const { images } = conversation.turns[at];
  conversation.turns.length = at;
  for (const view of views.splice(at)) view.node.remove();
  add({ role: "user", content: text, ...(images ? { images } : {}) });
  prompt.focus();
  answer(newAnswer(), fields);
}

/** The fields of a request; null if there is none to send now. */
function fieldsOrFault() {
  if (running() !== null) return null;
  try {
    const fields = settings.fields();
    settings.showFault(null);
    return fields;
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    panels.settings.open(true);
    settings.showFault(error);
    say(error.message);
    return null;
  }
}

function newAnswer() {
  return { role: "assistant", content: "" };
}

/** Streams the model's answer into `turn`, which is new, or the last one that goes on. */
function answer(turn, fields = fieldsOrFault(), isContinuing = false) {
  if (fields === null) return;
  const { system } = settings;
  if (!isContinuing) add(turn);
  answerIn(turn, (one) => ask(one, { system, fields, isContinuing }));
}

function answerIn(turn, begin) {
  const one = new Answer(conversation, turn, { ended });
  one.view = views.at(-1);
  const running = one.run(begin);
  check();
  place();
  log.scrollTop = log.scrollHeight;
  say("Answering");
  store.put(conversation.record()).then(() => list.refresh(conversation.id));
  kept.set(CURRENT_NAME, conversation.id);
  return running;
}

/** Shows that an answer has ended. */
function ended({ conversation: whose, turn, view }) {
  list.refresh(conversation.id);
  const { trouble } = turn;
  if (trouble?.status === 401) {
    panels.settings.open(true);
    byId("key").focus();
  }
  if (trouble?.status === 0 || trouble?.status === 503) check();
  if (whose !== conversation) return;
  follow(() => {
    place();
    view?.showBelow();
  });
  // Trouble announces itself.
  say(trouble ? "" : turn.isStopped ? "Stopped" : turn.content);
}

/** Changes the conversation, and stays at its end if that is where the reader is. */
function follow(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** Says why images are not taken; null says nothing. */
function showRefused(text) {
  byId("refused").hidden = text === null;
  byId("refused").textContent = text ?? "";
}

function say(text) {
  byId("status").textContent = text.slice(0, 1000);
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  showSend();
}

/** Lets a message be sent that has a text, or images. */
function showSend() {
  byId("send").disabled = attached.isReading || (prompt.value.trim() === "" && attached.urls.length === 0);
}
