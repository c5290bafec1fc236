// Qwen Code with a prompt on its command line, twice, each time in a new home.
// /// script
// dependencies = ["@qwen-code/qwen-code@0.24.4"]
// [tool.headwater]
// shows = ["answer", "again", "cached"]
// ///
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";

const { BASE_URL, MODEL, TASK, WORK } = process.env;
const task = JSON.parse(fs.readFileSync(TASK));
const qwen = path.join(import.meta.dirname, "node_modules", ".bin", "qwen");
const home = path.join(WORK, "home");
const flags = ["--auth-type", "openai", "--output-format", "json", "--max-session-turns", "1"];
const settings = {
  OPENAI_API_KEY: "none",
  OPENAI_BASE_URL: `${BASE_URL}/v1`,
  OPENAI_MODEL: MODEL,
  QWEN_CODE_MAX_OUTPUT_TOKENS: `${task.max_tokens}`, // else it asks for 32,000, with which a prompt exceeds the model's length
};

function run() {
  fs.rmSync(home, { recursive: true, force: true });
  fs.mkdirSync(path.join(home, ".qwen"), { recursive: true });
  fs.writeFileSync(path.join(home, ".qwen", "settings.json"), '{"privacy": {"usageStatisticsEnabled": false}}');
  const env = { ...process.env, ...settings, HOME: home };
  return JSON.parse(execFileSync(qwen, ["-p", task.questions[0], ...flags], { cwd: WORK, env, encoding: "utf8" }));
}

const [, second] = [run(), run()];
const { result, usage } = second.find((event) => event.type === "result");
console.log(
  JSON.stringify({
    answer: result,
    again: { prompt: usage.input_tokens, cached: usage.cache_read_input_tokens, output: usage.output_tokens },
  }),
);
