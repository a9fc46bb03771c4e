// The Markdown of the pages in Node: what it makes of a text, and with how many steps.
import { readFileSync } from "node:fs";
import { Session } from "node:inspector";
import { runInThisContext } from "node:vm";

const SOURCES = ["highlight", "links", "inline", "markdown"];
const folder = process.argv[2];

/** Elements as HTML, in place of a document. */
class Html {
  constructor(tag, attributes, children) {
    Object.assign(this, { tagName: tag.toUpperCase(), attributes, children });
  }

  get textContent() {
    return this.children.map((child) => (child instanceof Html ? child.textContent : child)).join("");
  }

  toString() {
    const { href, class: name } = this.attributes;
    const tag = this.tagName.toLowerCase();
    return `<${tag}${href ? ` ${href}` : ""}${name ? ` .${name}` : ""}>${this.children.join("")}</${tag}>`;
  }
}

globalThis.el = (tag, attributes = {}, ...children) => new Html(tag, attributes, children);
globalThis.copyButton = () => "";
globalThis.Prism = { languages: {} };
for (const name of SOURCES) {
  runInThisContext(readFileSync(`${folder}/${name}.js`, "utf8"), { filename: `pages:${name}` });
}

const { blocksOf, blockElement } = globalThis;
const blocks = (text) => blocksOf(text.split("\n")).map((block) => blockElement(block, 0));

const SHOWN = [
  ["a **b** *c* ~~d~~ __e__ _f_", "<p>a <strong>b</strong> <em>c</em> <s>d</s> <strong>e</strong> <em>f</em></p>"],
  ["***a** b* ***c* d** **e *f***", "<p><em><strong>a</strong> b</em> <strong><em>c</em> d</strong> <strong>e <em>f</em></strong></p>"],
  ["2 * 3 * 4, snake_case_name, **a*b**, *a", "<p>2 * 3 * 4, snake_case_name, <strong>a*b</strong>, *a</p>"],
  ["`` a`b `` `c` ``d`", "<p><code>a`b</code> <code>c</code> ``d`</p>"],
  ["\\*a\\* \\`b` \\\\ \\d", "<p>*a* `b` \\ \\d</p>"],
  ["[a **b**](https://x.y/z) ![c](https://x.y)", "<p><a https://x.y/z>a <strong>b</strong></a> <a https://x.y>c</a></p>"],
  ["[a](javascript:b) [c] d](https://x.y)", "<p>[a](javascript:b) [c] d](<a https://x.y>https://x.y</a>)</p>"],
  ["**https://x.y/a_b_c**, (https://x.y/(a)).", "<p><strong><a https://x.y/a_b_c>https://x.y/a_b_c</a></strong>, (<a https://x.y/(a)>https://x.y/(a)</a>).</p>"],
  ["# C#\n## a ##", "<h2>C#</h2><h3>a</h3>"],
  // Formulas stay as they are written, on every way to write them.
  ["\\(a_1 * b_1\\) and \\[x^*\\{y\\}\\]", "<p>\\(a_1 * b_1\\) and \\[x^*\\{y\\}\\]</p>"],
  ["$$a\\\\b$$ $x_i*y_i$, $5 and $6, \\$7", "<p>$$a\\\\b$$ $x_i*y_i$, $5 and $6, $7</p>"],
  ["\\[\nx\n- y\n\\]\n\n- z", "<p>\\[\nx\n- y\n\\]</p><ul><li><p>z</p></li></ul>"],
  ["\\begin{a}\n\\begin{b} x \\\\\n* y\n\\end{b}\n\\end{a}", "<p>\\begin{a}\n\\begin{b} x \\\\\n* y\n\\end{b}\n\\end{a}</p>"],
  ["in \\begin{a}\\begin{b}\\\\\\end{b}*\\end{a} *c*", "<p>in \\begin{a}\\begin{b}\\\\\\end{b}*\\end{a} <em>c</em></p>"],
  [
    "| a | b | c |\n|:--|:-:|--:|\n| 1 | 2 | 3 | 4 |\n| 5 |",
    "<div .table><table><thead><tr><th .left>a</th><th .center>b</th><th .right>c</th></tr></thead>" +
      "<tbody><tr><td .left>1</td><td .center>2</td><td .right>3</td></tr><tr><td .left>5</td></tr></tbody></table></div>",
  ],
  [`**${"a".repeat(4996)}**`, `<p><strong>${"a".repeat(4996)}</strong></p>`],
  [`**${"a".repeat(4997)}**`, `<p>**${"a".repeat(4997)}**</p>`],
];

