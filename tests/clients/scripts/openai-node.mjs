// OpenAI's SDK for Node: chats, streams, tools and parsed objects, the Responses API, the list of models, an error.
// /// script
// dependencies = ["openai@7.55.0", "zod@4.6.7"]
// [tool.headwater]
// shows = ["models", "reply", "stream", "usage", "cached", "tools", "structured", "responses", "error"]
// ///
import fs from "node:fs";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { BASE_URL, MODEL, TASK } = process.env;
const task = JSON.parse(fs.readFileSync(TASK));
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: MODEL, max_tokens: task.max_tokens, temperature: 0 };
const [first, second] = task.questions.map((content) => ({ role: "user", content }));
const messages = [{ role: "system", content: task.system }, first];

const names = [];
for await (const model of client.models.list()) names.push(model.id);

const { message } = (await client.chat.completions.create({ ...asked, messages })).choices[0];
const pieces = [];
const streamed = client.chat.completions.stream({ ...asked, messages });
streamed.on("content", (piece) => pieces.push(piece));
const whole = (await streamed.finalChatCompletion()).choices[0].message.content;
const { usage } = await client.chat.completions.create({
  ...asked,
  messages: [...messages, { role: "assistant", content: message.content }, second],
});

const calls = [];
const count = (values) => {
  calls.push({ name: task.tool.name, arguments: values });
  return task.result;
};
const runner = client.chat.completions.runTools({
  ...asked,
  messages: [{ role: "user", content: task.order }],
  tools: [{ type: "function", function: { ...task.tool, function: count, parse: JSON.parse } }],
});
const answer = await runner.finalContent();

const { parsed } = (
  await client.chat.completions.parse({
    ...asked,
    max_tokens: 200,
    messages: [messages[0], second],
    response_format: zodResponseFormat(z.object({ number: z.string().max(12), crowns: z.int().min(0).max(9999) }), "clock"),
  })
).choices[0].message;

const response = { model: MODEL, max_output_tokens: task.max_tokens, temperature: 0 };
const events = [];
const told = client.responses.stream({ ...response, instructions: task.system, input: [first] });
told.on("response.output_text.delta", (event) => events.push(event.delta));
const final = await told.finalResponse();

let error;
try {
  await client.chat.completions.create({ ...asked, messages, temperature: 3 });
} catch (caught) {
  error = { type: caught.constructor.name, message: caught.message };
}

console.log(
  JSON.stringify({
    models: names,
    reply: message.content,
    stream: { pieces, whole },
    usage: {
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details.cached_tokens,
      output: usage.completion_tokens,
    },
    tools: { calls, answer },
    structured: parsed,
    responses: { pieces: events, whole: final.output_text },
    error,
  }),
);
