// Codex without a terminal, twice, each time in a new home.
// /// script
// dependencies = ["@openai/codex@0.169.0"]
// [tool.headwater]
// shows = ["answer", "again", "cached"]
// ///
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";

const { BASE_URL, MODEL, TASK, WORK } = process.env;
const task = JSON.parse(fs.readFileSync(TASK));
const codex = path.join(import.meta.dirname, "node_modules", ".bin", "codex");
const home = path.join(WORK, "home"); // its path is part of the prompt
const settings = `
model = "${MODEL}"
model_provider = "headwater"
analytics.enabled = false
check_for_update_on_startup = false
features.apps = false
features.plugins = false

[model_providers.headwater]
name = "Headwater"
base_url = "${BASE_URL}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`;

function run() {
  fs.rmSync(home, { recursive: true, force: true });
  fs.mkdirSync(home);
  fs.writeFileSync(path.join(home, "config.toml"), settings);
  const flags = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", "--cd", WORK];
  const env = { ...process.env, CODEX_HOME: home };
  const lines = execFileSync(codex, [...flags, task.questions[0]], { cwd: WORK, env, encoding: "utf8" });
  return lines.trim().split("\n").map((line) => JSON.parse(line));
}

const [, second] = [run(), run()];
const { usage } = second.find((event) => event.type === "turn.completed");
const answer = second.filter((event) => event.item?.type === "agent_message").map((event) => event.item.text);
console.log(
  JSON.stringify({
    answer: answer.join("\n"),
    again: { prompt: usage.input_tokens, cached: usage.cached_input_tokens, output: usage.output_tokens },
  }),
);
