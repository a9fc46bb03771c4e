// Vercel's `ai`: pictures in messages, and an agent whose tool takes screenshots.
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { run } from "./cases.mjs";

const shown = readdirSync(process.env.PICTURES)
  .filter((name) => name.endsWith(".png"))
  .map((name) => [name.slice(0, -4), readFileSync(`${process.env.PICTURES}/${name}`)]);
const openai = (baseUrl) => createOpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "-" });
const models = (baseUrl) => [
  createOpenAICompatible({ name: "millrace", baseURL: `${baseUrl}/v1` })("reader"),
  openai(baseUrl).chat("reader"),
  openai(baseUrl).responses("reader"),
];

await run({
  async aPictureIsRead(baseUrl) {
    for (const model of models(baseUrl)) {
      for (const [text, image] of shown) {
        const content = [
          { type: "text", text: "Read it." },
          { type: "file", data: image, mediaType: "image/png" },
        ];
        const options = { model, messages: [{ role: "user", content }], temperature: 0, maxRetries: 0 };
        assert.equal((await generateText(options)).text, text);
        assert.equal(await streamText(options).text, text);
      }
    }
  },

  async anAgentReadsTheScreenshotsOfItsTool(baseUrl) {
    for (const [text, image] of shown) {
      const screenshot = tool({
        description: "Shows the screen.",
        inputSchema: z.object({}),
        execute: async () => image.toString("base64"),
        toModelOutput: ({ output }) => ({
          type: "content",
          value: [{ type: "file", mediaType: "image/png", data: { type: "data", data: output } }],
        }),
      });
      const answer = await generateText({
        model: openai(baseUrl).responses("reader"),
        prompt: "What is on the screen?",
        temperature: 0,
        maxRetries: 0,
        tools: { screenshot },
        stopWhen: stepCountIs(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
      });
      assert.equal(answer.steps.length, 2);
      assert.equal(answer.text, text);
    }
  },
});
