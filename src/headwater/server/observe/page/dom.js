// Elements without markup: what comes from the server only ever becomes text or an attribute.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value);
  }
  if (children.length) element.replaceChildren(...children);
  return element;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const set = (element, attributes) => fill(element, attributes, []);

// Keep one element for each item, so that focus and hover outlive an update; `make` creates, `update` sets.
export function join(parent, items, key, make, update) {
  const old = parent.kept ?? new Map();
  const kept = new Map();
  let previous = null;
  for (const item of items) {
    const id = key(item);
    const element = old.get(id) ?? make(item);
    old.delete(id);
    kept.set(id, element);
    update(element, item);
    const place = previous ? previous.nextSibling : parent.firstChild;
    if (place !== element) parent.insertBefore(element, place);
    previous = element;
  }
  for (const element of old.values()) element.remove();
  parent.kept = kept;
}

export const number = (value) => Math.round(value).toLocaleString("en-US");
export const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;
export const percent = (part) => (part === null ? "–" : `${(100 * part).toFixed(part < 0.9995 ? 1 : 0)}%`);

export function short(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) {
      const scaled = value / (unit === "k" ? 1e3 : size);
      return `${scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0)}${unit}`;
    }
  }
  return number(value);
}

export function bytes(value) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${(value / size).toFixed(value / size < 10 ? 2 : 1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function seconds(value) {
  if (value < 0.9995) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 60 ? `${value.toFixed(2)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function duration(value) {
  const [days, hours, minutes] = [Math.floor(value / 86400), Math.floor(value / 3600) % 24, Math.floor(value / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.floor(value)} s`;
}

export const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
