// Ollama's client for Node: chats, streams, a tool, an object that fits a schema, an error.
// /// script
// dependencies = ["ollama@0.6.4"]
// [tool.headwater]
// shows = ["models", "reply", "stream", "cached", "tools", "structured", "error"]
// ///
import fs from "node:fs";
import { Ollama } from "ollama";

const { BASE_URL, MODEL, TASK } = process.env;
const task = JSON.parse(fs.readFileSync(TASK));
const client = new Ollama({ host: BASE_URL });
const asked = { model: MODEL, options: { temperature: 0, num_predict: task.max_tokens } };
const system = { role: "system", content: task.system };
const [first, second] = task.questions.map((content) => ({ role: "user", content }));

const names = (await client.list()).models.map((model) => model.model.replace(/:latest$/, ""));
const { message } = await client.chat({ ...asked, messages: [system, first] });
const pieces = [];
for await (const part of await client.chat({ ...asked, messages: [system, first], stream: true })) {
  if (part.message.content) pieces.push(part.message.content);
}

const order = { role: "user", content: task.order };
const tools = [{ type: "function", function: task.tool }];
const called = (await client.chat({ ...asked, messages: [order], tools })).message;
const results = called.tool_calls.map((call) => ({ role: "tool", tool_name: call.function.name, content: task.result }));
const answered = await client.chat({ ...asked, messages: [order, called, ...results], tools });

const object = await client.chat({
  model: MODEL,
  options: { temperature: 0, num_predict: 200 },
  messages: [system, second],
  format: { ...task.schema, additionalProperties: false },
});

let error;
try {
  await client.chat({ ...asked, messages: [first], options: { temperature: 3 } });
} catch (caught) {
  error = { type: caught.name, message: caught.message };
}

console.log(
  JSON.stringify({
    models: names,
    reply: message.content,
    stream: { pieces, whole: message.content },
    tools: { calls: called.tool_calls.map((call) => call.function), answer: answered.message.content },
    structured: JSON.parse(object.message.content),
    error,
  }),
);
