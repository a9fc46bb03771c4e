"use strict";

const DATABASE = "millrace";
const CONVERSATIONS = "conversations";

/**
 * Conversations in this browser's IndexedDB, as records with `id`, `title` and `changedAt`. Where the browser forbids
 * that, they are kept until the page is left, and `isKeeping` is false.
 */
class ConversationStore {
  constructor() {
    this.isKeeping = true;
    this.memory = new Map();
    /** Those that an answer which still comes must not bring back. */
    this.removed = new Set();
    this.opening = this.open().catch(() => {
      this.isKeeping = false;
      return null;
    });
  }

  open() {
    return new Promise((resolve, reject) => {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => {
        const store = request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
        // Its keys are all that the list shows, so that no conversation is read for it.
        store.createIndex("list", ["changedAt", "title"]);
      };
      request.onsuccess = () => {
        // A later version of the page, in another tab, has its own layout.
        request.result.onversionchange = () => request.result.close();
        resolve(request.result);
      };
      request.onerror = () => reject(request.error);
    });
  }

  /** `{id, title, changedAt}` of every conversation, the latest first. */
  async list() {
    const found = [];
    await this.work("readonly", (store) => {
      store.index("list").openKeyCursor(null, "prev").onsuccess = ({ target }) => {
        const cursor = target.result;
        if (!cursor) return;
        const [changedAt, title] = cursor.key;
        found.push({ id: cursor.primaryKey, title, changedAt });
        cursor.continue();
      };
    });
    for (const { id, title, changedAt } of this.memory.values()) found.push({ id, title, changedAt });
    return found.sort((one, other) => other.changedAt - one.changedAt);
  }

  /** All records. */
  async all() {
    const stored = await this.work("readonly", (store) => store.getAll());
    return [...this.memory.values(), ...(stored ?? [])];
  }

  async get(id) {
    return this.memory.get(id) ?? (await this.work("readonly", (store) => store.get(id))) ?? null;
  }

  async put(record) {
    if (this.removed.has(record.id)) return;
    const isStored = await this.work("readwrite", (store) => store.put(record));
    if (isStored === null) this.memory.set(record.id, structuredClone(record));
    else this.memory.delete(record.id);
  }

  async remove(id) {
    this.removed.add(id);
    this.memory.delete(id);
    await this.work("readwrite", (store) => store.delete(id));
  }

  /** Runs one transaction; what it asked for, or null if the browser keeps nothing. */
  async work(mode, act) {
    const database = await this.opening;
    if (database === null) return null;
    try {
      return await new Promise((resolve, reject) => {
        const transaction = database.transaction(CONVERSATIONS, mode);
        const request = act(transaction.objectStore(CONVERSATIONS));
        transaction.oncomplete = () => resolve(request?.result);
        transaction.onabort = () => reject(transaction.error);
      });
    } catch {
      // The disk is full, or the database was closed.
      this.isKeeping = false;
      return null;
    }
  }
}
