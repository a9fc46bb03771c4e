"use strict";

// Markdown as models write it, made into elements one by one: what a model says is never parsed as HTML.

const MAX_NESTING = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const TASK = /^\[([ xX])\][ \t]+/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|)$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const TABLE_RULE = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
/** Shows a text that grows; parts that are finished stay the elements that they are. */
class Markdown {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  /** Shows something else than Markdown. */
  replace(...nodes) {
    this.sources = [];
    this.node.replaceChildren(...nodes);
  }

  /** Shows all of `text`. */
  show(text) {
    const blocks = blocksOf(text.split(/\r\n|\n|\r/));
    blocks.forEach((block, index) => {
      const source = block.lines.join("\n");
      if (this.sources[index] === source) return;
      this.sources[index] = source;
      const made = blockElement(block, 0);
      const old = this.node.children[index];
      if (old) old.replaceWith(made);
      else this.node.append(made);
    });
    this.sources.length = blocks.length;
    while (this.node.children.length > blocks.length) this.node.lastElementChild.remove();
  }
}

/** Cuts lines into blocks: `{kind, lines}`. */
function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const kind = kindAt(lines, at);
    const end = END_OF[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function kindAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  if (line.includes("|") && lines[at + 1]?.includes("-") && TABLE_RULE.test(lines[at + 1])) return "table";
  return "paragraph";
}

const one = (_, at) => at + 1;

function until(lines, at, ends) {
  let end = at + 1;
  while (end < lines.length && !ends(lines[end], end)) end += 1;
  return end;
}

const END_OF = {
  heading: one,
  rule: one,
  code(lines, at) {
    const mark = FENCE.exec(lines[at])[1];
    const isEnd = (line) => {
      const text = line.trim();
      return text.length >= mark.length && text === mark[0].repeat(text.length);
    };
    return Math.min(until(lines, at, isEnd) + 1, lines.length);
  },
  list(lines, at) {
    const marks = indentOf(lines[at]);
    return until(lines, at, (line, index) => {
      if (line.trim() !== "") {
        const isPart = ITEM.test(line) || indentOf(line) > marks || lines[index - 1].trim() !== "";
        return !isPart || (indentOf(line) <= marks && ["code", "heading", "rule"].includes(kindAt(lines, index)));
      }
      const next = lines.slice(index + 1).find((later) => later.trim() !== "");
      return next === undefined || !(ITEM.test(next) || indentOf(next) > marks);
    });
  },
  quote: (lines, at) => until(lines, at, (line) => !QUOTE.test(line)),
  table: (lines, at) => until(lines, at, (line) => !line.includes("|")),
  paragraph: (lines, at) =>
    until(lines, at, (line, index) => line.trim() === "" || kindAt(lines, index) !== "paragraph"),
};

function indentOf(line) {
  return line.replaceAll("\t", "    ").search(/\S|$/);
}

function blockElements(lines, depth) {
  return blocksOf(lines).map((block) => blockElement(block, depth));
}

function blockElement({ kind, lines }, depth) {
  return depth > MAX_NESTING ? el("p", {}, lines.join("\n")) : ELEMENT_OF[kind](lines, depth);
}

const ELEMENT_OF = {
  paragraph: (lines) => el("p", {}, ...inline(lines.join("\n").trim())),
  heading(lines) {
    const [, marks, text] = HEADING.exec(lines[0]);
    return el(`h${Math.min(marks.length + 1, 6)}`, {}, ...inline(text));
  },
  rule: () => el("hr"),
  quote: (lines, depth) =>
    el("blockquote", {}, ...blockElements(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
  code(lines) {
    const [, mark, language] = FENCE.exec(lines[0]);
    const last = lines.at(-1).trim();
    const isClosed = lines.length > 1 && last.length >= mark.length && last === mark[0].repeat(last.length);
    const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    // Colours come with the end: until then the text changes with each frame.
    return listing(language.trim() || "text", text, isClosed ? language.trim() : "");
  },
  list(lines, depth) {
    const [, , mark] = ITEM.exec(lines[0]);
    const number = Number.parseInt(mark, 10);
    const isOrdered = !Number.isNaN(number);
    const items = itemsOf(lines).map((item) => itemElement(item, depth + 1));
    return el(isOrdered ? "ol" : "ul", isOrdered && number !== 1 ? { start: String(number) } : {}, ...items);
  },
  table(lines) {
    const [head, , ...rows] = lines.map(cellsOf);
    const row = (cells, tag) => el("tr", {}, ...head.map((_, at) => el(tag, {}, ...inline(cells[at] ?? ""))));
    const body = el("tbody", {}, ...rows.map((cells) => row(cells, "td")));
    return el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, row(head, "th")), body));
  },
};

/** An item of a list; one that begins with `[ ]` or `[x]` is a task. */
function itemElement(lines, depth) {
  const task = TASK.exec(lines[0]);
  if (!task) return el("li", {}, ...blockElements(lines, depth));
  const isDone = task[1] !== " ";
  const box = el("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "Done" : "To do" });
  const rest = [lines[0].slice(task[0].length), ...lines.slice(1)];
  return el("li", { class: "task" }, box, el("div", {}, ...blockElements(rest, depth)));
}

/** The lines of each item of a list, without its mark and indentation. */
function itemsOf(lines) {
  const outer = indentOf(lines[0]);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && indentOf(line) <= Math.max(outer, 0) + (items.length > 0 ? 1 : 0)) {
      width = indentOf(line) + item[2].length + 1;
      items.push([item[3] ?? ""]);
    } else {
      const indent = Math.min(indentOf(line), width);
      items.at(-1).push(line.replaceAll("\t", "    ").slice(indent));
    }
  }
  return items;
}

function cellsOf(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
