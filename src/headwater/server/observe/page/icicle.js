// The tree of cached prefixes: from left to right by position in the prompt, a branch as high as what hangs on it.
// One can zoom into a node by click or Enter, and out by the trail, Escape or Backspace.

import { count, duration, el, join, number, set, svg } from "./dom.js";

const ROOT_WIDTH = 26;
const SCALE = 20; // pixels of the positions' scale
const GAP = 1;
const LEAST = 1.5; // pixels: what is lower is not drawn
const AGES = [0.02, 0.1, 0.3, 0.6]; // of the greatest age: steps of the colour

export class Icicle {
  constructor(root, trail, text) {
    Object.assign(this, { root, trail, text, weight: "subtree_tokens", zoomed: null, reading: null, path: null, nodes: new Map() });
    this.cells = svg("g");
    this.scale = svg("g", { class: "scale" });
    this.empty = svg("text", { class: "empty", "text-anchor": "middle" });
    root.replaceChildren(this.cells, this.scale, this.empty);
    root.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(root);
  }

  // `now`: the time of day by the server's clock, in seconds.
  at(now) {
    this.now = now;
  }

  show(tree) {
    this.nodes = new Map(tree.nodes.map((node) => [node.id, { ...node, children: [] }]));
    this.roots = [];
    for (const node of this.nodes.values()) (this.nodes.get(node.parent)?.children ?? this.roots).push(node);
    this.oldest = Math.max(1, ...tree.nodes.map((node) => (node.parent === null ? 0 : node.age)));
    if (!this.nodes.has(this.zoomed)) this.zoomed = null;
    if (this.path?.isNew) this.#begin(this.path);
    this.draw();
  }

  // Mark the nodes of a prompt, from its namespace's root down, in this tree or the first that comes.
  follow(ids) {
    this.path = { ids, isNew: true };
    if (this.nodes.size) this.show({ nodes: [...this.nodes.values()] });
  }

