// The messages of a conversation: texts, folded thoughts and calls, accounts, and what can be done with each.

import { versions } from "./conversations.js";
import { byId, el, join, number, seconds, set } from "./dom.js";
import { markdown } from "./markdown.js";
import { FULL, REASONS } from "./reasons.js";

const ENDS = { length: "cut at its limit", stopped: "stopped", timeout: "cut at its time limit" };
const NEAR_END = 60; // pixels from the end within which the thread follows an answer

export class Thread {
  // actions: { edit(message, text), again(message), choose(message), results(message, texts), path(message), copy(text) }
  constructor(root, actions) {
    Object.assign(this, { root, actions, editing: null, progress: null, waiting: false });
    root.addEventListener("click", (event) => this.#click(event));
    root.addEventListener("keydown", (event) => this.#key(event));
    root.addEventListener("submit", (event) => this.#submit(event));
  }

  // `running`: the message that is being answered, if any.
  show(conversation, messages, running) {
    const other = this.conversation !== conversation;
    if (other) this.editing = null;
    if (this.running !== running) this.progress = null;
    Object.assign(this, { conversation, messages, running, last: messages.at(-1) });
    const key = (message) => `${conversation.id}${message.id}`;
    this.follow(other, () => join(this.root, messages, key, (message) => this.#make(message), (item, message) => this.#update(item, message)));
  }

  // A piece of the running answer arrived; `progress` is the prompt's, null once the answer began.
  hear(progress) {
    this.progress = progress;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.running) this.refresh(this.running);
    });
  }

  refresh(message) {
    const item = this.#item(message);
    if (item) this.follow(false, () => this.#update(item, message));
  }

  #item(message) {
    return this.root.kept?.get(`${this.conversation.id}${message.id}`);
  }

  // Stay at the end, where the reader is, or go there.
  follow(go, change = () => {}) {
    const box = this.root.parentNode;
    const at = go || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
    change();
    if (at) box.scrollTop = box.scrollHeight;
  }

  edit(message) {
    this.editing = message?.id ?? null;
    this.show(this.conversation, this.messages, this.running);
    if (message) this.root.querySelector("textarea.edited")?.focus();
  }

  #make({ role }) {
    const part = (name, tag = "div") => el(tag, { class: name });
    return el("li", { class: `message ${role}` },
      part("thoughts", "details"), part("files"), part("text"), part("calls"), part("failure", "p"), part("account", "p"), part("actions"));
  }

  #update(item, message) {
    set(item, { "data-message": message.id, "aria-busy": this.running === message ? "true" : null });
    const [thoughts, files, text, calls, failure, account, actions] = item.children;
    this.#thoughts(thoughts, message);
    if (!files.firstChild) files.append(...(message.files ?? []).map((file) => fold("file", file.name, `${number(file.text.length)} characters`, file.text)));
    this.#text(text, message);
    this.#calls(calls, message);
    set(failure, { role: message.error ? "alert" : null });
    failure.replaceChildren(...(message.error ? [message.error, " ", button("again", "Retry")] : []));
    account.replaceChildren(...this.#account(message));
    actions.replaceChildren(...this.#actions(message));
  }

  #thoughts(box, message) {
    set(box, { hidden: message.reasoning ? null : "" });
    if (!message.reasoning) return;
    if (!box.firstChild) box.replaceChildren(el("summary"), el("div"));
    box.firstChild.textContent = this.running === message && !message.content ? "Thinking…" : "Thoughts";
    if (box.lastChild.textContent !== message.reasoning) box.lastChild.textContent = message.reasoning;
  }

  #text(box, message) {
    if (this.editing === message.id) {
      if (box.querySelector(".edited")) return;
      const field = el("textarea", { class: "edited", "aria-label": "Edited message", rows: Math.min(12, message.content.split("\n").length + 1) });
      field.value = message.content;
      box.replaceChildren(el("form", { "data-form": "edit" }, field, el("div", { class: "row" }, el("button", { class: "main" }, "Send"), button("cancel", "Cancel"))));
    } else if (message.role === "tool") {
      if (!box.firstChild) box.append(fold("call", "Result", message.name, message.content));
    } else if (message.role === "user") {
      box.replaceChildren(message.content);
    } else {
      refill(box, this.#answer(message));
    }
  }

  #answer(message) {
    if (message.content || message !== this.running) return markdown(message.content);
    if (message.reasoning || message.calls) return [];
    const { computed, prompt } = this.progress ?? {};
    if (!prompt) return [el("span", { class: "waits" }, "…")];
    return [el("span", { class: "waits" }, `${number(computed)} of ${number(prompt)} tokens of the prompt`), el("progress", { value: computed, max: prompt, "aria-label": "Prompt" })];
  }

