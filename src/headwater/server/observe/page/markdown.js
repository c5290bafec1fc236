// A part of Markdown as elements: paragraphs, headings, lists, quotes, code, bold, italic and links. All of a model's
// text becomes text nodes; what is not of these forms stays as it is written.

import { el } from "./dom.js";

const MAX_DEPTH = 8; // of quotes and lists within each other; what is deeper is shown as it is written
const FENCE = /^ {0,3}(```+|~~~+) *([^`]*)$/;
const HEADING = /^(#{1,6}) +(.*?)(?: +#+)?$/;
const BULLET = /^( *)[-*+] +(.*)$/;
const NUMBER = /^( *)(\d{1,9})[.)] +(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])[*_](?=[^\s*_])([^*_]+?)[*_](?![\w*])|\[([^[\]]{1,500})\]\((https?:\/\/[^\s)]+)\)/;

export function markdown(text, depth = 0) {
  if (depth > MAX_DEPTH) return text ? [text] : [];
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  const run = (matches) => {
    const start = at;
    while (at < lines.length && matches(lines[at])) at++;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at++;
    else if (FENCE.test(line)) blocks.push(code(lines, at, (next) => (at = next)));
    else if (HEADING.test(line)) blocks.push(heading(lines[at++].match(HEADING)));
    else if (QUOTE.test(line)) blocks.push(el("blockquote", {}, ...markdown(run((one) => QUOTE.test(one)).map((one) => one.match(QUOTE)[1]).join("\n"), depth + 1)));
    else if (isItem(line)) blocks.push(list(run((one) => isItem(one) || /^ {2,}\S/.test(one)), depth + 1));
    else blocks.push(el("p", {}, ...broken(run((one) => one.trim() && !starts(one)))));
  }
  return blocks;
}

const isItem = (line) => BULLET.test(line) || NUMBER.test(line);
const starts = (line) => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || isItem(line);

// One that is not closed extends to the end: the rest of it is on its way.
function code(lines, at, go) {
  const [, fence, language] = lines[at].match(FENCE);
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && !lines[end].trim().slice(fence.length).trim())) end++;
  go(end + 1);
  const label = language.trim().split(/\s/)[0];
  return el("pre", { "data-language": label || null, tabindex: 0 }, el("code", {}, lines.slice(at + 1, end).join("\n")));
}

function heading([, marks, text]) {
  return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text));
}

// Items of the first one's indent; deeper lines are Markdown within an item.
function list(lines, depth) {
  const indent = lines[0].search(/\S/);
  const first = lines[0].match(NUMBER);
  const items = [];
  for (const line of lines) {
    const found = line.match(BULLET) ?? line.match(NUMBER);
    if (found && found[1].length <= indent + 1) items.push([found.at(-1)]);
    else items.at(-1).push(line.replace(/^ {1,4}/, ""));
  }
  const made = items.map(([text, ...rest]) => el("li", {}, ...inline(text), ...markdown(rest.join("\n"), depth)));
  return first ? el("ol", { start: first[2] }, ...made) : el("ul", {}, ...made);
}

const broken = (lines) => lines.flatMap((line, i) => (i ? [el("br"), ...inline(line)] : inline(line)));

function inline(text) {
  const parts = [];
  for (let rest = text; rest; ) {
    const found = rest.match(INLINE);
    if (!found) return [...parts, rest];
    const [whole, , code, bold, italic, label, address] = found;
    if (found.index) parts.push(rest.slice(0, found.index));
    if (code) parts.push(el("code", {}, code.trim() || code));
    else if (bold) parts.push(el("strong", {}, ...inline(bold)));
    else if (italic) parts.push(el("em", {}, ...inline(italic)));
    else parts.push(el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label));
    rest = rest.slice(found.index + whole.length);
  }
  return parts;
}
