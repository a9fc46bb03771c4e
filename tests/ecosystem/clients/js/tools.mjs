// What the JavaScript clients' cases call, and whether a call of it is right.
import assert from "node:assert/strict";

export const QUESTION = [{ role: "user", content: "Which way does the wind blow?" }];

export const WIND_SCHEMA = {
  type: "object",
  properties: { place: { type: "string", enum: ["river", "sea"] }, strong: { type: "boolean" } },
  required: ["place", "strong"],
  additionalProperties: false,
};

export const WIND = {
  type: "function",
  function: { name: "wind", description: "The wind's direction.", parameters: WIND_SCHEMA },
};

export function checkWind(given) {
  assert.deepEqual(Object.keys(given).sort(), ["place", "strong"]);
  assert.ok(["river", "sea"].includes(given.place));
  assert.equal(typeof given.strong, "boolean");
}

// The whole calls that streamed deltas make up.
export function joined(chunks) {
  const calls = [];
  for (const delta of chunks.flatMap((chunk) => chunk.choices[0]?.delta?.tool_calls ?? [])) {
    if (delta.index === calls.length) {
      assert.ok(delta.id);
      calls.push({ id: delta.id, name: delta.function.name, arguments: "" });
    }
    calls[delta.index].arguments += delta.function.arguments ?? "";
  }
  return calls;
}
