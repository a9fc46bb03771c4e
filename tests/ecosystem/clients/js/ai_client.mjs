// Vercel's `ai` with both of its OpenAI providers; it checks every answer by zod.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MESSAGES, run } from "./cases.mjs";
import { QUESTION, checkWind } from "./tools.mjs";

const Wind = z.object({ place: z.enum(["river", "sea"]), strong: z.boolean() });

const models = (baseUrl) => [
  createOpenAICompatible({
    name: "millrace",
    baseURL: `${baseUrl}/v1`,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })("tgi"),
  createOpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "-" }).chat("tgi"),
  createOpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "-" }).responses("tgi"),
];

const windTool = (given = []) =>
  tool({
    description: "The wind's direction.",
    inputSchema: Wind,
    execute: async (asked) => {
      given.push(asked);
      return "from the west";
    },
  });

// Called in the first step, answered in words in the second.
const twoSteps = (given) => ({
  messages: QUESTION,
  temperature: 0,
  maxOutputTokens: 150,
  maxRetries: 0,
  tools: { wind: windTool(given) },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});

const checkSteps = (steps, given) => {
  assert.deepEqual(
    steps.map((step) => step.toolCalls.length > 0),
    [true, false],
  );
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.ok(steps[1].text);
  assert.equal(given.length, steps[0].toolCalls.length);
  given.forEach(checkWind);
  assert.deepEqual(
    steps[0].toolResults.map((result) => result.toolCallId),
    steps[0].toolCalls.map((call) => call.toolCallId),
  );
};

await run({
  async streamTextSaysWhatGenerateTextSays(baseUrl) {
    for (const model of models(baseUrl)) {
      const options = { model, messages: MESSAGES, temperature: 0, maxOutputTokens: 10, maxRetries: 0 };
      const whole = await generateText(options);
      assert.ok(whole.text);
      const stream = streamText(options);
      let text = "";
      for await (const piece of stream.textStream) text += piece;
      assert.equal(text, whole.text);
      assert.equal(await stream.finishReason, whole.finishReason);
      assert.ok(["stop", "length"].includes(whole.finishReason));
      const usage = await stream.usage;
      assert.equal(usage.outputTokens, whole.usage.outputTokens);
      assert.equal(usage.inputTokens, whole.usage.inputTokens);
      assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
      assert.notEqual((await stream.response).id, whole.response.id);
    }
  },

  async anObjectOfTheAskedKindIsGeneratedAndStreamed(baseUrl) {
    for (const model of models(baseUrl)) {
      const options = {
        model,
        messages: MESSAGES,
        temperature: 0,
        maxOutputTokens: 200,
        maxRetries: 0,
        output: Output.object({ schema: Wind }),
      };
      const { output } = await generateText(options);
      checkWind(output);
      const stream = streamText(options);
      let last = null;
      for await (const partial of stream.partialOutputStream) last = partial;
      assert.deepEqual(last, output);
    }
  },

  async aToolIsCalledAndItsResultAnswered(baseUrl) {
    for (const model of models(baseUrl)) {
      const given = [];
      const { steps } = await generateText({ model, ...twoSteps(given) });
      checkSteps(steps, given);
    }
  },

  async aStreamedToolCallDoesTheSame(baseUrl) {
    for (const model of models(baseUrl)) {
      const given = [];
      const stream = streamText({ model, ...twoSteps(given) });
      await stream.consumeStream();
      checkSteps(await stream.steps, given);
    }
  },

  async aNamedToolIsCalled(baseUrl) {
    for (const model of models(baseUrl)) {
      const { toolCalls } = await generateText({
        model,
        messages: QUESTION,
        maxOutputTokens: 150,
        maxRetries: 0,
        tools: { wind: windTool(), stop: tool({ inputSchema: z.object({}) }) },
        toolChoice: { type: "tool", toolName: "wind" },
      });
      assert.ok(toolCalls.length >= 1);
      for (const call of toolCalls) {
        assert.equal(call.toolName, "wind");
        assert.ok(!call.invalid);
        checkWind(call.input);
      }
    }
  },

  async aBadRequestIsAnErrorWithItsStatus(baseUrl) {
    for (const model of models(baseUrl)) {
      await assert.rejects(
        generateText({ model, messages: MESSAGES, temperature: -1, maxRetries: 0 }),
        (error) => error.statusCode === 422 && /temperature/.test(error.message),
      );
    }
  },
});
