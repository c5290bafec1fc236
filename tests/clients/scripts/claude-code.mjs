// Claude Code in print mode, twice, each time in a new home. Noise is cut by `max_tokens`, which it reports as an error.
// /// script
// dependencies = ["@anthropic-ai/claude-code@2.1.328"]
// [tool.headwater]
// shows = ["again", "cached"]
// ///
import { spawnSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";

const { BASE_URL, MODEL, TASK, WORK } = process.env;
const task = JSON.parse(fs.readFileSync(TASK));
const claude = path.join(import.meta.dirname, "node_modules", ".bin", "claude");
const home = path.join(WORK, "home"); // its path is part of the prompt
const command = ["-p", task.questions[0], "--output-format", "json", "--max-turns", "1"];
const env = {
  ...process.env,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_BASE_URL: BASE_URL,
  ANTHROPIC_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: `${task.max_tokens}`,
  DISABLE_TELEMETRY: "1",
  HOME: home,
};

function run() {
  fs.rmSync(home, { recursive: true, force: true });
  fs.mkdirSync(home);
  const { stdout, stderr } = spawnSync(claude, command, { cwd: home, env, encoding: "utf8" });
  const result = JSON.parse(stdout || JSON.stringify({ stderr }));
  const ended = ["completed", "max_turns"].includes(result.terminal_reason) || result.api_error === "max_output_tokens";
  if (!ended || result.api_error_status !== null) throw new Error(JSON.stringify(result));
  return result.usage;
}

run();
const { input_tokens, cache_read_input_tokens: cached, cache_creation_input_tokens, output_tokens: output } = run();
console.log(JSON.stringify({ again: { prompt: input_tokens + cached + cache_creation_input_tokens, cached, output } }));
