// The chat: what is asked, stopped, edited and kept, and the list of conversations.

import { body, measure, models, sent, stream, treePath } from "./answers.js";
import { Conversations, SETTINGS, add, before, begin, choose, exported, path, remove } from "./conversations.js";
import { byId, count, el, join, number, set } from "./dom.js";
import { sends, thread } from "./messages.js";

const MAX_FILE_CHARACTERS = 1_000_000;

const LOGBOOK = [
  ...Array.from({ length: 88 }, (_, i) => `Day ${i + 1}: the harbour counted ${(37 * (i + 1)) % 91} boats.`),
  "Ravkeld lies by the river Narnon. The mayor of Ravkeld is Berta Wesworth. Ravkeld has its yearly fair on 9 May.",
  "Selvale Glass was founded in 1874. The head of Selvale Glass is Kanor Milstead. It sells blue bottles.",
];
const SAMPLE = { name: "logbook.txt", text: LOGBOOK.join("\n\n"), question: "Who is the mayor of Ravkeld?" };

const conversations = new Conversations();
const running = new Map(); // by conversation: its answer, and what stops that
const messages = thread({
  edit: (message, text) => ask({ ...message, content: text }, conversation.messages[message.parent]),
  again: (message) => answerAgain(message),
  choose: (message) => {
    choose(conversation, message);
    save();
    show();
  },
  results: (message, texts) => {
    const parent = message.calls.reduce((at, call, i) => add(conversation, at, { role: "tool", call: call.id, name: call.name, content: texts[i] }), message);
    answer(conversation, parent);
  },
  path: (message) => openPath(message),
  copy: (text) => navigator.clipboard.writeText(text).then(() => (byId("state").textContent = "Copied"), () => notice("The browser does not allow this page to copy.")),
});
let conversation = conversations.all.get(location.hash.slice(1)) ?? conversations.list()[0] ?? begin();
let attached = [];

// ---- asking

function ask({ content, files }, parent) {
  if (content.trim() || files?.length) answer(conversation, add(conversation, parent, { role: "user", content, files }));
  else show();
  write();
}

function answerAgain(message) {
  const parent = conversation.messages[message.parent];
  if (message.error && !message.content) remove(conversation, message);
  answer(conversation, parent);
}

// Answer the message `question` of a conversation, which may not be the shown one any more when this ends.
async function answer(talk, question) {
  const message = add(talk, question, { role: "assistant" });
  const controller = new AbortController();
  const model = byId("model").value;
  running.set(talk, { message, controller });
  save(talk);
  show();
  messages.follow(true);
  byId("state").textContent = "Answering";
  try {
    message.account = await stream(body(talk, before(talk, message), model), message, controller.signal, (progress) => {
      if (talk === conversation) messages.hear(progress);
    });
    measure(talk, model, message.account);
  } catch (error) {
    if (controller.signal.aborted) message.finish = "stopped";
    else message.error = error.message;
    message.calls = message.calls?.filter((call) => isWhole(call.text));
  }
  running.delete(talk);
  byId("state").textContent = message.error ?? "Answered";
  save(talk);
  show();
}

function isWhole(text) {
  try {
    return Boolean(JSON.parse(text));
  } catch {
    return false;
  }
}

const stop = () => running.get(conversation)?.controller.abort();

async function openPath(message) {
  try {
    const asked = body(conversation, before(conversation, message), byId("model").value);
    location.assign(`./#path=${(await treePath(asked)).join(",")}`);
  } catch (error) {
    notice(error.message);
  }
}

// ---- keeping

function save(talk = conversation) {
  try {
    conversations.save(talk);
  } catch (error) {
    notice(error.message);
  }
}

function notice(text) {
  const box = byId("notice");
  box.firstChild.textContent = text;
  set(box, { hidden: text ? null : "" });
}

function open(other) {
  conversation = other;
  attached = [];
  drawer(false);
  show();
  write();
}

// Where there is a keyboard already: on a telephone the focus would open one.
function write() {
  if (matchMedia("(hover: hover)").matches) byId("text").focus();
}

function download() {
  const text = exported(conversation, sent(conversation.settings, path(conversation)));
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-") || "conversation"}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function forget() {
  if (!confirm(`Delete “${conversation.title || "New conversation"}”?`)) return;
  stop();
  conversations.delete(conversation);
  open(conversations.list()[0] ?? begin(conversation));
}

// ---- files

async function attach(files) {
  for (const file of files) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.length > MAX_FILE_CHARACTERS) notice(`${file.name} has ${number(text.length)} characters, at most ${number(MAX_FILE_CHARACTERS)} can be attached.`);
      else attached.push({ name: file.name, text });
    } catch {
      notice(`${file.name} is not a text in UTF-8.`);
    }
  }
  showAttached();
}

