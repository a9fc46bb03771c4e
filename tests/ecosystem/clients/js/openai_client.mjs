// The npm package `openai` against /v1.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MESSAGES, PROMPT, run } from "./cases.mjs";
import { QUESTION, WIND, checkWind, joined } from "./tools.mjs";

const model = "tgi";
const Wind = z.object({ place: z.enum(["river", "sea"]), strong: z.boolean() });
const client = (baseUrl) => new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "-", maxRetries: 0 });
const askForWind = { model, messages: QUESTION, tools: [WIND], temperature: 0, max_tokens: 150 };

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
    assert.deepEqual(usage, whole.usage);
  },

  async theStreamHelperEndsInTheWholeAnswer(baseUrl) {
    const request = { model, messages: MESSAGES, temperature: 0, max_tokens: 10 };
    const whole = await client(baseUrl).chat.completions.create(request);
    const stream = client(baseUrl).chat.completions.stream(request);
    const pieces = [];
    stream.on("content", (delta) => pieces.push(delta));
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
    assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
    assert.equal(pieces.join(""), whole.choices[0].message.content);
    assert.notEqual(final.id, whole.id);
  },

  async aStreamPassesThroughAReadableStream(baseUrl) {
    const request = { model, messages: MESSAGES, temperature: 0, max_tokens: 6 };
    const whole = await client(baseUrl).chat.completions.create(request);
    const stream = await client(baseUrl).chat.completions.create({ ...request, stream: true });
    const lines = (await new Response(stream.toReadableStream()).text()).trim().split("\n");
    const text = lines.map((line) => JSON.parse(line).choices[0].delta.content ?? "").join("");
    assert.equal(text, whole.choices[0].message.content);
  },

  async completionsAnswersAndStreams(baseUrl) {
    const request = { model, prompt: PROMPT, temperature: 0, max_tokens: 6 };
    const whole = await client(baseUrl).completions.create(request);
    assert.ok(whole.choices[0].text);
    let text = "";
    for await (const chunk of await client(baseUrl).completions.create({ ...request, stream: true })) {
      text += chunk.choices[0]?.text ?? "";
    }
    assert.equal(text, whole.choices[0].text);
  },

  async modelsAreListed(baseUrl) {
    const ids = [];
    for await (const one of client(baseUrl).models.list()) ids.push(one.id);
    assert.ok(ids.length >= 1 && ids.every((id) => id));
  },

  async parseGivesAnObjectOfTheAskedKind(baseUrl) {
    const answer = await client(baseUrl).chat.completions.parse({
      model,
      messages: MESSAGES,
      max_tokens: 200,
      response_format: zodResponseFormat(Wind, "wind"),
    });
    checkWind(answer.choices[0].message.parsed);
  },

  async aRequiredToolIsCalled(baseUrl) {
    const request = { ...askForWind, tool_choice: "required" };
    const whole = await client(baseUrl).chat.completions.create(request);
    const [choice] = whole.choices;
    assert.equal(choice.finish_reason, "tool_calls");
    const calls = choice.message.tool_calls;
    for (const call of calls) {
      assert.equal(call.function.name, "wind");
      checkWind(JSON.parse(call.function.arguments));
    }
    const chunks = [];
    for await (const chunk of await client(baseUrl).chat.completions.create({ ...request, stream: true })) {
      chunks.push(chunk);
    }
    const streamed = joined(chunks);
    assert.deepEqual(
      streamed.map((call) => call.arguments),
      calls.map((call) => call.function.arguments),
    );
    assert.equal(chunks.at(-1).choices[0].finish_reason, "tool_calls");
    const ids = [...streamed, ...calls].map((call) => call.id);
    assert.equal(new Set(ids).size, ids.length);
  },

  async parseGivesArgumentsOfTheAskedKind(baseUrl) {
    const answer = await client(baseUrl).chat.completions.parse({
      ...askForWind,
      tools: [zodFunction({ name: "wind", parameters: Wind })],
      tool_choice: "required",
    });
    for (const call of answer.choices[0].message.tool_calls) checkWind(call.function.parsed_arguments);
  },

  async theRunnerCallsTheFunctionAndKeepsItsResult(baseUrl) {
    const given = [];
    const wind = (asked) => {
      given.push(asked);
      return "from the west";
    };
    // With a named tool the runner ends once that tool has been run.
    for (const stream of [false, true]) {
      const runner = client(baseUrl).chat.completions.runTools({
        ...askForWind,
        stream,
        tools: [{ type: "function", function: { ...WIND.function, function: wind, parse: JSON.parse } }],
        tool_choice: { type: "function", function: { name: "wind" } },
      });
      assert.equal(await runner.finalFunctionToolCallResult(), "from the west");
      const roles = runner.messages.map((message) => message.role);
      assert.deepEqual(roles.slice(0, 3), ["user", "assistant", "tool"]);
    }
    assert.ok(given.length >= 2);
    given.forEach(checkWind);
  },

  async aBadRequestIsAnErrorWithItsStatus(baseUrl) {
    for (const stream of [false, true]) {
      await assert.rejects(
        client(baseUrl).chat.completions.create({ model, messages: MESSAGES, temperature: -1, stream }),
        (error) => error.status === 422 && /temperature/.test(error.message),
      );
    }
  },

  async anAbortedStreamLeavesTheServerWell(baseUrl) {
    const create = (more) => client(baseUrl).chat.completions.create({ model, messages: MESSAGES, ...more });
    const left = await create({ max_tokens: 200, stream: true });
    for await (const chunk of left) {
      assert.ok(chunk.id);
      break;
    }
    const aborted = await create({ max_tokens: 200, stream: true });
    for await (const chunk of aborted) {
      assert.ok(chunk.id);
      aborted.controller.abort();
    }
    const again = await create({ max_tokens: 4 });
    assert.ok(again.choices[0].message.content);
  },
});
