// The npm package `openai` against /v1.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { MESSAGES, PROMPT, run } from "./cases.mjs";

const model = "tgi";
const client = (baseUrl) => new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "-", maxRetries: 0 });

await run({
  async chatStreamSaysWhatTheWholeAnswerSays(baseUrl) {
    const create = (more) =>
      client(baseUrl).chat.completions.create({ model, messages: MESSAGES, temperature: 0, max_tokens: 10, ...more });
    const whole = await create({});
    let text = "";
    let usage = null;
    for await (const chunk of await create({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },

  async completionsAnswers(baseUrl) {
    const answer = await client(baseUrl).completions.create({ model, prompt: PROMPT, max_tokens: 6 });
    assert.ok(answer.choices[0].text);
  },

  async aBadRequestIsAnErrorWithItsStatus(baseUrl) {
    await assert.rejects(
      client(baseUrl).chat.completions.create({ model, messages: MESSAGES, temperature: -1 }),
      (error) => error.status === 422,
    );
  },

  async anAbortedStreamLeavesTheServerWell(baseUrl) {
    const stream = await client(baseUrl).chat.completions.create({
      model,
      messages: MESSAGES,
      max_tokens: 200,
      stream: true,
    });
    for await (const chunk of stream) {
      assert.ok(chunk.id);
      break;
    }
    const again = await client(baseUrl).chat.completions.create({ model, messages: MESSAGES, max_tokens: 4 });
    assert.ok(again.choices[0].message.content);
  },
});
