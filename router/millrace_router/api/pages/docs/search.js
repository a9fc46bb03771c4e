"use strict";

// The search in operations and in the fields of their bodies.

const MAX_DEPTH = 4;
const MAX_FOUND = 60;
/** `{operation, path, schema, text}` of every field; `path` has the names from the body to the field. */
let fields = [];

function indexFields(operations) {
  fields = operations.flatMap((operation) => {
    const schema = operation.body[JSON_TYPE]?.schema;
    return schema ? fieldsOf(schema, []).map((field) => ({ operation, ...field })) : [];
  });
}

/** The fields of a schema and of what is in them; schemas may hold themselves. */
function fieldsOf(schema, path, names = new Set()) {
  if (path.length >= MAX_DEPTH) return [];
  return insides(schema).flatMap(({ name, schema: inner }) => {
    if (names.has(name)) return [];
    const within = new Set(names).add(name);
    return Object.entries(inner.properties ?? {}).flatMap(([field, described]) => {
      const here = [...path, field];
      const text = `${here.join(".")} ${described.description ?? ""}`.toLowerCase();
      return [{ path: here, schema: described, text }, ...fieldsOf(described, here, within)];
    });
  });
}

/** Shows the operations and the fields that have all words of `text`; no words show all operations. */
function applyFilter(text) {
  const words = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const has = (where) => words.every((word) => where.includes(word));
  let number = 0;
  for (const details of document.querySelectorAll(".operation")) {
    const isShown = has(details.querySelector("summary").textContent.toLowerCase());
    details.hidden = !isShown;
    document.querySelector(`[data-id="${CSS.escape(details.id)}"]`).hidden = !isShown;
    number += isShown;
  }
  for (const section of document.querySelectorAll(".group, #entries section")) {
    section.hidden = section.querySelector(".operation:not([hidden]), li:not([hidden])") === null;
  }
  const found = words.length > 0 ? ranked(fields.filter((field) => has(field.text)), words) : [];
  showFound(found);
  byId("nothing").hidden = number + found.length > 0;
}

/** Fields whose name has the first word come first, the whole name before a part of it, then those least deep. */
function ranked(found, [word]) {
  const rank = ({ path }) => (path.at(-1) === word ? 0 : path.at(-1).includes(word) ? 1 : 2);
  return found.sort((one, other) => rank(one) - rank(other) || one.path.length - other.path.length);
}

/** Lists fields, equal ones of several operations together. */
function showFound(found) {
  const rows = new Map();
  for (const { operation, path, schema } of found) {
    const key = JSON.stringify([path, schema]);
    if (!rows.has(key)) rows.set(key, { path, schema, operations: new Set() });
    rows.get(key).operations.add(operation);
  }
  const shown = [...rows.values()].slice(0, MAX_FOUND).map(foundElement);
  byId("found").hidden = shown.length === 0;
  byId("found-fields").replaceChildren(...shown);
  byId("found-more").hidden = rows.size <= MAX_FOUND;
}

function foundElement({ path, schema, operations }) {
  const links = [...operations].map(({ id, path: address }) => el("a", { href: `#${id}` }, address));
  const row = fieldRow(path.join("."), { ...schema, properties: undefined }, false, { isFlat: true });
  row.append(el("div", { class: "places" }, ...links));
  return row;
}