  #calls(box, message) {
    const calls = message.calls ?? [];
    const wants = calls.length && message === this.last && message !== this.running && !message.error;
    const now = `${wants} ${calls.map((call) => call.text).join()}`;
    if (box.now === now) return;
    box.now = now;
    const shown = calls.map((call) => fold("call", `Call of ${call.name}`, "", pretty(call.text)));
    box.replaceChildren(...shown, ...(wants ? [results(calls)] : []));
  }

  #account(message) {
    const parts = [];
    const { account, finish } = message;
    if (account) {
      if (account.prompt !== null && account.cached !== null) parts.push(known(account));
      if (account.ttft !== null) parts.push(`${spell(account.ttft)} to the first token${account.saved ? `, about ${spell(account.saved)} saved` : ""}`);
      if (account.rate) parts.push(`${account.rate < 10 ? account.rate.toFixed(1) : number(account.rate)} tokens/s`);
    }
    if (ENDS[finish]) parts.push(ENDS[finish]);
    if (account) parts.push(el("a", { href: "./", "data-do": "path", title: "The path of this prompt in the live page's tree" }, "path"));
    return parts.flatMap((one, i) => (i ? [" · ", one] : [one]));
  }

  #actions(message) {
    if (message === this.running || this.editing === message.id || message.role === "tool") return [];
    const all = versions(this.conversation, message);
    const at = all.indexOf(message);
    const free = !this.running;
    const made = [];
    if (all.length > 1) {
      made.push(button("previous", "‹", "Previous version", free && at > 0), el("span", { class: "version" }, `${at + 1}/${all.length}`), button("next", "›", "Next version", free && at + 1 < all.length));
    }
    if (message.role === "user") made.push(button("edit", "Edit", "Edit this message", free));
    else if (!message.error) made.push(button("again", "Regenerate", "Answer again", free));
    if (message.content) made.push(button("copy", "Copy"));
    return made;
  }

  #message(element) {
    const { message } = element.closest("[data-message]").dataset;
    return this.conversation.messages[message];
  }

  #click(event) {
    const pressed = event.target.closest("[data-do]");
    if (!pressed) return;
    event.preventDefault();
    const message = this.#message(pressed);
    const all = versions(this.conversation, message);
    const beside = (step) => {
      const other = all[all.indexOf(message) + step];
      this.actions.choose(other);
      this.#item(other).querySelector(`[data-do="${pressed.dataset.do}"]:enabled, [data-do="${step < 0 ? "next" : "previous"}"]`)?.focus();
    };
    const acts = {
      previous: () => beside(-1),
      next: () => beside(1),
      edit: () => this.edit(message),
      cancel: () => this.edit(null),
      again: () => this.actions.again(message),
      copy: () => this.actions.copy(message.content),
      path: () => this.actions.path(message),
    };
    acts[pressed.dataset.do]();
  }

  #key(event) {
    if (!event.target.matches(".edited")) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      this.edit(null);
    } else if (sends(event)) {
      event.preventDefault();
      event.target.form.requestSubmit();
    }
  }

  #submit(event) {
    event.preventDefault();
    const message = this.#message(event.target);
    const fields = [...event.target.querySelectorAll("textarea")].map((field) => field.value);
    if (event.target.dataset.form === "results") return this.actions.results(message, fields);
    this.editing = null;
    this.actions.edit(message, fields[0]);
  }
}

// Enter without Shift, outside of an input method's composition.
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

// Replace only the children that differ, so that a selection before them stays.
function refill(box, nodes) {
  nodes.forEach((node, i) => {
    const old = box.childNodes[i];
    if (!old) box.append(node);
    else if (!node.isEqualNode || !old.isEqualNode(node)) old.replaceWith(node);
  });
  while (box.childNodes.length > nodes.length) box.lastChild.remove();
}

function button(act, text, label = null, enabled = true) {
  return el("button", { type: "button", "data-do": act, "aria-label": label, title: label, disabled: enabled ? null : "" }, text);
}

function fold(kind, title, note, text) {
  return el("details", { class: kind }, el("summary", {}, title, " ", el("small", {}, note ?? "")), el("pre", { tabindex: 0 }, text));
}

function results(calls) {
  const fields = calls.map(({ name }) => el("label", {}, `Result of ${name}`, el("textarea", { rows: 2 })));
  return el("form", { "data-form": "results" }, ...fields, el("div", { class: "row" }, el("button", { class: "main" }, "Send results")));
}

function known({ cached, prompt, reason }) {
  const text = `${number(cached)} of ${number(prompt)} tokens known`;
  const why = reason && reason !== "full" ? ` (${reason.replaceAll("_", " ")})` : "";
  return el("span", { title: reason === "full" ? FULL : REASONS[reason] }, text + why);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete, or not JSON
  }
}

const spell = (value) => (value < 0.1 || value >= 59.5 ? seconds(value) : `${value.toFixed(value < 9.95 ? 1 : 0)} s`);

export const thread = (actions) => new Thread(byId("messages"), actions);
