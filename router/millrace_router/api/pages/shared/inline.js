"use strict";

// What is inside a line of Markdown: emphasis, code, formulas, links. One pass; the work grows as the text does.

const MAX_INLINE = 20000;
const MAX_INLINE_NESTING = 8;
/** What a backslash makes plain. Brackets are missing: `\(` and `\[` begin a formula. */
const ESCAPED = new Set("\\`*_{}#+-.!~|<>$");
/** Kinds of emphasis, of which `***` opens or closes two. */
const EM = 1;
const STRONG = 2;
const STRUCK = 4;
const LABEL = 8;
const KINDS = { "*": [0, EM, STRONG, EM | STRONG], _: [0, EM, STRONG, EM | STRONG], "~": [0, 0, STRUCK] };
const TAGS = [
  [EM, "em"],
  [STRONG, "strong"],
  [STRUCK, "s"],
];

/** Text with its emphasis, code and links, as nodes; formulas in LaTeX stay as they are written. */
function inline(text) {
  return text.length > MAX_INLINE ? [text] : new InlineScanner(text).nodes();
}

/** Reads a text from its start to its end, and never goes back. */
class InlineScanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    /** Where the text begins that is not in `out` yet. */
    this.from = 0;
    this.out = [];
    /** Marks that may be closed yet: `{mark, kinds, text, index, depth}`, with their place in `out`. */
    this.openers = [];
    this.labels = [];
    /** How many openers there are of each mark and kind. */
    this.open = new Map();
    this.ahead = new Map();
    this.runs = null;
    this.environments = null;
  }

  nodes() {
    while (this.at < this.text.length) {
      const read = READERS.get(this.text[this.at]);
      if (read === undefined || !read(this)) this.at += 1;
    }
    this.flush();
    return this.out;
  }

  flush() {
    if (this.at > this.from) this.out.push(this.text.slice(this.from, this.at));
    this.from = this.at;
  }

  /** Puts `node` in place of the text up to `end`. */
  take(end, node) {
    this.flush();
    this.out.push(node);
    this.at = this.from = end;
    return true;
  }

  /** Leaves the text up to `end` as it is. */
  skip(end) {
    this.at = Math.min(end, this.text.length);
    return true;
  }

  /** Where `mark` is next, at `from` or later; Infinity without one. Each part of the text is searched once. */
  next(mark, from, fits = () => true) {
    const known = this.ahead.get(mark) ?? -1;
    if (known >= from) return known;
    let at = this.text.indexOf(mark, from);
    while (at >= 0 && !fits(this.text, at)) at = this.text.indexOf(mark, at + 1);
    const next = at < 0 ? Infinity : at;
    this.ahead.set(mark, next);
    return next;
  }

  /** Where the next run of so many backticks begins; Infinity without one. */
  nextRun(length, from) {
    this.runs ??= runsOf(this.text);
    const starts = this.runs.get(length) ?? [];
    while (starts.at(-1) < from) starts.pop();
    return starts.at(-1) ?? Infinity;
  }

  has(mark, kinds) {
    return TAGS.some(([kind]) => kinds & kind && this.open.get(mark + kind));
  }

  count(mark, kinds, change) {
    for (const [kind] of TAGS) {
      if (kinds & kind) this.open.set(mark + kind, (this.open.get(mark + kind) ?? 0) + change);
    }
  }

  begin(mark, kinds, text) {
    const opener = { mark, kinds, text, index: this.out.length, depth: 0, isGone: false };
    this.openers.push(opener);
    this.out.push(text);
    this.count(mark, kinds, 1);
    return opener;
  }

  /** Gives up the last opener, which stays text. */
  drop() {
    const { mark, kinds, depth } = this.openers.at(-1);
    this.openers.pop().isGone = true;
    this.count(mark, kinds, -1);
    this.deepen(depth);
  }

  deepen(depth) {
    const last = this.openers.at(-1);
    if (last) last.depth = Math.max(last.depth, depth);
  }

  /** Closes what openers there are for a mark of these kinds; returns the kinds without an opener. */
  close(mark, kinds) {
    let left = kinds;
    while (this.has(mark, left)) {
      while (this.openers.at(-1).mark !== mark || !(this.openers.at(-1).kinds & left)) this.drop();
      const opener = this.openers.at(-1);
      const used = opener.kinds & left;
      const depth = opener.depth + 1;
      if (depth > MAX_INLINE_NESTING) {
        this.drop();
        continue;
      }
      let nodes = this.out.splice(opener.index + 1);
      for (const [kind, tag] of TAGS) if (used & kind) nodes = [el(tag, {}, ...nodes)];
      this.count(mark, used, -1);
      opener.kinds &= ~used;
      opener.text = opener.text.slice(0, opener.text.length - lengthOf(used));
      this.out[opener.index] = opener.text;
      this.out.push(...nodes);
      opener.depth = depth;
      if (opener.kinds === 0) this.drop();
      left &= ~used;
    }
    return left;
  }
}

