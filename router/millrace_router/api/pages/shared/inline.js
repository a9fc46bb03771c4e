"use strict";

// What is inside a line of Markdown: emphasis, code, links.

const MAX_INLINE = 20000;
const MAX_INLINE_NESTING = 8;
const INLINE = new RegExp(
  [
    String.raw`\\([\\\x60*_{}[\]()#+\-.!~|<>])`,
    String.raw`(\x60+)((?:(?!\2).|\n)+?)\2(?!\x60)`,
    String.raw`\*\*(?=\S)((?:.|\n)+?)(?<=\S)\*\*(?!\*)`,
    String.raw`(?<!\w)__(?=\S)((?:.|\n)+?)(?<=\S)__(?!\w)`,
    String.raw`\*(?=[^\s*])([^*]*[^\s*])\*`,
    String.raw`(?<!\w)_(?=[^\s_])([^_]*[^\s_])_(?!\w)`,
    String.raw`~~(?=\S)((?:.|\n)+?)(?<=\S)~~`,
    String.raw`!?\[([^\]\n]*)\]\(<?((?:[^()\s<>]|\([^()\s]*\))+)>?(?:[ \t]+(?:"[^"\n]*"|'[^'\n]*'))?\)`,
    String.raw`<((?:https?:\/\/|mailto:)[^\s<>]+)>`,
    String.raw`(?<![\w/])(https?:\/\/[^\s<>"\x60]+)`,
  ].join("|"),
  "gi",
);

/** Text with its emphasis, code and links, as nodes. */
function inline(text, depth = 0) {
  if (depth > MAX_INLINE_NESTING || text.length > MAX_INLINE) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    nodes.push(...inlineNodes(match, depth + 1));
    at = match.index + match[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function inlineNodes(match, depth) {
  const [whole, escaped, , code, strong, under, emphasis, underscored, struck, label, address, framed, bare] = match;
  if (escaped) return [escaped];
  if (code) return [el("code", {}, code.replace(/^ (.*) $/s, "$1"))];
  if (strong ?? under) return [el("strong", {}, ...inline(strong ?? under, depth))];
  if (emphasis ?? underscored) return [el("em", {}, ...inline(emphasis ?? underscored, depth))];
  if (struck) return [el("s", {}, ...inline(struck, depth))];
  if (framed) return [linkElement(framed, [framed.replace(/^mailto:/i, "")]) ?? whole];
  if (bare) return bareLink(bare);
  // Pictures become links too: nothing is fetched because a model said so.
  return [linkElement(address, label ? inline(label, depth) : [address]) ?? whole];
}

/** A link to another server, or to a mailbox; null where that is not what the address is. */
function linkElement(address, content) {
  if (!/^(https?:\/\/|mailto:)/i.test(address) || !URL.canParse(address)) return null;
  return el("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" }, ...content);
}

/** An address in the text; what ends the sentence is no part of it. */
function bareLink(text) {
  let address = text.replace(/[.,;:!?'*_~]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) {
    address = address.slice(0, -1).replace(/[.,;:!?'*_~]+$/, "");
  }
  const link = linkElement(address, [address]);
  return link ? [link, text.slice(address.length)] : [text];
}
