"use strict";

// Requests made from the documentation.

const JSON_TYPE = "application/json";
const MAX_SHOWN = 200000;
/** What stands for parameters of paths in examples. */
const PLACES = { model_name: "tgi", model_version: "1", id: "1" };

/** The request as a command for a shell. */
function curlOf(operation, body) {
  const path = operation.path.slice(1).replace(/\{(\w+)\}/g, (whole, name) => PLACES[name] ?? whole);
  const lines = [`curl ${quoted(new URL(path, BASE).href)}`];
  if (operation.method !== "get") lines.push(`-X ${operation.method.toUpperCase()}`);
  if (operation.needsKey && kept.get(KEY_NAME)) lines.push('-H "Authorization: Bearer $API_KEY"');
  if (body !== undefined) {
    lines.push(`-H 'Content-Type: ${JSON_TYPE}'`);
    lines.push(`-d ${quoted(JSON.stringify(body))}`);
  }
  return lines.join(" \\\n  ");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** A form that sends the operation's request and shows what comes, while it comes. */
function trialForm(operation, body) {
  const area =
    body === undefined
      ? null
      : el("textarea", { class: "field code", rows: "8", spellcheck: "false", "aria-label": "Body" });
  if (area) area.value = JSON.stringify(body, null, 2);
  const blanks = operation.parameters.map((parameter) => {
    const isPlace = parameter.in === "path";
    const input = el("input", { class: "field", type: "text", required: isPlace, placeholder: "Not sent" });
    if (isPlace) input.value = PLACES[parameter.name] ?? "";
    return { parameter, input, label: el("label", {}, parameter.name, input) };
  });
  const send = el("button", { class: "solid", type: "submit" }, "Send");
  const stop = el("button", { class: "quiet", type: "button", hidden: true }, "Stop");
  const output = el("output", {});
  let controller = null;
  stop.addEventListener("click", () => controller?.abort());
  const submit = async (event) => {
    event.preventDefault();
    controller = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    const { path, headers } = filledIn(operation.path, blanks);
    const text = area?.value;
    await show(output, api(path, {
      method: operation.method.toUpperCase(), body: text, headers, signal: controller.signal,
    }));
    send.disabled = false;
    stop.hidden = true;
  };
  const buttons = el("div", { class: "trial-buttons" }, send, stop);
  const labels = blanks.map(({ label }) => label);
  return el("form", { onsubmit: submit }, area, ...labels, buttons, output);
}

/** The path and the headers with what was written into the form. */
function filledIn(path, blanks) {
  const headers = {};
  const query = new URLSearchParams();
  let filled = path;
  for (const { parameter, input } of blanks) {
    const value = input.value.trim();
    if (parameter.in === "path") filled = filled.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (value === "") continue;
    else if (parameter.in === "query") query.set(parameter.name, value);
    else headers[parameter.name] = value;
  }
  return { path: query.size > 0 ? `${filled}?${query}` : filled, headers };
}

async function show(output, answering) {
  const status = el("span", { class: "status" });
  const code = el("code", {});
  const figure = el("figure", { class: "listing" }, el("figcaption", {}, status), el("pre", { tabindex: "0" }, code));
  output.replaceChildren(figure);
  const startedAt = performance.now();
  const tell = (text, isGood) => {
    const seconds = ((performance.now() - startedAt) / 1000).toFixed(2);
    status.className = `status ${isGood ? "good" : "bad"}`;
    status.textContent = `${text} in ${seconds} s`;
  };
  try {
    const response = await answering;
    tell(`${response.status} ${response.statusText}`, response.ok);
    await showBody(code, response);
    tell(`${response.status} ${response.statusText}`, response.ok);
  } catch (error) {
    tell(error.name === "AbortError" ? "Stopped" : error.message || "Failed", false);
  }
}

async function showBody(code, response) {
  let shown = "";
  for await (const piece of response.body ? piecesOf(response) : []) {
    if (shown.length < MAX_SHOWN) code.append(piece);
    shown += piece;
  }
  if (shown === "") code.textContent = "(empty)";
  if (!(response.headers.get("content-type") ?? "").includes(JSON_TYPE)) return;
  try {
    code.textContent = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // It stays as it came.
  }
}
