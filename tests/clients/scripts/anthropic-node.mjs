// Anthropic's SDK for Node: messages, streams, a tool, the count of tokens, an error.
// /// script
// dependencies = ["@anthropic-ai/sdk@1.10.0"]
// [tool.headwater]
// shows = ["models", "reply", "stream", "usage", "cached", "tools", "counted", "error"]
// ///
import fs from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const { BASE_URL, MODEL, TASK } = process.env;
const task = JSON.parse(fs.readFileSync(TASK));
const client = new Anthropic({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const asked = { model: MODEL, max_tokens: task.max_tokens, temperature: 0 };
const [first, second] = task.questions.map((content) => ({ role: "user", content }));
const system = task.system;
const text = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

const names = [];
for await (const model of client.models.list()) names.push(model.id);

const message = await client.messages.create({ ...asked, system, messages: [first] });
const { input_tokens: counted } = await client.messages.countTokens({ model: MODEL, system, messages: [first] });
const pieces = [];
const stream = client.messages.stream({ ...asked, system, messages: [first] });
stream.on("text", (piece) => pieces.push(piece));
const whole = text(await stream.finalMessage());
const { usage } = await client.messages.create({
  ...asked,
  system,
  messages: [first, { role: "assistant", content: message.content }, second],
});

const order = { role: "user", content: task.order };
const { parameters: input_schema, ...named } = task.tool;
const tools = [{ ...named, input_schema }];
const called = await client.messages.create({ ...asked, messages: [order], tools });
const uses = called.content.filter((block) => block.type === "tool_use");
const results = uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: task.result }));
const turns = [order, { role: "assistant", content: called.content }, { role: "user", content: results }];
const answer = await client.messages.create({ ...asked, messages: turns, tools });

let error;
try {
  await client.messages.create({ ...asked, messages: [first], temperature: 3 });
} catch (caught) {
  error = { type: caught.constructor.name, message: caught.message };
}

const all = (usage) => usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
console.log(
  JSON.stringify({
    models: names,
    reply: text(message),
    stream: { pieces, whole },
    usage: { prompt: all(usage), cached: usage.cache_read_input_tokens, output: usage.output_tokens },
    tools: { calls: uses.map((use) => ({ name: use.name, arguments: use.input })), answer: text(answer) },
    counted: { counted, prompt: all(message.usage) },
    error,
  }),
);
