"use strict";

// Markdown as models write it, made into elements one by one: what a model says is never parsed as HTML.

const MAX_NESTING = 8;
/** Characters of a line above which it is not read as Markdown. */
const MAX_LINE = 5000;
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t])/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const TASK = /^\[([ xX])\][ \t]+/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|)$/s;
const QUOTE = /^ {0,3}>[ \t]?/;
const TABLE_RULE = /^:?-+:?$/;
const FORMULA = /^[ \t]*(\\\[|\$\$|\\begin\{)/;
const FORMULA_ENDS = { "\\[": "\\]", $$: "$$", "\\begin{": "\\end{" };

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

/** Cuts lines into blocks: `{kind, lines}`. Each line is read a few times, whatever the others are. */
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
  if (line.length > MAX_LINE) return "plain";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  if (line.includes("|") && lines[at + 1]?.includes("-") && isTableRule(lines[at + 1])) return "table";
  return isOpenFormula(line) ? "formula" : "paragraph";
}

function isTableRule(line) {
  return line.length <= MAX_LINE && cellsOf(line).every((cell) => TABLE_RULE.test(cell));
}

/** Whether a formula of several lines begins; one that ends where it began is part of a paragraph. */
function isOpenFormula(line) {
  const mark = FORMULA.exec(line)?.[1];
  return mark !== undefined && !line.includes(FORMULA_ENDS[mark], line.indexOf(mark) + mark.length);
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
  plain: one,
  /** An environment ends with its paragraph, since there may be others in it. */
  formula(lines, at) {
    const end = FORMULA_ENDS[FORMULA.exec(lines[at])[1]];
    const last = until(lines, at, (line) => line.trim() === "" || (end !== "\\end{" && line.includes(end)));
    return last < lines.length && lines[last].trim() !== "" ? last + 1 : last;
  },
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
    const texts = textsAfter(lines, at);
    return until(lines, at, (line, index) => {
      if (line.trim() !== "") {
        const isPart = ITEM.test(line) || indentOf(line) > marks || lines[index - 1].trim() !== "";
        return !isPart || (indentOf(line) <= marks && ["code", "heading", "rule"].includes(kindAt(lines, index)));
      }
      const next = texts(index);
      return next === undefined || !(ITEM.test(next) || indentOf(next) > marks);
    });
  },
  quote: (lines, at) => until(lines, at, (line) => !QUOTE.test(line)),
  table: (lines, at) => until(lines, at, (line) => !line.includes("|")),
  paragraph: (lines, at) =>
    until(lines, at, (line, index) => line.trim() === "" || kindAt(lines, index) !== "paragraph"),
};

/** A function of rising places: the first line after one that is not blank. */
function textsAfter(lines, at) {
  let next = at;
  return (place) => {
    if (next <= place) next = until(lines, place, (line) => line.trim() !== "");
    return lines[next];
  };
}

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
    const [begin, marks] = HEADING.exec(lines[0]);
    return el(`h${Math.min(marks.length + 1, 6)}`, {}, ...inline(withoutClosing(lines[0].slice(begin.length))));
  },
  rule: () => el("hr"),
  plain: (lines) => el("p", {}, lines[0]),
  formula: (lines) => el("p", {}, lines.join("\n")),
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
    const [head, rules, ...rows] = lines.map(cellsOf);
    const sides = rules.map(sideOf);
    const cell = (text, tag, at) => el(tag, { class: sides[at] ?? null }, ...inline(text));
    // Only the cells that are written: short rows below a long head would make the square of the text.
    const row = (cells, tag) => el("tr", {}, ...cells.slice(0, head.length).map((text, at) => cell(text, tag, at)));
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

/** The text of a heading, without the marks that may close it. */
function withoutClosing(text) {
  const line = text.trim();
  let end = line.length;
  while (line[end - 1] === "#") end -= 1;
  return end === 0 || isBlank(line[end - 1]) ? line.slice(0, end).trim() : line;
}

/** The side of a column, by its cell in the rule; null where that says nothing. */
function sideOf(rule) {
  if (!rule.endsWith(":")) return rule.startsWith(":") ? "left" : null;
  return rule.startsWith(":") ? "center" : "right";
}

/** The cells of a row. */
function cellsOf(line) {
  const row = line.trim();
  const cells = [];
  let from = row.startsWith("|") ? 1 : 0;
  for (let at = from; at < row.length; at += 1) {
    if (row[at] !== "|" || row[at - 1] === "\\") continue;
    cells.push(row.slice(from, at));
    from = at + 1;
  }
  if (from < row.length) cells.push(row.slice(from));
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}