  #begin(path) {
    const held = path.ids.filter((id) => this.nodes.has(id));
    Object.assign(this, { reading: held.at(-1) ?? null, zoomed: held[1] ?? null });
    path.isNew = false;
    path.isGone = !held.length;
  }

  weigh(weight) {
    this.weight = weight;
    this.draw();
  }

  zoom(id) {
    if (id !== null && !this.nodes.has(id)) return;
    this.zoomed = id;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.root;
    if (!width || !this.roots) return;
    set(this.root, { viewBox: `0 0 ${width} ${height}`, "data-zoomed": this.zoomed });
    const shown = this.#place(width, height - SCALE);
    this.empty.textContent = shown.length ? "" : "Nothing is cached yet. A prompt is kept from its first full page on.";
    set(this.empty, { x: width / 2, y: height / 2 });
    if (!shown.some((cell) => cell.node.id === this.held)) this.held = shown[0]?.node.id;
    join(this.cells, shown, (cell) => cell.node.id, () => this.#make(), (group, cell) => this.#update(group, cell));
    this.#marks(width, height);
    this.#trail();
    this.#tell();
  }

  // Cells of the zoomed part: { node, x, y, width, height, depth }.
  #place(width, height) {
    const top = this.zoomed === null ? this.roots : [this.nodes.get(this.zoomed)];
    const weigh = (node) => node[this.weight];
    const whole = top.reduce((sum, node) => sum + weigh(node), 0);
    this.first = this.zoomed === null ? 0 : top[0].start;
    this.last = Math.max(this.first + 1, ...top.map((node) => this.#end(node)));
    this.left = top.some((node) => node.parent === null) ? ROOT_WIDTH : 0;
    this.x = (tokens) => this.left + ((tokens - this.first) / (this.last - this.first)) * (width - this.left);
    const cells = [];
    const visit = (node, y, high, depth) => {
      if (high < LEAST) return;
      const isRoot = node.parent === null;
      const from = isRoot ? 0 : this.x(node.start);
      cells.push({ node, depth, x: from, y, width: Math.max(1, (isRoot ? ROOT_WIDTH : this.x(node.end)) - from), height: high });
      const parts = weigh(node) || 1;
      let at = y;
      for (const child of node.children.toSorted((a, b) => weigh(b) - weigh(a))) {
        const share = (high * weigh(child)) / this.#below(node, parts);
        visit(child, at, share, depth + 1);
        at += share;
      }
    };
    let y = 0;
    for (const node of top.toSorted((a, b) => weigh(b) - weigh(a))) {
      const high = whole ? (height * weigh(node)) / whole : 0;
      visit(node, y, high, 1);
      y += high;
    }
    return cells;
  }

  // What the children share of a node's height: all of it, what is folded included.
  #below(node, own) {
    const folded = this.weight === "subtree_tokens" ? node.folded_tokens : node.folded_nodes;
    return node.children.reduce((sum, child) => sum + child[this.weight], folded) || own;
  }

  #end(node) {
    return node.children.reduce((end, child) => Math.max(end, this.#end(child)), node.end);
  }

  #make() {
    const group = svg("g", { role: "treeitem" }, svg("rect", { class: "cell" }), svg("rect", { class: "mark" }), svg("text"));
    const id = () => Number(group.dataset.node);
    group.addEventListener("click", () => {
      this.held = id();
      this.zoom(id() === this.zoomed ? this.nodes.get(id()).parent : id());
    });
    group.addEventListener("focus", () => this.#read(id()));
    group.addEventListener("pointerenter", () => this.#read(id()));
    return group;
  }

  #update(group, { node, depth, x, y, width, height }) {
    const [cell, mark, label] = group.children;
    const high = Math.max(0.5, height - GAP);
    set(group, {
      "data-node": node.id,
      "aria-label": this.#describe(node),
      "aria-level": depth,
      "aria-expanded": node.children.length ? "true" : null,
      tabindex: node.id === this.held ? 0 : -1,
      class: this.#look(node),
    });
    set(cell, { x, y, width: Math.max(0.5, width - GAP), height: high, rx: Math.min(3, high / 3) });
    const thick = node.checkpoint ? Math.min(4, width / 2) : 0;
    set(mark, { x: x + Math.max(0.5, width - GAP) - thick, y, width: thick, height: high });
    if (node.parent === null) return this.#name(label, node, y, high);
    const text = number(node.end - node.start);
    const full = node.hits ? `${text} · ${node.hits}×` : text;
    label.textContent = high < 13 || width < 9 * text.length + 10 ? "" : width < 8 * full.length + 12 ? text : full;
    set(label, { x: x + 6, y: y + Math.min(high / 2 + 4, 16) });
  }

  // A namespace's, from the bottom up in its narrow column.
  #name(label, node, y, high) {
    label.textContent = high > 90 ? node.fingerprint : high > 40 ? node.fingerprint.slice(0, 4) : "";
    set(label, { "text-anchor": "middle", transform: `translate(${ROOT_WIDTH / 2 + 3} ${y + high / 2}) rotate(-90)` });
  }

  #look(node) {
    if (node.parent === null) return "root";
    const age = AGES.findIndex((limit) => node.age <= limit * this.oldest);
    const kind = node.dead ? "dead" : `age-${age < 0 ? AGES.length : age}`;
    const onPath = this.path?.ids.includes(node.id) ? " on-path" : "";
    return `${kind}${node.speculative ? " speculative" : ""}${node.pins ? " pinned" : ""}${onPath}`;
  }

  #describe(node) {
    if (node.parent === null) {
      return `Namespace ${node.fingerprint}: ${count(node.subtree_tokens, "token")}, ${count(node.subtree_nodes, "branch", "branches")}`;
    }
    const parts = [
      `tokens ${number(node.start)} to ${number(node.end)}`,
      `${count(node.kv_pages, "page")} of KV${node.dead ? ", dead" : ""}`,
      node.checkpoint ? `${node.speculative ? "speculative " : ""}checkpoint, resumed ${count(node.hits, "time")}` : "no checkpoint",
      `${number(node.subtree_tokens)} tokens in ${count(node.subtree_nodes, "branch", "branches")} from here on`,
      `last used ${duration(Math.max(0, this.now - node.used_at))} ago`,
    ];
    if (node.folded_nodes) parts.push(`${count(node.folded_nodes, "smaller branch", "smaller branches")} not shown`);
    if (node.pins) parts.push("in use");
    return `${parts.join(" · ")} · ${node.fingerprint}`;
  }

  #read(id) {
    this.reading = id;
    this.#tell();
  }

  #tell() {
    const node = this.nodes.get(this.reading) ?? this.nodes.get(this.zoomed);
    const none = this.path?.isGone ? "The path is not in the tree any more, or among its smaller branches." : "Point at a prefix to read it; click to zoom in.";
    const text = node ? this.#describe(node) : none;
    if (this.text.textContent !== text) this.text.textContent = text;
  }

  #marks(width, height) {
    const marks = [];
    const step = this.#step(width);
    for (let at = Math.ceil(this.first / step) * step; at < this.last && this.nodes.size; at += step) {
      if (this.x(at) > width - 90) break;
      marks.push(this.#mark(at, number(at), height, at === this.first ? "start" : "middle"));
    }
    if (this.nodes.size) marks.push(this.#mark(this.last, `${number(this.last)} tokens`, height, "end"));
    this.scale.replaceChildren(...marks);
  }

  #mark(at, text, height, anchor) {
    const label = svg("text", { x: this.x(at), y: height - 5, "text-anchor": anchor });
    label.textContent = text;
    return label;
  }

  // Round, and wide enough for its label.
  #step(width) {
    const least = ((this.last - this.first) * 90) / width;
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least);
  }

  #trail() {
    const path = [];
    for (let node = this.nodes.get(this.zoomed); node; node = this.nodes.get(node.parent)) path.unshift(node);
    const steps = [{ id: null, text: "everything" }];
    for (const node of path) {
      steps.push({ id: node.id, text: node.parent === null ? `namespace ${node.fingerprint}` : `${number(node.start)}–${number(node.end)}` });
    }
    const make = ({ id }) => {
      const button = el("button", { type: "button" });
      button.addEventListener("click", () => this.zoom(id));
      return button;
    };
    join(this.trail, steps, (step) => step.id, make, (button, step) => {
      button.textContent = step.text;
      set(button, { "aria-current": step.id === this.zoomed ? "true" : null });
    });
  }

  #key(event) {
    const node = this.nodes.get(Number(event.target.dataset?.node));
    if (!node) return;
    const siblings = (this.nodes.get(node.parent)?.children ?? this.roots).toSorted((a, b) => b[this.weight] - a[this.weight]);
    const place = siblings.indexOf(node);
    const children = node.children.toSorted((a, b) => b[this.weight] - a[this.weight]);
    const moves = { ArrowRight: children[0], ArrowLeft: this.nodes.get(node.parent), ArrowDown: siblings[place + 1], ArrowUp: siblings[place - 1] };
    if (event.key in moves) this.#focus(moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.zoom(node.id);
    else if (event.key === "Escape" || event.key === "Backspace") this.zoom(this.nodes.get(this.zoomed)?.parent ?? null);
    else return;
    event.preventDefault();
    this.#focus(this.nodes.get(this.held));
  }

  #focus(node) {
    const element = node && this.cells.kept.get(node.id);
    if (!element) return;
    set(this.cells.kept.get(this.held) ?? element, { tabindex: -1 });
    this.held = node.id;
    set(element, { tabindex: 0 });
    element.focus();
  }
}
