"use strict";

const SAVE_MS = 500;

/** The answers that come, by the id of their conversation; each goes on while another conversation is read. */
const answers = new Map();
/** Whether the page is left: what breaks off then is no failure. */
let isLeaving = false;
window.addEventListener("pagehide", () => {
  isLeaving = true;
});

/** An answer that comes. */
class Answer {
  /** `turn` is the last one of the conversation; `on.ended` is called at the end. */
  constructor(conversation, turn, on) {
    this.conversation = conversation;
    this.turn = turn;
    this.on = on;
    /** The turn on the page, if its conversation is shown. */
    this.view = null;
    this.progress = new Progress();
    this.controller = new AbortController();
    this.frame = null;
    /** Figures of the part that the answer goes on from. */
    this.before = turn.stats ?? null;
    this.changed = () => {
      this.frame ??= requestAnimationFrame(() => this.show());
    };
  }

  get signal() {
    return this.controller.signal;
  }

  stop() {
    this.controller.abort();
  }

  /** Says something about the answer while it comes. */
  note(text) {
    this.view?.showNote(text);
  }

  /** Brings what has come to the page, once a frame, however fast it comes. */
  show() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    const { view } = this;
    if (view === null) return;
    follow(() => {
      view.showText();
      view.showBelow(this.progress.stats(this.before));
    });
  }

  /** Runs `start`, which reads the answer, to its end, whatever that is. */
  async run(start) {
    const { conversation, turn } = this;
    for (const name of ["stats", "trouble", "isStopped"]) delete turn[name];
    answers.set(conversation.id, this);
    const saving = setInterval(() => store.put(conversation.record()), SAVE_MS);
    try {
      await start(this);
    } catch (error) {
      if (isLeaving) return;
      this.fail(error);
    } finally {
      clearInterval(saving);
    }
    if (isLeaving) return;
    this.end();
  }

  fail(error) {
    const { turn } = this;
    if (error.name === "AbortError") {
      turn.isStopped = true;
      if (turn.pending) endPending(turn.pending);
    } else if (error instanceof ApiError) {
      const { message, type, status, retryAfter } = error;
      if (type === "not_resumable") turn.isStopped = true;
      else turn.trouble = { message, type, status, retryAfter };
    } else {
      this.end();
      throw error;
    }
  }

  end() {
    const { conversation, turn, progress } = this;
    delete turn.pending;
    if (progress.pieces > 0 || progress.usage || this.before) turn.stats = progress.stats(this.before);
    conversation.changedAt = Date.now();
    answers.delete(conversation.id);
    this.note(null);
    this.show();
    store.put(conversation.record()).then(() => this.on.ended(this));
  }
}
