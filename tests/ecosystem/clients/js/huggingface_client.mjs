// The npm package `@huggingface/inference`: text goes to /v1/completions with the URL as model.
import assert from "node:assert/strict";
import { InferenceClient } from "@huggingface/inference";
import { MESSAGES, PROMPT, run } from "./cases.mjs";

const endpoint = (baseUrl) => new InferenceClient("-").endpoint(baseUrl);

await run({
  async textGenerationAnswers(baseUrl) {
    const answer = await endpoint(baseUrl).textGeneration({
      inputs: PROMPT,
      parameters: { max_new_tokens: 6 },
    });
    assert.ok(answer.generated_text);
  },

  async chatStreamSaysWhatTheWholeAnswerSays(baseUrl) {
    const request = { messages: MESSAGES, max_tokens: 8, temperature: 0 };
    const whole = await endpoint(baseUrl).chatCompletion(request);
    let text = "";
    for await (const chunk of endpoint(baseUrl).chatCompletionStream(request)) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole.choices[0].message.content);
  },

  async aBadRequestIsRejected(baseUrl) {
    await assert.rejects(endpoint(baseUrl).chatCompletion({ messages: MESSAGES, temperature: -1 }));
  },
});
