// Asks /cache once a second for what is new, and shows it.

import { Chart } from "./chart.js";
import { bytes, byId, clock, count, duration, el, join, number, percent, seconds, set, short } from "./dom.js";
import { Icicle } from "./icicle.js";
import { FULL, REASONS } from "./reasons.js";

const EVERY = 1000; // milliseconds
const PATIENCE = 8000; // milliseconds after which an answer is not waited for any more
const WINDOW = 30; // samples over which the hit rate is taken
const SAMPLES = 900;
const REQUESTS = 100;

const USES = [
  { name: "kv", label: "KV" },
  { name: "checkpoint", label: "Checkpoints" },
  { name: "tail", label: "Tails" },
  { name: "private", label: "Private KV" },
  { name: "slot", label: "Running states" },
  { name: "segment", label: "Segments" },
];

const heads = (body) => [...byId(body).parentNode.querySelectorAll("th")].map((head) => head.textContent);
const COLUMNS = heads("requests");
const TIER_COLUMNS = heads("tiers");

const state = { started: null, sample: 0, request: 0, tick: -1, samples: [], requests: [], pageBytes: 1 };

const of = (name) => (row) => row[name];
const memory = new Chart(byId("memory"), {
  series: USES.map((use) => ({ ...use, of: (row) => row[use.name] * state.pageBytes })),
  format: bytes,
  top: (most) => (most < state.total / 2 ? 1.15 * most : state.total),
});
const rate = new Chart(byId("rate"), {
  series: [{ name: "rate", label: "hit rate", of: of("rate") }],
  format: percent,
  lines: true,
  top: () => 1,
  steps: 2,
});
const queue = new Chart(byId("queue"), {
  series: [
    { name: "running", label: "running", of: of("running") },
    { name: "waiting", label: "waiting", of: of("waiting") },
  ],
  format: number,
  lines: true,
  top: (most) => Math.max(4, 2 * Math.ceil(most / 2)),
  steps: 2,
});
const icicle = new Icicle(byId("tree"), byId("trail"), byId("node"));

