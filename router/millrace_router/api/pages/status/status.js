"use strict";

const SECONDS = 2;
/** The figures: a title, the value, what it means, and for shares how full the bar is. */
const FIGURES = [
  {
    title: "Running",
    value: (status) => whole(status.requests_running),
    note: (status) => `of ${whole(status.max_concurrent_requests)} requests at most`,
  },
  {
    title: "Waiting",
    value: (status) => whole(status.requests_waiting),
    note: () => "requests in the queue",
  },
  {
    title: "Tokens per second",
    value: (status) => decimal(status.tokens_per_second),
    note: () => "generated, of all requests",
  },
  {
    title: "KV cache in use",
    value: (status) => percent(status.kv_use),
    note: (status) => `${percent(status.kv_cached)} kept for later prompts`,
    bar: (status) => status.kv_use,
  },
  {
    title: "Cache hits",
    value: (status) => percent(status.cached_share),
    note: () => "of the prompt tokens",
    bar: (status) => status.cached_share,
  },
  {
    title: "Time to first token",
    value: (status) => duration(status.first_token_median_seconds),
    note: (status) =>
      status.first_token_p95_seconds === null
        ? "the median; no request yet"
        : `the median; 95 % within ${duration(status.first_token_p95_seconds)}`,
  },
  {
    title: "Recoveries",
    value: (status) => whole(status.recoveries),
    note: () => "failures of the shards since the start",
  },
  {
    title: "Uptime",
    value: (status) => longTime(status.uptime_seconds),
    note: (status) => `version ${status.version}`,
  },
];

const cards = FIGURES.map(cardOf);
document.getElementById("figures").append(...cards.map(({ node }) => node));
whileVisible(refresh, () => SECONDS);

/** One figure on the page; the bar is there only for shares. */
function cardOf(figure) {
  const value = el("dd", { class: "value" }, "–");
  const note = el("dd", { class: "told" });
  const bar = figure.bar ? el("meter", { min: "0", max: "1", "aria-label": figure.title }) : null;
  const node = el("div", { class: "figure" }, el("dt", {}, figure.title), value, bar && el("dd", {}, bar), note);
  return { figure, node, value, note, bar };
}

async function refresh() {
  try {
    const response = await api("status", { headers: { accept: "application/json" } });
    if (!response.ok) throw await failureOf(response);
    show(await response.json());
  } catch (error) {
    showTrouble(error.message);
    showDot("troubled", error.message);
  }
}

function show(status) {
  for (const { figure, value, note, bar } of cards) {
    value.textContent = figure.value(status);
    note.textContent = figure.note(status);
    if (bar) bar.value = figure.bar(status) ?? 0;
  }
  document.title = `Status of ${showModel(status.model_id)} · Millrace`;
  showDot(status.ready ? "ready" : "troubled", status.ready ? "The server is ready" : status.reason);
  showTrouble(status.ready ? null : `Not ready: ${status.reason}`);
  document.getElementById("about").textContent =
    `Tokens per second, cache hits and times are those of the last ${longTime(status.window_seconds)}.`;
  document.getElementById("figures").setAttribute("aria-busy", "false");
}

/** Says what is wrong, once: the same words are not announced again. */
function showTrouble(text) {
  const trouble = document.getElementById("trouble");
  trouble.hidden = text === null;
  if (trouble.textContent !== (text ?? "")) trouble.textContent = text ?? "";
}

function whole(value) {
  return value.toLocaleString("en");
}

function decimal(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
}

function percent(share) {
  if (share === null) return "–";
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

function duration(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
}

/** A time in its two greatest units. */
function longTime(seconds) {
  const units = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "1 s";
  let rest = Math.floor(seconds);
  const said = units.slice(first, first + 2).map(([unit, size]) => {
    const number = Math.floor(rest / size);
    rest -= number * size;
    return number > 0 ? `${number} ${unit}` : "";
  });
  return said.filter(Boolean).join(" ");
}
