// Series over time: stacked areas, or lines, with a scale on the left and a reading where the pointer is.

import { clock, set, svg } from "./dom.js";

const LEFT = 52;
const RIGHT = 6;
const TOP = 8;
const BOTTOM = 20;
const SPAN = 60; // seconds that a chart shows at least

export class Chart {
  // series: [{ name, label, of(row) }]; stacked from the bottom up, or drawn as lines where `lines` is set.
  constructor(root, { series, format, lines = false, top = (most) => most, steps = 4 }) {
    Object.assign(this, { root, series, format, lines, top, steps, rows: [], at: null });
    this.marks = svg("g");
    this.scale = svg("g", { class: "scale" });
    this.cursor = svg("g", { class: "cursor" });
    this.empty = svg("text", { class: "empty", "text-anchor": "middle" });
    root.replaceChildren(this.marks, this.scale, this.cursor, this.empty);
    root.addEventListener("pointermove", (event) => this.#read(event.offsetX));
    root.addEventListener("pointerleave", () => this.#read(null));
    new ResizeObserver(() => this.draw()).observe(root);
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.root;
    set(this.root, { viewBox: `0 0 ${width} ${height}` });
    Object.assign(this, { width, height });
    this.empty.textContent = this.rows.length < 2 ? "The first samples are on their way." : "";
    set(this.empty, { x: width / 2, y: height / 2 });
    if (this.rows.length < 2) return this.#clear();
    const last = this.rows.at(-1).time;
    const first = Math.min(this.rows[0].time, last - SPAN);
    const most = this.top(Math.max(0, ...this.rows.map((row) => this.#height(row)))) || 1;
    this.x = (time) => LEFT + ((time - first) / (last - first)) * (width - LEFT - RIGHT);
    this.y = (value) => height - BOTTOM - (value / most) * (height - TOP - BOTTOM);
    this.marks.replaceChildren(...(this.lines ? this.#lines() : this.#areas()));
    this.scale.replaceChildren(...this.#grid(most), ...this.#times(first, last));
    this.#point();
  }

  #clear() {
    for (const part of [this.marks, this.scale, this.cursor]) part.replaceChildren();
  }

  #height(row) {
    const values = this.series.map((one) => one.of(row) ?? 0);
    return this.lines ? Math.max(...values) : values.reduce((sum, value) => sum + value, 0);
  }

  #areas() {
    const base = this.rows.map(() => 0);
    return this.series.map((one) => {
      const under = this.rows.map((row, i) => `${this.x(row.time).toFixed(1)},${this.y(base[i]).toFixed(1)}`).reverse();
      this.rows.forEach((row, i) => (base[i] += one.of(row)));
      const over = this.rows.map((row, i) => `${this.x(row.time).toFixed(1)},${this.y(base[i]).toFixed(1)}`);
      return svg("path", { class: `area ${one.name}`, d: `M${over.join("L")}L${under.join("L")}Z` });
    });
  }

  #lines() {
    return this.series.flatMap((one) => {
      let path = "";
      let open = false;
      for (const row of this.rows) {
        const value = one.of(row);
        if (value !== null) path += `${open ? "L" : "M"}${this.x(row.time).toFixed(1)},${this.y(value).toFixed(1)}`;
        open = value !== null;
      }
      return svg("path", { class: `line ${one.name}`, d: path || null });
    });
  }

  #grid(most) {
    const marks = Array.from({ length: this.steps + 1 }, (_, i) => (most * i) / this.steps);
    return marks.flatMap((value) => {
      const y = this.y(value);
      const label = svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" });
      label.textContent = this.format(value);
      return [svg("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }), label];
    });
  }

  #times(first, last) {
    const spans = [15, 30, 60, 120, 300];
    const step = spans.find((span) => (last - first) / span <= this.width / 110) ?? 300;
    const marks = [];
    for (let ago = 0; ago <= last - first; ago += step) {
      const x = this.x(last - ago);
      if (ago && x < LEFT + 24) break;
      const label = svg("text", { x, y: this.height - 5, "text-anchor": ago ? "middle" : "end" });
      label.textContent = ago ? (ago % 60 ? `${ago} s` : `${ago / 60} min`) : "now";
      marks.push(label);
    }
    return marks;
  }

  #read(x) {
    this.at = x;
    if (this.rows.length > 1) this.#point();
  }

  #point() {
    if (this.at === null || this.at < LEFT) return this.cursor.replaceChildren();
    const row = this.rows.reduce((best, each) =>
      Math.abs(this.x(each.time) - this.at) < Math.abs(this.x(best.time) - this.at) ? each : best);
    const x = this.x(row.time);
    const texts = [clock(row.time)];
    for (const one of this.series.toReversed()) {
      const value = one.of(row);
      texts.push(`${one.label} ${value === null ? "–" : this.format(value)}`);
    }
    const onLeft = x > this.width / 2;
    const lines = texts.map((text, i) => {
      const line = svg("text", { x: x + (onLeft ? -8 : 8), y: TOP + 14 + 15 * i, "text-anchor": onLeft ? "end" : "start" });
      line.textContent = text;
      return line;
    });
    this.cursor.replaceChildren(svg("line", { x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }), ...lines);
  }
}