async function ask() {
  const known = new URLSearchParams(location.search);  // ?model=NAME, of several
  for (const name of ["sample", "request", "tick"]) known.set(name, state[name]);
  const response = await fetch(`cache?${known}`, { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
  if (!response.ok) throw new Error(`the server answers ${response.status}`);
  return response.json();
}

function forget(started) {
  Object.assign(state, { started, sample: 0, request: 0, tick: -1, samples: [], requests: [] });
}

function take(body) {
  state.pageBytes = body.memory.page_bytes;
  state.total = body.memory.pages.total * state.pageBytes;
  const { columns, rows } = body.timeline;
  for (const row of rows) state.samples.push(Object.fromEntries(columns.map((name, i) => [name, row[i]])));
  state.samples.splice(0, state.samples.length - SAMPLES);
  state.samples.forEach((sample, i) => (sample.rate ??= rateAt(i)));
  state.requests.push(...body.requests);
  state.requests.splice(0, state.requests.length - REQUESTS);
  state.sample = state.samples.at(-1)?.serial ?? 0;
  state.request = state.requests.at(-1)?.serial ?? 0;
  if (body.tree) {
    state.tick = body.tree.tick;
    state.tree = body.tree;
  }
}

// Of the prompts that ended in the window before a sample; null where none did.
function rateAt(i) {
  const [now, before] = [state.samples[i], state.samples[Math.max(0, i - WINDOW)]];
  const prompt = now.prompt_tokens - before.prompt_tokens;
  return prompt ? (now.cached_tokens - before.cached_tokens) / prompt : null;
}

function show(body) {
  byId("model").textContent = body.model;
  byId("uptime").textContent = `up ${duration(body.time - body.started)}`;
  showTiles(body);
  showPrefills(body.prefills);
  showMemory(body);
  showTiers(body.tiers);
  rate.show(state.samples);
  queue.show(state.samples);
  byId("queue-now").textContent = `${number(body.requests_running)} running, ${number(body.requests_waiting)} waiting`;
  showMisses(body.since_start);
  icicle.at(body.time);
  if (body.tree) showTree(body.tree);
  if (state.tree) showHottest(state.tree.hottest, body.time);
  showRequests();
}

function showTiles(body) {
  const { since_start: total, held, memory: { pages, bytes: held_bytes } } = body;
  const used = pages.total - pages.free;
  const evicted = total.evictions.checkpoint + total.evictions.speculative_checkpoint;
  const tiles = [
    ["Hit rate", percent(total.hit_rate), `${short(total.cached_tokens)} of ${short(total.prompt_tokens)} tokens`],
    ["Prompts", number(total.prompts), `${count(total.hits, "hit")}`],
    ["Memory", percent(used / pages.total), `${bytes(used * body.memory.page_bytes)} of ${bytes(pages.total * body.memory.page_bytes)}`],
    ["Checkpoints", number(held.checkpoints), `${bytes(held_bytes.checkpoint)}, ${number(evicted)} evicted`],
    ["Dead KV", short(held.dead_kv_tokens), "tokens without a state"],
    ["Output", short(total.output_tokens), `tokens, ${count(total.preemptions, "preemption")}`],
    ...drafts(total),
    ...healing(body),
  ];
  join(byId("tiles"), tiles, (tile) => tile[0], () => el("div", {}, el("dt"), el("dd"), el("dd", { class: "note" })), (tile, texts) => {
    texts.forEach((text, i) => (tile.children[i].textContent = text));
  });
}

// A bar for each long prefill, if there are any.
function showPrefills(prefills) {
  set(byId("computing"), { hidden: prefills.length ? null : "" });
  const make = () => el("li", {}, el("b"), el("span"), el("progress", { "aria-labelledby": "prefills-title" }));
  join(byId("prefills"), prefills, (prefill) => prefill.request_id, make, (item, prefill) => {
    const [name, share, bar] = item.children;
    name.textContent = `${prefill.endpoint}, ${seconds(prefill.total_seconds)}`;
    share.textContent = `${number(prefill.computed_tokens)} of ${number(prefill.prompt_tokens)} tokens`;
    set(bar, { value: prefill.computed_tokens, max: prefill.prompt_tokens });
  });
}

// A tile of its own if steps verified drafts.
function drafts({ drafts: { accepted, rejected } }) {
  if (!(accepted + rejected)) return [];
  return [["Drafts accepted", percent(accepted / (accepted + rejected)), `${short(accepted)} of ${short(accepted + rejected)} tokens`]];
}

// A tile of its own where segments were made: nothing else is healed.
function healing({ healings_waiting: waiting, since_start: { healings, computed_tokens: computed } }) {
  if (!computed.segment) return [];
  const note = `${number(waiting)} waiting, ${number(healings.given_up)} given up, ${short(computed.healing)} tokens`;
  return [["Healed", number(healings.healed), note]];
}

function showMemory(body) {
  const { bytes: held, pages } = body.memory;
  byId("memory-now").textContent = `${number(pages.total)} pages of ${bytes(body.memory.page_bytes)}`;
  const make = (use) => el("li", {}, el("i", { class: use.name }), el("span"));
  join(byId("memory-legend"), USES, (use) => use.name, make, (item, use) => {
    item.lastChild.textContent = `${use.label} ${bytes(held[use.name])}`;
  });
  memory.show(state.samples);
}

// A row for each store, if there are any.
function showTiers(tiers) {
  set(byId("stores"), { hidden: tiers.length ? null : "" });
  const make = () => el("tr", {}, ...TIER_COLUMNS.map((name) => el("td", { "data-label": name })));
  join(byId("tiers"), tiers.map((tier, i) => ({ ...tier, i })), (tier) => tier.i, make, (row, tier) => {
    const used = tier.limit ? `${bytes(tier.bytes)} of ${bytes(tier.limit)}` : bytes(tier.bytes);
    const others = tier.other_states ? `, ${number(tier.other_states)} of other fingerprints` : "";
    const texts = [tier.kind, used, `${number(tier.states)}${others}`, `${number(tier.read)}, ${bytes(tier.bytes_read)}`,
      `${number(tier.written)}, ${bytes(tier.bytes_written)}`, number(tier.evicted), number(tier.corrupt), tier.usable ? "yes" : "no, after a failure"];
    texts.forEach((text, i) => (row.children[i].textContent = text));
    set(row, { "data-usable": String(tier.usable) });
  });
}

function bars(list, items, empty) {
  const most = Math.max(1, ...items.map((item) => item.value));
  const rows = items.length ? items : [{ id: "empty", text: empty }];
  const make = () => el("li", {}, el("b"), el("span"), el("i"), el("small"));
  join(list, rows, (item) => item.id, make, (row, item) => {
    const [name, value, bar, note] = row.children;
    name.textContent = item.text;
    value.textContent = item.value === undefined ? "" : item.shown;
    note.textContent = item.note ?? "";
    bar.style.inlineSize = `${(100 * (item.value ?? 0)) / most}%`;
    set(row, { class: item.kind ?? null, "data-id": item.id });
  });
}

function showMisses({ misses, full_hits: full }) {
  const items = Object.entries(misses)
    .filter(([, prompts]) => prompts)
    .sort((a, b) => b[1] - a[1])
    .map(([reason, prompts]) => ({ id: reason, text: reason.replaceAll("_", " "), value: prompts, shown: number(prompts), note: REASONS[reason], kind: `reason ${reason}` }));
  if (full) items.push({ id: "full", text: "full", value: full, shown: number(full), note: FULL, kind: "reason full" });
  bars(byId("misses"), items, "No prompt has been answered yet.");
}

function showTree(tree) {
  const shown = tree.shown_nodes < tree.total_nodes ? `the largest ${number(tree.shown_nodes)} of ` : "";
  byId("tree-now").textContent = `${shown}${count(tree.total_nodes, "branch", "branches")}, by position in the prompt`;
  icicle.show(tree);
}

function showHottest(hottest, now) {
  const items = hottest.slice(0, 8).map((hot) => ({ id: hot.id, text: hot.fingerprint, value: hot.hits, shown: `${number(hot.hits)}×`, note: `${number(hot.tokens)} tokens, last used ${duration(Math.max(0, now - hot.used_at))} ago` }));
  bars(byId("hottest"), items, "No request has resumed yet.");
}

function showRequests() {
  set(byId("no-requests"), { hidden: state.requests.length ? "" : null });
  const make = () => el("tr", {}, ...COLUMNS.map((name) => el("td", { "data-label": name })));
  join(byId("requests"), state.requests.toReversed(), (request) => request.serial, make, (row, request) => {
    if (row.childNodes[0].textContent) return; // what has ended does not change
    set(row, { "data-request": request.request_id });
    const answered = request.prompt_tokens !== undefined;
    const texts = [clock(request.time), request.endpoint, answered ? number(request.prompt_tokens) : "", null,
      answered ? number(request.resumed_at) : "", null, answered ? seconds(request.ttft_seconds) : "",
      answered ? number(request.output_tokens) : "", request.finish_reason];
    texts.forEach((text, i) => text !== null && (row.children[i].textContent = text));
    if (!answered) return;
    row.children[3].replaceChildren(split(request));
    row.children[5].replaceChildren(el("span", { class: `pill reason ${request.reason}`, title: REASONS[request.reason] ?? FULL }));
    row.children[5].firstChild.textContent = request.reason.replaceAll("_", " ");
  });
}

// A prompt as a bar: what was cached, what was stranded, what was computed.
function split({ prompt_tokens: prompt, cached_tokens: cached, stranded_tokens: stranded }) {
  const computed = prompt - cached - stranded;
  const text = `${number(cached)} cached, ${number(stranded)} stranded, ${number(computed)} computed`;
  const bar = el("span", { class: "split", role: "img", "aria-label": text, title: text });
  const longest = Math.max(...state.requests.map((request) => request.prompt_tokens ?? 0));
  bar.style.inlineSize = `${Math.max(4, (100 * prompt) / longest)}%`;
  for (const [name, tokens] of [["cached", cached], ["stranded", stranded], ["computed", computed]]) {
    const part = el("i", { class: name });
    part.style.flexGrow = tokens;
    if (tokens > 0) bar.append(part);
  }
  return bar;
}

function say(kind, text) {
  const status = byId("status");
  set(status, { "data-state": kind });
  if (status.textContent !== text) status.textContent = text;
  set(document.body, { "data-away": kind === "away" ? "" : null });
}

async function turn() {
  try {
    let body = await ask();
    if (body.started !== state.started) {
      const first = state.started === null;
      forget(body.started);
      if (!first) body = await ask();
    }
    take(body);
    show(body);
    say("live", "live");
  } catch (error) {
    const why = error instanceof TypeError || error.name === "TimeoutError" ? "the server does not answer" : error.message;
    say("away", `${why}; trying again`);
  }
}

async function run() {
  for (;;) {
    if (!document.hidden) await turn();
    await new Promise((resume) => setTimeout(resume, EVERY));
  }
}

const LEGENDS = {
  "tree-legend": [["age-0", "used just now"], ["age-2", "a while ago"], ["age-4", "long ago"], ["dead", "dead: no checkpoint can use it"], ["checkpoint-mark", "checkpoint"]],
  "queue-legend": [["running", "running"], ["waiting", "waiting"]],
  "requests-legend": [["cached", "cached"], ["stranded", "stranded: KV without a state, computed again"], ["computed", "computed"]],
};

function legend(id, items) {
  byId(id).replaceChildren(...items.map(([name, text]) => {
    const item = el("li", {}, el("i", { class: name }), el("span"));
    item.lastChild.textContent = text;
    return item;
  }));
}

for (const button of document.querySelectorAll("[data-weight]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-weight]")) set(other, { "aria-pressed": String(other === button) });
    icicle.weigh(button.dataset.weight);
  });
}
byId("hottest").addEventListener("click", (event) => {
  const id = event.target.closest("li")?.dataset.id;
  if (id) icicle.zoom(Number(id));
});

// `#path=1,5,9`: nodes of the tree, as the chat links to them.
function follow() {
  const found = location.hash.match(/^#path=([\d,]*)$/);
  if (!found) return;
  icicle.follow(found[1].split(",").filter(Boolean).map(Number));
  byId("tree").scrollIntoView({ block: "center" });
}

addEventListener("hashchange", follow);
follow();
for (const [id, items] of Object.entries(LEGENDS)) legend(id, items);
run();
