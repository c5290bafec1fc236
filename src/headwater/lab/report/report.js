"use strict";
// The page stands without this: it sorts the table, and tells what is under the pointer or the arrow keys.

const REACH = 28; // pixels around the pointer in which something is told of
const SAME = 7; // pixels between marks that cannot be told apart
const tip = document.getElementById("tip");
let told = null;

const centre = ({ left, top, width, height }) => [left + width / 2, top + height / 2];

// An element and the marks that lie on it, or under it.
function together(element) {
  const plot = element.closest(".plot");
  if (!plot || element.localName !== "use") return [element];
  const [x, y] = centre(element.getBoundingClientRect());
  const others = visible(plot).filter((one) => one !== element && one.localName === "use").filter((one) => {
    const [left, top] = centre(one.getBoundingClientRect());
    return Math.hypot(left - x, top - y) < SAME;
  });
  return [element, ...others].slice(0, 4);
}

function show(element) {
  if (element === told) return;
  told?.classList.remove("told");
  told = element;
  tip.hidden = !element;
  if (!element) return;
  element.classList.add("told");
  tip.textContent = together(element).map((one) => one.dataset.tip).join("\n\n");
  const at = element.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(Math.max(6, at.left + at.width / 2 - width / 2), innerWidth - width - 6);
  const above = at.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 6 ? above : Math.min(at.bottom + 8, innerHeight - height - 6)}px`;
}

const visible = (root) => [...root.querySelectorAll("[data-tip]")].filter((one) => one.getClientRects().length);

function nearest(root, x, y) {
  let best = null;
  let least = REACH;
  for (const one of visible(root)) {
    const [left, top] = centre(one.getBoundingClientRect());
    const away = Math.hypot(left - x, top - y);
    if (away < least) [best, least] = [one, away];
  }
  return best;
}

document.addEventListener("pointermove", (event) => {
  const plot = event.target.closest?.(".plot");
  show(event.target.closest?.("[data-tip]") ?? (plot && nearest(plot, event.clientX, event.clientY)));
});
document.addEventListener("scroll", () => show(null), true);

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
for (const figure of document.querySelectorAll(".plot, .strips, .pairs")) {
  if (!figure.querySelector("[data-tip]")) continue;
  figure.setAttribute("tabindex", "0");
  if (!figure.hasAttribute("role")) figure.setAttribute("role", "group");
  if (!figure.hasAttribute("aria-label")) figure.setAttribute("aria-label", "Bars; arrow keys tell their figures");
  figure.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    const all = visible(figure);
    const at = all.indexOf(told);
    show(all[at < 0 ? 0 : Math.min(all.length - 1, Math.max(0, at + STEPS[event.key]))] ?? null);
  });
  figure.addEventListener("blur", () => show(null));
}

const valueOf = (row, column) => {
  const cell = row.cells[column];
  const data = cell.querySelector("data");
  return data ? Number(data.value) : cell.textContent.trim();
};

function compare(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
  return typeof a === "number" ? -1 : 1;
}

function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows];
  const number = rows.some((row) => typeof valueOf(row, column) === "number");
  const was = heads[column].getAttribute("aria-sort");
  const order = was ? (was === "ascending" ? "descending" : "ascending") : number ? "descending" : "ascending";
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  rows.sort((a, b) => sign * compare(valueOf(a, column), valueOf(b, column)));
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll(".sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(table, column));
    head.replaceChildren(button);
  });
}