function showAttached() {
  byId("attached").replaceChildren(...attached.map((file) => {
    const item = el("li", {}, `${file.name} `, el("small", {}, `${number(file.text.length)} characters`), " ", el("button", { type: "button", "aria-label": `Remove ${file.name}` }, "×"));
    item.lastChild.addEventListener("click", () => {
      attached = attached.filter((one) => one !== file);
      showAttached();
    });
    return item;
  }));
}

// ---- showing

function show() {
  const shown = path(conversation);
  const now = running.get(conversation);
  messages.show(conversation, shown, now?.message);
  set(byId("welcome"), { hidden: shown.length ? "" : null });
  byId("title").value = conversation.title;
  for (const id of ["title", "export", "delete"]) set(byId(id), { disabled: shown.length ? null : "" });
  const send = byId("send");
  send.textContent = now ? "Stop" : "Send";
  set(send, { class: now ? "main stops" : "main" });
  showSettings();
  showAttached();
  showList();
  history.replaceState(null, "", shown.length ? `#${conversation.id}` : location.pathname);
}

function showList() {
  const make = () => el("li", {}, el("button", { type: "button" }, el("b"), el("small")));
  join(byId("conversations"), conversations.list(), (one) => one.id, make, (item, one) => {
    set(item, { "data-conversation": one.id });
    set(item.firstChild, { "aria-current": one === conversation ? "true" : null });
    const [title, note] = item.firstChild.children;
    title.textContent = one.title || "New conversation";
    note.textContent = `${new Date(one.changed).toLocaleDateString("en-GB")}, ${count(path(one).length, "message")}`;
  });
}

function showSettings() {
  const { settings } = conversation;
  for (const field of byId("settings").querySelectorAll("[name]")) {
    if (field.type === "checkbox") field.checked = settings[field.name];
    else if (field !== document.activeElement) field.value = settings[field.name];
  }
  const changed = Object.keys(SETTINGS).filter((name) => settings[name] !== SETTINGS[name]);
  byId("settings-now").textContent = changed.length ? changed.map((name) => name.replaceAll("_", " ")).join(", ") : "";
}

function drawer(open) {
  set(document.body, { "data-drawer": open ? "" : null });
  set(byId("drawer"), { "aria-expanded": String(open) });
}

function fit() {
  const field = byId("text");
  field.style.blockSize = "auto";
  field.style.blockSize = `${field.scrollHeight + 2}px`;
}

async function connect() {
  try {
    const names = await models();
    byId("model").replaceChildren(...names.map((name) => el("option", {}, name)));
  } catch (error) {
    notice(error.message);
  }
}

function submit() {
  if (running.has(conversation)) return stop();
  const field = byId("text");
  const [content, files] = [field.value, attached];
  if (!content.trim() && !files.length) return;
  field.value = "";
  attached = [];
  notice("");
  fit();
  ask({ content, ...(files.length ? { files } : {}) }, path(conversation).at(-1));
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("text").addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  if (!running.has(conversation)) submit();
});
byId("text").addEventListener("input", fit);
byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", async ({ target }) => {
  await attach(target.files);
  target.value = "";
});
byId("new").addEventListener("click", () => open(begin(conversation)));
byId("sample").addEventListener("click", () => {
  attached.push({ name: SAMPLE.name, text: SAMPLE.text });
  showAttached();
  byId("text").value = SAMPLE.question;
  write();
});
byId("export").addEventListener("click", download);
byId("delete").addEventListener("click", forget);
byId("drawer").addEventListener("click", () => drawer(!("drawer" in document.body.dataset)));
byId("notice").lastElementChild.addEventListener("click", () => notice(""));
byId("title").addEventListener("change", ({ target }) => {
  conversation.title = target.value.trim() || conversation.title;
  save();
  show();
});
byId("settings").addEventListener("change", ({ target }) => {
  conversation.settings[target.name] = target.type === "checkbox" ? target.checked : target.value;
  if (path(conversation).length) save();
  showSettings();
});
byId("conversations").addEventListener("click", (event) => {
  const id = event.target.closest("li")?.dataset.conversation;
  if (id) open(conversations.all.get(id));
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  drawer(false);
  stop();
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    if (name === "drop") attach(event.dataTransfer.files);
  });
}
addEventListener("storage", ({ key }) => {
  conversations.changed(key);
  if (!running.has(conversation)) conversation = conversations.all.get(conversation.id) ?? conversation;
  show();
});
addEventListener("pagehide", () => {
  for (const [talk, { message }] of running) {
    message.finish = "stopped";
    save(talk);
  }
});
show();
connect();
write();
