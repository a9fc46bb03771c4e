"use strict";

/** Headings, and the paths beneath each; the last one takes the rest. */
const GROUPS = [
  ["OpenAI and Anthropic", /^\/v1\/(chat|completions|responses|messages|models)/],
  ["TGI", /^\/(generate|generate_stream|tokenize|chat_tokenize|info)?$/],
  ["Platforms", /^\/(invocations|vertex|predict|v2|ping)/],
  ["Health and operation", /^\/(health|livez|readyz|metrics|status|version|v1\/(quarantine|requests))/],
  ["Documentation", /openapi|^\/docs/],
  ["More", /(?:)/],
];

byId("key").value = kept.get(KEY_NAME) ?? "";
byId("key").addEventListener("input", () => kept.set(KEY_NAME, byId("key").value.trim()));
byId("access").addEventListener("submit", (event) => event.preventDefault());
byId("filter").addEventListener("input", () => applyFilter(byId("filter").value));
window.addEventListener("hashchange", openTarget);
start();

async function start() {
  const main = byId("operations");
  try {
    const response = await api("openapi.json");
    if (!response.ok) throw await failureOf(response);
    describe(await response.json());
  } catch (error) {
    main.replaceChildren(el("p", { class: "nothing", role: "alert" }, error.message));
  }
  main.setAttribute("aria-busy", "false");
  openTarget();
}

function describe(openapi) {
  components = openapi.components?.schemas ?? {};
  byId("title").textContent = `API ${openapi.info.version}`;
  byId("about").textContent = `${openapi.info.description}.`;
  const operations = Object.entries(openapi.paths).flatMap(([path, item]) =>
    Object.entries(item)
      .filter(([, described]) => described.responses)
      .map(([method, described]) => operationOf(method, path, described, item.parameters ?? [])),
  );
  for (const [title, paths] of groupsOf(operations)) {
    const list = el("ul", {}, ...paths.map((operation) => el("li", { "data-id": operation.id }, indexLink(operation))));
    byId("entries").append(el("section", {}, el("h2", {}, title), list));
    const sections = paths.map(operationElement);
    byId("operations").append(el("section", { class: "group" }, el("h2", {}, title), ...sections));
  }
  byId("operations").append(el("p", { id: "nothing", class: "nothing", hidden: true }, "Nothing is like that."));
  indexFields(operations);
}

function operationOf(method, path, described, shared) {
  return {
    method,
    path,
    id: described.operationId ?? `${method} ${path}`,
    summary: described.summary ?? "",
    description: described.description ?? "",
    parameters: [...shared, ...(described.parameters ?? [])],
    body: described.requestBody?.content ?? {},
    responses: described.responses,
    needsKey: (described.security ?? []).length > 0,
  };
}

/** Each heading with its operations; method and path distinguish them, since `/` has GET and POST. */
function groupsOf(operations) {
  const groups = new Map(GROUPS.map(([title]) => [title, []]));
  for (const operation of operations) {
    const isHealth = operation.path === "/" && operation.method === "get";
    const path = isHealth ? "/health" : operation.path;
    groups.get(GROUPS.find(([, pattern]) => pattern.test(path))[0]).push(operation);
  }
  return [...groups].filter(([, found]) => found.length > 0);
}

function indexLink({ id, method, path }) {
  // Long paths may be broken after a slash.
  const parts = path.split(/(?<=\/)/).flatMap((part) => [part, el("wbr")]);
  return el("a", { href: `#${id}` }, methodMark(method), el("span", {}, ...parts));
}

function methodMark(method) {
  return el("span", { class: `method ${method}` }, method);
}

function operationElement(operation) {
  const { id, method, path, summary } = operation;
  const head = el(
    "summary",
    {},
    methodMark(method),
    el("span", { class: "path" }, path),
    el("span", { class: "summary" }, ...inline(summary)),
  );
  return lazyDetails({ id, class: "operation" }, head, () => [operationInside(operation)]);
}

function operationInside(operation) {
  const { description, id, needsKey, parameters, body, responses } = operation;
  const schema = body[JSON_TYPE]?.schema;
  const example = schema ? exampleOf(schema) : undefined;
  const facts = `Operation ${id}; ${needsKey ? "asks for the key, if the server has one" : "open to everybody"}.`;
  return el(
    "div",
    { class: "inside" },
    description ? el("p", {}, ...inline(description)) : null,
    el("p", { class: "facts" }, facts),
    parameters.length > 0 ? el("h3", {}, "Parameters") : null,
    parameters.length > 0 ? el("ul", { class: "rows" }, ...parameters.map(parameterRow)) : null,
    ...Object.entries(body).flatMap(([media, { schema: shape }]) => [
      el("h3", {}, "Body", el("small", {}, `${media} · ${typeOf(shape)}`)),
      schemaTree(shape),
    ]),
    el("h3", {}, "Answers"),
    ...Object.entries(responses).map(answerElement),
    el("h3", {}, "Example"),
    listing("curl", curlOf(operation, example), "bash"),
    lazyDetails({ class: "trial" }, el("summary", {}, "Try it"), () => [trialForm(operation, example)]),
  );
}

function parameterRow({ name, in: place, required, schema, description }) {
  const row = fieldRow(name, { ...schema, description }, required);
  row.querySelector(".name").after(el("span", { class: "type" }, `${place},`));
  return row;
}

function answerElement([status, { description, content = {}, headers = {} }]) {
  const isGood = status.startsWith("2");
  const media = Object.entries(content);
  const head = el(
    "summary",
    {},
    el("span", { class: `status ${isGood ? "good" : ""}` }, status),
    el("span", { class: "type" }, description),
    ...media.map(([type]) => el("span", { class: "media" }, type)),
  );
  const headerRows = Object.entries(headers).map(([name, header]) =>
    parameterRow({ name, in: "header", required: false, ...header }),
  );
  return lazyDetails({ class: "answer" }, head, () => [
    media.length + headerRows.length === 0 ? el("p", { class: "told" }, "No body.") : null,
    headerRows.length > 0 ? el("ul", { class: "rows" }, ...headerRows) : null,
    ...media.flatMap(([type, { schema }]) => [
      el("p", { class: "told" }, `${type}${type === "text/event-stream" ? ", each event" : ""}: ${typeOf(schema)}`),
      insides(schema).length > 0 ? schemaTree(schema) : null,
    ]),
  ]);
}

/** Opens the operation that the address names. */
function openTarget() {
  const target = byId(decodeURIComponent(location.hash.slice(1)));
  if (!target?.classList.contains("operation")) return;
  target.open = true;
  target.scrollIntoView();
}
