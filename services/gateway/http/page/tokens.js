// An answer token by token: shaded by how unlikely each was, with what else it could have been.

import { $, element } from "./dom.js";
import { probability } from "./format.js";

const DARKEST = 5; // nats: a token of probability 0.7 % has the full shade
const MARGIN = 8;

let open = null; // the token whose alternatives are shown

export class TokenView {
  // `box` holds the tokens. The keyboard enters at one of them and moves by arrows.
  constructor(box) {
    this.box = box;
    this.tokens = [];
    box.addEventListener("keydown", (event) => this.onKey(event));
  }

  add(entries) {
    for (const entry of entries) {
      const shade = Math.min(1, Math.max(0, -entry.logprob) / DARKEST);
      const node = element("span.token", { tabIndex: this.tokens.length ? -1 : 0 }, shown(entry));
      node.style.setProperty("--shade", `${Math.round(100 * shade)}%`);
      node.setAttribute("role", "button");
      node.setAttribute("aria-label", `${entry.token}: ${probability(entry.logprob)}`);
      node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(node, entry));
      node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
      node.addEventListener("focus", () => show(node, entry));
      node.addEventListener("blur", hide);
      this.tokens.push(node);
      this.box.append(node);
    }
  }

  onKey(event) {
    const at = this.tokens.indexOf(document.activeElement);
    const last = this.tokens.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape" && open) {
      event.preventDefault(); // which would also stop the answer
      hide();
    }
    if (at < 0 || to === undefined || to < 0 || to > last) return;
    event.preventDefault();
    this.tokens[at].tabIndex = -1;
    this.tokens[to].tabIndex = 0;
    this.tokens[to].focus();
  }
}

function shown(entry) {
  if (entry.token === "") return element("span.mark", {}, "∅");
  if (entry.token.startsWith("bytes:")) return element("span.mark", {}, entry.bytes.map(hex).join(" "));
  if (!entry.token.includes("\n")) return entry.token;
  const parts = document.createDocumentFragment();
  for (const part of entry.token.split(/(\n)/)) parts.append(part === "\n" ? element("span.mark", {}, "↵") : "", part);
  return parts;
}

function show(node, entry) {
  hide();
  open = node;
  node.classList.add("open");
  const rows = entry.top_logprobs.filter((other) => !same(other, entry));
  rows.push(entry);
  rows.sort((a, b) => b.logprob - a.logprob);
  const list = element("ol");
  for (const other of rows) {
    const bar = element("i");
    bar.style.width = `${100 * Math.exp(other.logprob)}%`;
    const row = element("li", {}, element("code", {}, visible(other)), element("span", {}, probability(other.logprob)), bar);
    if (same(other, entry)) row.className = "chosen";
    list.append(row);
  }
  const card = element("div.alternatives", { id: "alternatives", role: "tooltip" }, list);
  document.body.append(card);
  node.setAttribute("aria-describedby", "alternatives");
  place(card, node);
}

function hide() {
  $("alternatives")?.remove();
  if (!open) return;
  open.classList.remove("open");
  open.removeAttribute("aria-describedby");
  open = null;
}

// Under the token, above it where there is no room, and never over the window's edge.
function place(card, node) {
  const [token] = node.getClientRects();
  if (!token) return;
  const left = Math.min(Math.max(MARGIN, token.left), innerWidth - card.offsetWidth - MARGIN);
  const under = token.bottom + 4;
  const fits = under + card.offsetHeight + MARGIN < innerHeight;
  card.style.left = `${left}px`;
  card.style.top = `${fits ? under : token.top - card.offsetHeight - 4}px`;
}

const same = (a, b) => a.token === b.token && String(a.bytes) === String(b.bytes);
const hex = (byte) => byte.toString(16).padStart(2, "0");
const visible = ({ token, bytes }) =>
  token === "" ? "∅" : token.startsWith("bytes:") ? bytes.map(hex).join(" ") : token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");

addEventListener("scroll", hide, { capture: true, passive: true });
