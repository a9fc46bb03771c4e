"use strict";

// Links in a line of Markdown: their addresses are outside, and never scripts.

const LINK = /\(<?((?:[^()\s<>]|\([^()\s]*\)){1,2000})>?(?:[ \t]+(?:"[^"\n]*"|'[^'\n]*'))?\)/y;
const FRAMED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const BARE = /https?:\/\/[^\s<>"`]+/iy;
const SENTENCE_ENDS = new Set(".,;:!?'*_~");

/** What follows a label: makes a link, also of a picture, since nothing is fetched because a model said so. */
function readAddress(scanner) {
  let opener = scanner.labels.pop();
  while (opener?.isGone) opener = scanner.labels.pop();
  if (opener === undefined) return false;
  const match = scanner.text[scanner.at + 1] === "(" ? matchAt(LINK, scanner.text, scanner.at + 1) : null;
  if (match === null || !isOutside(match[1]) || opener.depth >= MAX_INLINE_NESTING) {
    opener.kinds = 0;
    return false;
  }
  scanner.flush();
  while (!opener.isGone) scanner.drop();
  const label = scanner.out.splice(opener.index).slice(1);
  // A link has no other one inside.
  const content = label.map((node) => (node.tagName === "A" ? node.textContent : node));
  scanner.labels.length = 0;
  scanner.deepen(opener.depth + 1);
  return scanner.take(scanner.at + 1 + match[0].length, linkElement(match[1], content.length > 0 ? content : [match[1]]));
}

function readFramed(scanner) {
  const match = matchAt(FRAMED, scanner.text, scanner.at);
  if (match === null || !isOutside(match[1])) return false;
  return scanner.take(scanner.at + match[0].length, linkElement(match[1], [match[1].replace(/^mailto:/i, "")]));
}

/** An address in the text; what ends the sentence is no part of it. */
function readBare(scanner) {
  const { text, at } = scanner;
  if (isWord(text[at - 1]) || text[at - 1] === "/") return false;
  const match = matchAt(BARE, text, at);
  if (match === null) return false;
  const address = withoutEnd(match[0]);
  return isOutside(address) ? scanner.take(at + address.length, linkElement(address, [address])) : scanner.skip(at + match[0].length);
}

function withoutEnd(text) {
  let end = text.length;
  let unopened = text.split(")").length - text.split("(").length;
  for (;;) {
    const last = text[end - 1];
    if (last === ")" && unopened > 0) unopened -= 1;
    else if (!SENTENCE_ENDS.has(last)) return text.slice(0, end);
    end -= 1;
  }
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** Whether an address is that of another server, or of a mailbox. */
function isOutside(address) {
  return /^(https?:\/\/|mailto:)/i.test(address) && URL.canParse(address);
}

function linkElement(address, content) {
  return el("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" }, ...content);
}
