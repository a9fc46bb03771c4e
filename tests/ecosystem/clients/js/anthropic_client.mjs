// The `@anthropic-ai/sdk` package against /v1/messages.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { MESSAGES, run } from "./cases.mjs";

const TOOL = {
  name: "wind",
  description: "Asks for wind.",
  input_schema: {
    type: "object",
    properties: {
      place: { type: "string", enum: ["river", "sea"] },
      strong: { type: "boolean" },
    },
    required: ["place", "strong"],
    additionalProperties: false,
  },
};

function messages(baseURL) {
  return new Anthropic({ baseURL, apiKey: "-", maxRetries: 0 }).messages;
}

function asked(more = {}) {
  return { model: "tgi", max_tokens: 12, temperature: 0, messages: MESSAGES, ...more };
}

run({
  async a_message_is_answered(base) {
    const message = await messages(base).create(asked());
    assert.equal(message.role, "assistant");
    assert.equal(message.content.length, 1);
    assert.ok(message.content[0].text);
    assert.ok(["end_turn", "max_tokens"].includes(message.stop_reason));
    const { input_tokens } = await messages(base).countTokens({ model: "tgi", messages: MESSAGES });
    const { usage } = message;
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },

  async a_stream_says_what_the_whole_message_says(base) {
    const whole = await messages(base).create(asked());
    let text = "";
    const stream = messages(base).stream(asked()).on("text", (part) => (text += part));
    const final = await stream.finalMessage();
    assert.equal(text, whole.content[0].text);
    assert.equal(final.content[0].text, text);
    assert.equal(final.stop_reason, whole.stop_reason);
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
  },

  async a_tool_is_called_and_its_result_answered(base) {
    const calling = asked({
      max_tokens: 200,
      tools: [TOOL],
      tool_choice: { type: "tool", name: "wind" },
    });
    const whole = await messages(base).create(calling);
    const streamed = await messages(base).stream(calling).finalMessage();
    for (const { content, stop_reason } of [whole, streamed]) {
      assert.equal(stop_reason, "tool_use");
      const [call] = content;
      assert.equal(call.name, "wind");
      assert.match(call.id, /^toolu_/);
      assert.ok(["river", "sea"].includes(call.input.place));
      assert.equal(typeof call.input.strong, "boolean");
    }
    assert.deepEqual(streamed.content[0].input, whole.content[0].input);
    const result = { type: "tool_result", tool_use_id: whole.content[0].id, content: "calm" };
    const conversation = [
      ...MESSAGES,
      { role: "assistant", content: whole.content },
      { role: "user", content: [result] },
    ];
    const answer = await messages(base).create(asked({ messages: conversation, tools: [TOOL] }));
    assert.ok(answer.content.length);
  },

  async a_bad_request_is_an_error_with_its_reason(base) {
    for (const stream of [false, true]) {
      const request = messages(base).create(asked({ temperature: -1, stream }));
      await assert.rejects(request, (error) => {
        assert.ok(error instanceof Anthropic.BadRequestError);
        assert.match(error.error.error.message, /temperature/);
        assert.equal(error.error.request_id, error.requestID);
        return true;
      });
    }
  },

  async a_stream_that_is_left_disturbs_no_other_request(base) {
    const stream = await messages(base).create(asked({ max_tokens: 200, stream: true }));
    for await (const event of stream) {
      if (event.type === "content_block_delta") break;
    }
    assert.ok((await messages(base).create(asked())).content.length);
  },
});
