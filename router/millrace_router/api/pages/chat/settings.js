"use strict";

const SETTINGS_NAME = "millrace.settings";
/** The ids of the inputs that are numbers, which are the names of fields of requests. */
const NUMBERS = Array.from(document.querySelectorAll("#form input[type=number]"), (input) => input.id);
/** What stands in their place while they are empty, unless the server has defaults of its own. */
const NEUTRAL = Object.fromEntries(NUMBERS.map((id) => [id, byId(id).placeholder]));
const SETTINGS = ["system", ...NUMBERS, "seed", "stop_sequences", "schema", "tools"];
/** Settings that are folded: the disclosure of each. */
const FOLDED = { schema: "advanced", tools: "of-tools" };

/** A setting that no request can be made of. */
class SettingError extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

/** The form of settings; empty means what the server does without. */
const settings = {
  load() {
    let values = {};
    try {
      values = JSON.parse(kept.get(SETTINGS_NAME)) ?? {};
    } catch {
      // Somebody else's.
    }
    for (const id of SETTINGS) byId(id).value = typeof values[id] === "string" ? values[id] : "";
    byId("key").value = kept.get(KEY_NAME) ?? "";
    for (const [id, fold] of Object.entries(FOLDED)) byId(fold).open = byId(id).value !== "";
  },

  save() {
    kept.set(SETTINGS_NAME, JSON.stringify(this.values()));
    kept.set(KEY_NAME, byId("key").value.trim());
  },

  values() {
    return Object.fromEntries(SETTINGS.map((id) => [id, byId(id).value]));
  },

  /** Empties everything but the key. */
  reset() {
    for (const id of SETTINGS) byId(id).value = "";
    this.showFault(null);
    this.save();
  },

  get system() {
    return byId("system").value.trim();
  },

  /** The fields of a request; fails with SettingError. */
  fields() {
    const fields = {};
    for (const id of NUMBERS) {
      const input = byId(id);
      if (!input.validity.valid) throw new SettingError(id, `${labelOf(input)}: ${input.validationMessage}`);
      if (input.value !== "") fields[id] = input.valueAsNumber;
    }
    const seed = byId("seed").value.trim();
    if (seed !== "") fields.seed = seedOf(seed);
    const stops = byId("stop_sequences").value.split("\n").filter((line) => line !== "");
    if (stops.length > 0) fields.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
    const schema = byId("schema").value.trim();
    if (schema !== "") {
      fields.response_format = {
        type: "json_schema",
        json_schema: { name: "answer", schema: schemaOf(schema), strict: true },
      };
    }
    const tools = byId("tools").value.trim();
    if (tools !== "") fields.tools = toolsOf(tools);
    return fields;
  },

  /** Marks the setting of a SettingError, and says below it what is wrong, in view; null marks none. */
  showFault(error) {
    for (const id of SETTINGS) {
      byId(id).removeAttribute("aria-invalid");
      byId(id).removeAttribute("aria-describedby");
    }
    const fault = byId("fault");
    fault.hidden = error === null;
    if (error === null) return;
    const input = byId(error.id);
    if (error.id in FOLDED) byId(FOLDED[error.id]).open = true;
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", fault.id);
    input.closest("label").after(fault);
    fault.textContent = error.message;
    input.focus();
    fault.scrollIntoView({ block: "nearest" });
  },
};

function labelOf(input) {
  return input.labels[0].firstChild.textContent.trim();
}

function seedOf(text) {
  const seed = Number(text);
  if (!/^-?\d+$/.test(text) || !Number.isSafeInteger(seed)) {
    throw new SettingError("seed", "Seed: a whole number between -2⁵³ and 2⁵³.");
  }
  return seed;
}

function schemaOf(text) {
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new SettingError("schema", `The schema is no JSON: ${error.message}`);
  }
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) {
    throw new SettingError("schema", "The schema has to be a JSON object.");
  }
  return schema;
}

/** Tools of a request: a list of functions, with or without the frame that OpenAI's API has around each. */
function toolsOf(text) {
  let tools;
  try {
    tools = [JSON.parse(text)].flat();
  } catch (error) {
    throw new SettingError("tools", `The tools are no JSON: ${error.message}`);
  }
  return tools.map((tool) => {
    const framed = tool?.type === "function" ? tool : { type: "function", function: tool };
    if (typeof framed.function?.name === "string") return framed;
    throw new SettingError("tools", "Each tool has to be a function with a name.");
  });
}
