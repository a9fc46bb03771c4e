"use strict";

// Several conversations: opened, named, removed, written to files and read from them.

/** Shows a conversation of the list; an answer to another one goes on. */
async function openConversation(id) {
  if (panels.chats.isInFront) panels.chats.close();
  if (id === conversation.id) return;
  const live = answers.get(id)?.conversation;
  const record = live ? null : await store.get(id);
  if (live) show(live);
  else if (record) show(Conversation.of(record));
  else await list.refresh(conversation.id);
}

function startAnew() {
  if (panels.chats.isInFront) panels.chats.close();
  show(new Conversation());
  prompt.focus();
}

async function rename(id, title) {
  if (id === conversation.id) conversation.title = title;
  const record = id === conversation.id ? conversation.record() : await store.get(id);
  if (record) await store.put({ ...record, title });
  await list.refresh(conversation.id);
}

async function remove(id) {
  answers.get(id)?.stop();
  await store.remove(id);
  if (id === conversation.id) show(new Conversation());
  else await list.refresh(conversation.id);
  say("Deleted");
  if (panels.chats.isInFront) panels.chats.done.focus();
  else prompt.focus();
}

/** Saves the conversation that is shown as a file. */
function exportShown() {
  let fields = {};
  try {
    fields = settings.fields();
  } catch {
    // Without them, then.
  }
  saveFile("millrace", exportedOne(conversation, { model: server.model, fields, system: settings.system }));
}

async function exportAll() {
  saveFile("millrace-conversations", exportedAll(await store.all()));
}

/** Adds the conversations of a file that are not here yet, and shows the first of them. */
async function importFile(file) {
  const said = byId("import-said");
  try {
    const read = imported(await file.text());
    const added = newOnes(read, await store.all());
    for (const one of added) await store.put(one.record());
    if (added.length > 0) show(added[0]);
    said.textContent = importText(read.length, read.length - added.length);
  } catch (error) {
    said.textContent = `The file cannot be read: ${error.message}.`;
  }
}

/** Shows what another tab has done in the meantime. */
async function catchUp() {
  if (document.hidden) return;
  await list.refresh(conversation.id);
  const entry = list.entries.find(({ id }) => id === conversation.id);
  if (entry && entry.changedAt > conversation.changedAt && running() === null) {
    show(Conversation.of(await store.get(conversation.id)));
  }
}

byId("new").addEventListener("click", startAnew);
byId("export").addEventListener("click", exportShown);
byId("export-all").addEventListener("click", exportAll);
byId("import").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file) await importFile(file);
  target.value = "";
});
document.addEventListener("visibilitychange", catchUp);
