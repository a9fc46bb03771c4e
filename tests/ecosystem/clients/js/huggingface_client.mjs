// The npm package `@huggingface/inference`: text goes to /v1/completions with the URL as model.
import assert from "node:assert/strict";
import { InferenceClient } from "@huggingface/inference";
import { MESSAGES, PROMPT, run } from "./cases.mjs";
import { QUESTION, WIND, WIND_SCHEMA, checkWind, joined } from "./tools.mjs";

const endpoint = (baseUrl) => new InferenceClient("-").endpoint(baseUrl);
const askForWind = { messages: QUESTION, tools: [WIND], tool_choice: "required", temperature: 0, max_tokens: 150 };

await run({
  async textGenerationAnswers(baseUrl) {
    const parameters = { max_new_tokens: 6, temperature: 0 };
    const answer = await endpoint(baseUrl).textGeneration({ inputs: PROMPT, parameters });
    const again = await endpoint(baseUrl).textGeneration({ inputs: PROMPT, parameters });
    assert.ok(answer.generated_text);
    assert.equal(again.generated_text, answer.generated_text);
  },

  async chatStreamSaysWhatTheWholeAnswerSays(baseUrl) {
    const request = { messages: MESSAGES, max_tokens: 8, temperature: 0 };
    const whole = await endpoint(baseUrl).chatCompletion(request);
    let text = "";
    for await (const chunk of endpoint(baseUrl).chatCompletionStream(request)) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  },

  async aSchemaBindsTheAnswer(baseUrl) {
    const answer = await endpoint(baseUrl).chatCompletion({
      messages: MESSAGES,
      max_tokens: 200,
      response_format: { type: "json_schema", json_schema: { name: "wind", schema: WIND_SCHEMA, strict: true } },
    });
    checkWind(JSON.parse(answer.choices[0].message.content));
  },

  async aRequiredToolIsCalled(baseUrl) {
    const whole = await endpoint(baseUrl).chatCompletion(askForWind);
    assert.equal(whole.choices[0].finish_reason, "tool_calls");
    const calls = whole.choices[0].message.tool_calls;
    for (const call of calls) checkWind(JSON.parse(call.function.arguments));
    const chunks = [];
    for await (const chunk of endpoint(baseUrl).chatCompletionStream(askForWind)) chunks.push(chunk);
    assert.deepEqual(
      joined(chunks).map((call) => call.arguments),
      calls.map((call) => call.function.arguments),
    );
  },

  async aBadRequestIsRejected(baseUrl) {
    await assert.rejects(endpoint(baseUrl).chatCompletion({ messages: MESSAGES, temperature: -1 }));
  },
});
