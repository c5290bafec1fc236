// Vercel's AI SDK with its provider for compatible servers: generateText, streamText, a tool, generateObject.
// /// script
// dependencies = ["ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92"]
// [tool.headwater]
// shows = ["reply", "stream", "usage", "cached", "tools", "structured", "error"]
// ///
import fs from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const { BASE_URL, MODEL, TASK } = process.env;
const task = JSON.parse(fs.readFileSync(TASK));
const headwater = createOpenAICompatible({
  name: "headwater",
  baseURL: `${BASE_URL}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: headwater(MODEL), maxOutputTokens: task.max_tokens, temperature: 0, maxRetries: 0 };
const [first, second] = task.questions.map((content) => ({ role: "user", content }));
const system = task.system;

const reply = await generateText({ ...asked, system, messages: [first] });
const stream = streamText({ ...asked, system, messages: [first] });
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
const turn = await generateText({
  ...asked,
  system,
  messages: [first, { role: "assistant", content: reply.text }, second],
});

const calls = [];
const counted = await generateText({
  ...asked,
  prompt: task.order,
  stopWhen: stepCountIs(2),
  tools: {
    [task.tool.name]: tool({
      description: task.tool.description,
      inputSchema: jsonSchema(task.tool.parameters),
      execute: async (values) => {
        calls.push({ name: task.tool.name, arguments: values });
        return task.result;
      },
    }),
  },
});
const { object } = await generateObject({
  ...asked,
  maxOutputTokens: 200,
  system,
  messages: [second],
  schema: jsonSchema({ ...task.schema, additionalProperties: false }),
});

let error;
try {
  await generateText({ ...asked, messages: [first], temperature: 3 });
} catch (caught) {
  error = { type: caught.name, message: caught.message };
}

console.log(
  JSON.stringify({
    reply: reply.text,
    stream: { pieces, whole: await stream.text },
    usage: { prompt: turn.usage.inputTokens, cached: turn.usage.inputTokenDetails.cacheReadTokens, output: turn.usage.outputTokens },
    tools: { calls, answer: counted.text },
    structured: object,
    error,
  }),
);
