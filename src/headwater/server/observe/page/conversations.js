// Conversations in the browser's storage, an entry each. One is a tree of messages, of which one path is shown:
// `chosen` names the child of each message on it, "" stands for the tree's root.

const PREFIX = "headwater.chat.";
const MAX_TITLE = 60; // characters

export const SETTINGS = { system: "", thinking: "", temperature: "", max_tokens: 1024, tools: "", reuse: false };

export class Conversations {
  constructor(storage = localStorage) {
    this.storage = storage;
    this.all = new Map();
    for (let i = 0; i < storage.length; i++) this.#read(storage.key(i));
  }

  // Another tab's change of an entry.
  changed(key) {
    if (key?.startsWith(PREFIX)) {
      this.all.delete(key.slice(PREFIX.length));
      this.#read(key);
    }
  }

  #read(key) {
    if (!key.startsWith(PREFIX)) return;
    try {
      const one = JSON.parse(this.storage.getItem(key));
      if (one?.id && one.messages) this.all.set(one.id, { ...one, settings: { ...SETTINGS, ...one.settings } });
    } catch {
      // of another program, or cut off: left where it is
    }
  }

  // Newest first.
  list() {
    return [...this.all.values()].sort((a, b) => b.changed - a.changed);
  }

  // Raises an error with a text for people if the storage is full; the conversation then lives until the page closes.
  save(conversation) {
    conversation.changed = Date.now();
    this.all.set(conversation.id, conversation);
    try {
      this.storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    } catch {
      throw new Error("The browser's storage is full, so this conversation is not saved: export it, or delete others.");
    }
  }

  delete(conversation) {
    this.all.delete(conversation.id);
    this.storage.removeItem(PREFIX + conversation.id);
  }
}

// Begins with the settings and the measured speed of the conversation before it.
export function begin({ settings, measured } = { settings: SETTINGS, measured: null }) {
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", changed: Date.now(), settings: { ...settings }, measured, serial: 0, messages: {}, chosen: {} };
}

// The messages that are shown, in order.
export function path({ messages, chosen }) {
  const shown = [];
  for (let at = messages[chosen[""]]; at; at = messages[chosen[at.id]]) shown.push(at);
  return shown;
}

// The messages before one, in order.
export function before(conversation, message) {
  const above = [];
  for (let at = conversation.messages[message.parent]; at; at = conversation.messages[at.parent]) above.unshift(at);
  return above;
}

// The versions of a message, itself included, oldest first.
export const versions = ({ messages }, { parent }) => Object.values(messages).filter((one) => one.parent === parent);

export function add(conversation, parent, fields) {
  const message = { id: `m${++conversation.serial}`, parent: parent?.id ?? "", content: "", ...fields };
  conversation.messages[message.id] = message;
  conversation.title ||= (message.content.trim() || message.files?.[0].name || "").slice(0, MAX_TITLE);
  choose(conversation, message);
  return message;
}

export const choose = (conversation, message) => (conversation.chosen[message.parent] = message.id);

// Remove a message without answers.
export function remove(conversation, message) {
  delete conversation.messages[message.id];
  const left = versions(conversation, message);
  if (left.length) choose(conversation, left.at(-1));
  else delete conversation.chosen[message.parent];
}

// One line, which `headwater bench serve` can send again; `conversation` has all versions.
export function exported(conversation, sent) {
  const calls = sent.flatMap((message, i) => (message.role === "assistant" ? [i] : []));
  return `${JSON.stringify({ session: conversation.title, messages: sent, calls, conversation })}\n`;
}
