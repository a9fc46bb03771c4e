"use strict";

// JSON schemas as trees; what is inside a field is made when it is opened, since schemas may hold themselves.

const MAX_CHOICES_IN_TYPE = 12;

/** The schemas that have names, as references speak of them. */
let components = {};

function resolve(schema) {
  return schema?.$ref ? (components[nameOf(schema)] ?? {}) : (schema ?? {});
}

function nameOf(schema) {
  return schema.$ref.split("/").at(-1);
}

function alternatives(schema) {
  return schema.anyOf ?? schema.oneOf ?? null;
}

/** A type in a few words. */
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  const several = alternatives(schema);
  if (several) return [...new Set(several.map(typeOf))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) {
    const shown = schema.enum.slice(0, MAX_CHOICES_IN_TYPE).map((one) => JSON.stringify(one));
    return shown.join(" or ") + (schema.enum.length > shown.length ? " …" : "");
  }
  if (schema.type === "array") return schema.items ? `array of ${typeOf(schema.items)}` : "array";
  if (Array.isArray(schema.type)) return schema.type.join(" or ");
  return schema.type ?? "anything";
}

/** The bounds that a value has to keep, and what it is if it is not given. */
function limitsOf(schema) {
  const said = [];
  const bounds = [
    ["minimum", "≥"],
    ["exclusiveMinimum", ">"],
    ["maximum", "≤"],
    ["exclusiveMaximum", "<"],
    ["minItems", "items ≥"],
    ["maxItems", "items ≤"],
    ["minLength", "length ≥"],
    ["maxLength", "length ≤"],
    ["pattern", "matches"],
  ];
  for (const part of alternatives(schema) ?? [schema]) {
    for (const [name, sign] of bounds) {
      // A bound stays on one line.
      if (name in part) said.push(bound(sign, part[name]).replaceAll(" ", "\u00a0"));
    }
  }
  if (schema.default !== undefined && schema.default !== null) said.push(`default ${JSON.stringify(schema.default)}`);
  return [...new Set(said)].join(", ");
}

/** A bound; the greatest integers are known to JavaScript only roughly, and are powers of two or one less. */
function bound(sign, value) {
  const power = Math.log2(Math.abs(value));
  if (Number.isSafeInteger(value) || !Number.isInteger(power)) return `${sign} ${value}`;
  return `${value > 0 ? "<" : sign} ${value < 0 ? "-" : ""}2^${power}`;
}

/** The object or objects that a schema is about, through arrays and references; none if there is nothing inside. */
function insides(schema) {
  const several = alternatives(schema);
  if (several) return several.flatMap(insides);
  if (schema.type === "array") return insides(schema.items ?? {});
  if (schema.$ref) {
    const named = resolve(schema);
    if (alternatives(named)) return insides(named);
    return named.properties ? [{ name: nameOf(schema), schema: named }] : [];
  }
  if (schema.properties) return [{ name: schema.title ?? "object", schema }];
  return schema.additionalProperties?.$ref ? insides(schema.additionalProperties) : [];
}

/** All fields of what a schema is about. */
function schemaTree(schema) {
  const found = insides(schema);
  if (found.length === 0) return el("p", { class: "told" }, typeOf(schema));
  if (found.length === 1) return fieldRows(found[0].schema);
  const variants = found.flatMap(({ name, schema: inner }) => [el("p", {}, name), fieldRows(inner)]);
  return el("div", { class: "variants" }, ...variants);
}

function fieldRows(schema) {
  const required = new Set(schema.required ?? []);
  const entries = Object.entries(schema.properties ?? {});
  // What has to be there comes first.
  entries.sort(([one], [other]) => required.has(other) - required.has(one));
  const rows = entries.map(([name, field]) => fieldRow(name, field, required.has(name)));
  return el("ul", { class: "rows" }, ...rows);
}

/** A field; a flat one does not open what is in it. */
function fieldRow(name, schema, isRequired, { isFlat = false } = {}) {
  const limits = limitsOf(schema);
  const head = [
    el("code", { class: "name" }, name),
    el("span", { class: "type" }, typeOf(schema)),
    isRequired ? el("span", { class: "required" }, "required") : null,
    limits ? el("span", { class: "type" }, limits) : null,
  ];
  const description = schema.description ? el("div", { class: "told" }, ...inline(schema.description)) : null;
  if (isFlat || insides(schema).length === 0) return el("li", {}, ...head, description);
  const summary = el("summary", {}, ...head, description);
  return el("li", {}, lazyDetails({}, summary, () => [schemaTree(schema)]));
}

/** A disclosure whose inside is made when it is opened first. */
function lazyDetails(attributes, summary, inside) {
  const details = el("details", attributes, summary);
  const fill = () => {
    if (!details.open || details.dataset.filled) return;
    details.dataset.filled = "yes";
    details.append(...inside().filter((part) => part !== null));
  };
  details.addEventListener("toggle", fill);
  return details;
}

const MESSAGE = "What is prefill?";
/** What a field of this name is given in examples, wherever it is. */
const EXAMPLES = {
  messages: [{ role: "user", content: MESSAGE }],
  instances: [{ inputs: MESSAGE, parameters: { max_new_tokens: 40 } }],
  inputs: MESSAGE,
  input: MESSAGE,
  prompt: MESSAGE,
  text_input: MESSAGE,
  model: "tgi",
  parameters: { max_new_tokens: 40 },
  max_tokens: 40,
  max_output_tokens: 40,
};

/** A body that the server takes. */
function exampleOf(schema) {
  if (schema.examples?.length) return schema.examples[0];
  const [first] = insides(schema);
  if (!first || typeof schema.type === "string" && schema.type !== "object") return valueOf(schema);
  if (first.schema.examples?.length) return first.schema.examples[0];
  const { properties, required = [] } = first.schema;
  const isKnown = (name) => name in EXAMPLES && takes(properties[name], EXAMPLES[name]);
  const names = Object.keys(properties).filter((name) => required.includes(name) || isKnown(name));
  return Object.fromEntries(names.map((name) => [name, isKnown(name) ? EXAMPLES[name] : valueOf(properties[name])]));
}

/** Whether a value is of a schema's type, as far as that goes without looking into objects. */
function takes(schema, value) {
  const several = alternatives(schema);
  if (several) return several.some((part) => takes(part, value));
  if (schema.$ref) return takes(resolve(schema), value);
  if (schema.type === undefined) return true;
  if (Array.isArray(value)) return schema.type === "array" && value.every((one) => takes(schema.items ?? {}, one));
  if (typeof value === "number") return ["number", "integer"].includes(schema.type);
  return schema.type === typeof value;
}

function valueOf(schema) {
  const plain = resolve(alternatives(schema)?.[0] ?? schema);
  if (plain.default !== undefined && plain.default !== null) return plain.default;
  if ("const" in plain) return plain.const;
  if (plain.enum) return plain.enum[0];
  if (plain.properties) return exampleOf(plain);
  const usual = { array: [], object: {}, string: "text", integer: plain.minimum ?? 1, number: 1, boolean: true };
  return usual[plain.type] ?? null;
}