const LINE = 4000;
/** Texts that others' Markdown, or an earlier one of ours, takes the square or the cube of their length for. */
const HOSTILE = {
  backticks: "`",
  "runs of backticks": [..."123456789"].map((length) => "`".repeat(Number(length)) + "a").join(""),
  stars: "*a ",
  "pairs of stars": "**a ",
  "closed stars": "*a**",
  underscores: "_a ",
  tildes: "~~a ",
  brackets: "[",
  labels: "[a](",
  addresses: "[a](b(",
  titles: '[a](b "',
  closers: "a](b)",
  images: "![",
  angles: "<https://",
  urls: "https://a.b))))((",
  "ends of urls": "https://a.b/" + ")!".repeat(50),
  backslashes: "\\",
  formulas: "\\(",
  dollars: "$a ",
  environments: "\\begin{a}",
  "blanks in lines": "# a" + " ".repeat(500),
  "closed headings": "# a" + "#".repeat(900) + "b\n",
  rules: "- ".repeat(400) + "b\n",
  tildes_fence: "~".repeat(900) + "`\n",
  "blank lines of lists": "- a\n\n\n\n\n\n\n",
  "blank lines": "- a" + "\n".repeat(900),
  quotes: ">",
  "lines of quotes": "> ".repeat(20) + "\n",
  "nested lists": "  - a\n    - b\n",
  "heads of tables": "|".repeat(1000) + "\n",
  "rules of tables": "|a\n" + "|-".repeat(300) + "x\n",
  "rows of tables": (size) => `${"|a".repeat(LINE / 2)}\n${"|-".repeat(LINE / 2)}\n${"|\n".repeat(size / 2)}`,
  "blanks in rules": "a|\n-" + " ".repeat(900) + "x\n",
  "open formulas": "\\[\n",
};

function hostile(unit, size) {
  if (typeof unit === "function") return unit(size);
  const whole = unit.repeat(Math.ceil(size / unit.length)).slice(0, size);
  return unit.includes("\n") ? whole : whole.replaceAll(new RegExp(`[^]{${LINE}}`, "g"), (line) => `${line}\n`);
}

let native = 0;

/** Counts the characters or elements that a method of the language goes through, since it is one step otherwise. */
function counted(prototype, name, count) {
  const original = prototype[name];
  prototype[name] = function (...given) {
    const result = original.apply(this, given);
    native += count(this, given, result);
    return result;
  };
}

function patch() {
  const found = (text, [, from = 0], at) => (typeof at === "number" && at >= 0 ? at : text.length) - Math.min(from, text.length);
  counted(String.prototype, "indexOf", found);
  counted(String.prototype, "includes", (text, [, from = 0]) => text.length - Math.min(from, text.length));
  for (const name of ["trim", "split", "replaceAll", "search"]) counted(String.prototype, name, (text) => text.length);
  counted(String.prototype, "slice", (_, __, part) => part.length);
  counted(RegExp.prototype, "exec", (pattern, [text], match) => {
    if (match === null) return pattern.sticky ? 1 : text.length;
    return match[0].length + (pattern.global ? 0 : match.index);
  });
  for (const name of ["splice", "slice", "join"]) counted(Array.prototype, name, (list, _, part) => part?.length ?? list.length);
}

const session = new Session();
session.connect();
const post = (method, parameters = {}) => {
  let answer;
  session.post(method, parameters, (error, result) => {
    if (error) throw new Error(error.message);
    answer = result;
  });
  return answer;
};

function steps(text) {
  post("Profiler.takePreciseCoverage");
  native = 0;
  blocks(text);
  const here = native;
  const { result } = post("Profiler.takePreciseCoverage");
  const ranges = result.filter(({ url }) => url.startsWith("pages:")).flatMap(({ functions }) => functions.flatMap((one) => one.ranges));
  return here + ranges.reduce((sum, { count }) => sum + count, 0);
}

const wrong = SHOWN.map(([text, html]) => ({ text, html, made: blocks(text).join("") })).filter(({ html, made }) => html !== made);
post("Profiler.enable");
post("Profiler.startPreciseCoverage", { callCount: true, detailed: true });
patch();
const work = Object.fromEntries(
  Object.entries(HOSTILE).map(([name, unit]) => [name, [1, 2].map((times) => steps(hostile(unit, times * 9000)))]),
);
console.log(JSON.stringify({ wrong, work }));