function lengthOf(kinds) {
  return (kinds & EM ? 1 : 0) + (kinds & STRONG ? 2 : 0) + (kinds & STRUCK ? 2 : 0);
}

/** The starts of runs of backticks by their length, the last start first. */
function runsOf(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  for (const starts of runs.values()) starts.reverse();
  return runs;
}

/** Where each LaTeX environment ends, by its start. */
function environmentsOf(text) {
  const ends = new Map();
  const open = [];
  for (const { 0: mark, index } of text.matchAll(/\\(?:begin|end)\{/g)) {
    if (mark === "\\begin{") open.push(index);
    else if (open.length > 0) ends.set(open.pop(), index);
  }
  return ends;
}

function runLength({ text, at }) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function isBlank(char) {
  return char === undefined || char.trim() === "";
}

function isWord(char) {
  return char !== undefined && /[\p{L}\p{N}_]/u.test(char);
}

const READERS = new Map([
  ["\\", readBackslash],
  ["$", readDollars],
  ["`", readCode],
  ["*", readEmphasis],
  ["_", readEmphasis],
  ["~", readEmphasis],
  ["!", readImage],
  ["[", readLabel],
  ["]", readAddress],
  ["<", readFramed],
  ["h", readBare],
  ["H", readBare],
]);

function readBackslash(scanner) {
  const { text, at } = scanner;
  const char = text[at + 1];
  if (char === "(" || char === "[") return readFormula(scanner, at + 2, char === "(" ? "\\)" : "\\]");
  if (text.startsWith("\\begin{", at)) {
    scanner.environments ??= environmentsOf(text);
    const end = scanner.environments.get(at);
    const last = end === undefined ? Infinity : scanner.next("}", end);
    return scanner.skip(last === Infinity ? at + 1 : last + 1);
  }
  return ESCAPED.has(char) ? scanner.take(at + 2, char) : scanner.skip(at + 1);
}

/** Leaves a formula as it is, up to its closing mark; without one, only what opens it. */
function readFormula(scanner, from, mark) {
  const end = scanner.next(mark, from);
  return scanner.skip(end === Infinity ? from : end + mark.length);
}

/** `$$…$$`, and `$…$` on one line where neither end can be a price or a name in code. */
function readDollars(scanner) {
  const { text, at } = scanner;
  if (text[at + 1] === "$") return readFormula(scanner, at + 2, "$$");
  if (isBlank(text[at + 1]) || isWord(text[at - 1])) return scanner.skip(at + 1);
  const end = scanner.next("$", at + 1, closesFormula);
  const isCut = scanner.next("`", at) < end || scanner.next("\n", at) < end;
  return scanner.skip(isCut || end === Infinity ? at + 1 : end + 1);
}

function closesFormula(text, at) {
  return !isBlank(text[at - 1]) && text[at - 1] !== "\\" && !/[\d$]/.test(text[at + 1] ?? "");
}

function readCode(scanner) {
  const { text, at } = scanner;
  const from = at + runLength(scanner);
  const end = scanner.nextRun(from - at, from);
  if (end === Infinity) return scanner.skip(from);
  const code = text.slice(from, end);
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
  return scanner.take(end + from - at, el("code", {}, isPadded ? code.slice(1, -1) : code));
}

function readEmphasis(scanner) {
  const { text, at } = scanner;
  const mark = text[at];
  const end = at + runLength(scanner);
  const kinds = KINDS[mark][end - at] ?? 0;
  if (kinds === 0) return scanner.skip(end);
  const isInWord = mark === "_" && isWord(text[at - 1]) && isWord(text[end]);
  const opens = !isBlank(text[end]) && !(mark === "_" && isWord(text[at - 1]));
  const closes = !isBlank(text[at - 1]) && !(mark === "_" && isWord(text[end]));
  if (isInWord || !(opens || closes)) return scanner.skip(end);
  scanner.flush();
  const left = closes ? scanner.close(mark, kinds) : kinds;
  const rest = mark.repeat(lengthOf(left));
  if (left !== 0 && opens) scanner.begin(mark, left, rest);
  else if (left !== 0) scanner.out.push(rest);
  scanner.at = scanner.from = end;
  return true;
}

function readImage(scanner) {
  return scanner.text[scanner.at + 1] === "[" && readLabel(scanner);
}

function readLabel(scanner) {
  const mark = scanner.text[scanner.at] === "!" ? "![" : "[";
  scanner.flush();
  scanner.labels.push(scanner.begin("[", LABEL, mark));
  scanner.at = scanner.from = scanner.at + mark.length;
  return true;
}
