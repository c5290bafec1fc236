// Requests to the server: the body of a turn, its streamed answer, and what the cache saved of it.

const MIN_MEASURED_TOKENS = 64; // of a prefill from which the speed is known

// The page's own address has no user and no password, as `fetch` wants it, even if it was opened with them.
const address = (path) => new URL(path, `${location.origin}${location.pathname}`);

export async function models() {
  const response = await call(address("v1/models"));
  return (await response.json()).data.map((model) => model.id);
}

// The nodes of the cache's tree that hold a turn's prompt, from its namespace's root down.
export async function treePath(body) {
  const response = await post("cache/path", body);
  return (await response.json()).nodes;
}

const post = (path, body, signal) =>
  call(address(path), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });

async function call(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  }
  if (response.ok) return response;
  const text = await response.text();
  if (response.status === 401) throw new Error(`${message(text)}. Reload the page to enter it.`);
  throw new Error(message(text) || `The server answers ${response.status}.`);
}

function message(text) {
  try {
    const { error } = JSON.parse(text);
    return error.message ?? String(error);
  } catch {
    return text.slice(0, 500);
  }
}

// The messages of a conversation as the API has them. Files come before the text of their message; answers that failed
// or were stopped before their text are left out.
export function sent({ system }, messages) {
  const whole = messages.filter(({ role, content, calls }) => role !== "assistant" || content || calls?.length);
  const turns = whole.map(({ role, content, files = [], reasoning, calls = [], call }) => {
    if (role === "tool") return { role, tool_call_id: call, content };
    if (role === "user") return { role, content: files.length ? [...files.map(part), { type: "text", text: content, segment: false }] : content };
    const thoughts = reasoning ? { reasoning_content: reasoning } : {};
    const made = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role, content, ...thoughts, ...(made.length ? { tool_calls: made } : {}) };
  });
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

const part = ({ name, text }) => ({ type: "text", text: `${name}:\n\n${text}\n\n`, segment: true });

// Raises an error for tools that are not JSON.
export function body({ settings }, messages, model) {
  const { temperature, max_tokens: limit, thinking, tools, reuse } = settings;
  return {
    ...(model ? { model } : {}),
    messages: sent(settings, messages),
    stream: true,
    stream_options: { include_usage: true, include_progress: true },
    ...(limit ? { max_tokens: Number(limit) } : {}),
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    ...(thinking ? { reasoning_effort: thinking } : {}),
    ...(tools.trim() ? { tools: parsed(tools) } : {}),
    ...(messages.some((one) => one.files?.length) ? { exact: !reuse } : {}),
  };
}

export function parsed(tools) {
  try {
    return [JSON.parse(tools)].flat();
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
}

// Read an answer into `message`, and call `progress` with what has arrived: pieces of it, or the prompt's tokens.
export async function stream(asked, message, signal, progress) {
  const times = { sent: performance.now(), first: null, last: null };
  const response = await post("v1/chat/completions", asked, signal);
  const found = { usage: null, account: null };
  for await (const line of lines(response.body)) {
    const counts = line.match(/^: progress (\d+)\/(\d+)$/);
    if (counts) progress({ computed: Number(counts[1]), prompt: Number(counts[2]) });
    if (!line.startsWith("data: {")) continue;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Error(event.error.message);
    found.usage = event.usage ?? found.usage;
    found.account = event.headwater ?? found.account;
    const [choice] = event.choices;
    if (!choice) continue;
    message.finish = choice.finish_reason ?? message.finish;
    if (take(choice.delta, message)) {
      times.last = performance.now();
      times.first ??= times.last;
      progress(null);
    }
  }
  if (!message.finish) throw new Error("The stream ended before the answer did.");
  return account(found, times);
}

// Add a piece to the message. Returns whether it has any text.
function take({ content, reasoning_content: thought, tool_calls: calls = [] }, message) {
  if (content) message.content += content;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  for (const { index, id, function: { name, arguments: text } } of calls) {
    const all = (message.calls ??= []);
    const one = (all[index] ??= { id, name, text: "" });
    one.text += text;
  }
  return Boolean(content || thought || calls.length);
}

function account({ usage, account: { reason } = {} }, { sent: start, first, last }) {
  const output = usage?.completion_tokens ?? 0;
  return {
    prompt: usage?.prompt_tokens ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
    output,
    reason,
    ttft: first === null ? null : (first - start) / 1000,
    rate: output > 1 && last > first ? (1000 * (output - 1)) / (last - first) : null,
  };
}

// Note the speed of the longest prefill of the conversation, or of the one before it, by this model; and the seconds that
// an answer's cached tokens would have taken at it: null if it is not known. `headwater chat` has the same rule.
export function measure(conversation, model, found) {
  if (conversation.measured?.model !== model) conversation.measured = { model, tokens: 0, seconds: 0 };
  const computed = found.prompt - found.cached;
  if (found.ttft !== null && computed > conversation.measured.tokens) conversation.measured = { model, tokens: computed, seconds: found.ttft };
  const { tokens, seconds } = conversation.measured;
  found.saved = found.cached && found.ttft !== null && tokens >= MIN_MEASURED_TOKENS ? (found.cached * seconds) / tokens : null;
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    yield* whole;
  }
}
