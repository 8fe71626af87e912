// Who runs and who waits, and the block table of the one that is looked at.

import { element, setText } from "./dom.js";
import { count, plural } from "./format.js";

const MAX_CELLS = 400;
const ORDER = { running: 0, preempted: 1, waiting: 2 };

export class Requests {
  // `onLook` gets the key of the request that is looked at, or null; `sample` sends some requests.
  constructor(onLook, sample) {
    this.onLook = onLook;
    this.rows = new Map();
    this.pinned = null;
    this.hovered = null;
    this.summary = element("span.summary");
    this.list = element("div.request-list", { role: "listbox", "aria-label": "Requests" });
    this.more = element("p.more", { hidden: true });
    this.empty = element(
      "p.empty-note", {}, "No requests. ",
      element("button.text-button", { type: "button", id: "sample", onclick: sample }, "Send 8 sample requests"),
    );
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.table = new BlockTable();
    this.node = element(
      "section.panel.requests", { "aria-label": "Requests" },
      element(
        "div.fill", {},
        element("header", {}, element("h2", {}, "Requests"), this.summary), this.empty, this.list, this.more, this.table.node,
      ),
    );
  }

  get looked() {
    return this.hovered ?? this.pinned;
  }

  update(state) {
    const { requests, queue } = state;
    for (const [key, row] of this.rows) {
      if (!requests.has(key)) this.remove(key, row);
    }
    const sorted = [...requests.values()].sort((a, b) => ORDER[a.state] - ORDER[b.state] || a.arrived_at - b.arrived_at);
    let before = this.list.firstChild;
    for (const request of sorted) {
      const row = this.rows.get(request.key) ?? this.add(request.key);
      row.show(request);
      if (row.node === before) before = before.nextSibling;
      else this.list.insertBefore(row.node, before);
    }
    this.empty.hidden = requests.size > 0;
    this.more.hidden = !state.num_requests_more;
    setText(this.more, `and ${plural(state.num_requests_more ?? 0, "more request")}`);
    const parts = queue ? [`${count(queue.num_running)} of ${count(queue.max_num_seqs)} running`] : [];
    if (queue) parts.push(`${count(queue.num_waiting)} waiting`);
    if (queue?.num_preempted) parts.push(`${count(queue.num_preempted)} preempted`);
    setText(this.summary, parts.join(", "));
    if (![...this.rows.values()].some((row) => row.node.tabIndex === 0) && this.list.firstChild) this.list.firstChild.tabIndex = 0;
    this.table.show(requests.get(this.looked), state.blocks);
  }

  add(key) {
    const row = new Row(key);
    row.node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && this.hover(key));
    row.node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.hover(null));
    row.node.addEventListener("focus", () => this.hover(key));
    row.node.addEventListener("blur", () => this.hover(null));
    row.node.addEventListener("click", () => this.pin(this.pinned === key ? null : key));
    this.rows.set(key, row);
    return row;
  }

  remove(key, row) {
    row.node.remove();
    this.rows.delete(key);
    if (this.pinned === key) this.pinned = null;
    if (this.hovered === key) this.hovered = null;
    this.onLook(this.looked);
  }

  hover(key) {
    this.hovered = key;
    this.onLook(this.looked);
  }

  pin(key) {
    this.pinned = key;
    for (const [other, row] of this.rows) row.node.setAttribute("aria-selected", String(other === key));
    this.onLook(this.looked);
  }

  // Those that hold a block.
  point(keys) {
    for (const [key, row] of this.rows) row.node.classList.toggle("holds", keys.has(key));
  }

  onKey(event) {
    const { activeElement } = document;
    const to = { ArrowDown: activeElement.nextSibling, ArrowUp: activeElement.previousSibling }[event.key];
    if (event.key === "Enter" || event.key === " ") activeElement.click();
    else if (to) {
      activeElement.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    } else return;
    event.preventDefault();
  }
}

class Row {
  constructor(key) {
    this.id = element("code", {}, shortKey(key));
    this.state = element("span.request-state");
    this.tokens = element("span.request-tokens");
    this.bar = { cached: element("i.cached"), prompt: element("i.prompt"), output: element("i.output") };
    this.node = element(
      "div.request", { role: "option", tabIndex: -1, "aria-selected": "false" },
      this.id, this.state, this.tokens, element("span.request-bar", {}, ...Object.values(this.bar)),
    );
  }

  show(request) {
    const { num_prompt_tokens: prompt, num_output_tokens: output, num_cached_tokens: cached } = request;
    const done = Math.min(prompt, request.num_computed_tokens);
    const state = request.state === "running" && done < prompt ? "prefill" : request.state;
    this.node.dataset.state = request.state;
    setText(this.state, request.num_preemptions && request.state === "running" ? `${state}, came back` : state);
    setText(this.tokens, `${count(prompt)} + ${count(output)}`);
    const details = [`prompt ${count(prompt)}, of it ${count(cached)} found in the cache`, `output ${count(output)}`];
    if (request.tenant) details.push(`tenant ${request.tenant}`);
    if (request.num_preemptions) details.push(`preempted ${count(request.num_preemptions)} times`);
    this.node.title = details.join("\n");
    // A bar of all tokens so far: from the cache, computed, generated.
    const all = prompt + output || 1;
    const hit = Math.min(cached, done);
    this.bar.cached.style.width = `${(100 * hit) / all}%`;
    this.bar.prompt.style.width = `${(100 * (done - hit)) / all}%`;
    this.bar.output.style.width = `${(100 * output) / all}%`;
  }
}

class BlockTable {
  constructor() {
    this.title = element("h3");
    this.cells = element("ol.table-cells");
    this.note = element("p.more", { hidden: true });
    this.hint = element("p.empty-note", {}, "Point at a request to see its block table; click to keep it.");
    this.node = element("div.block-table", {}, this.title, this.hint, this.cells, this.note);
  }

  show(request, blocks) {
    this.hint.hidden = Boolean(request);
    this.cells.hidden = !request;
    const ids = request?.block_table ?? [];
    setText(this.title, request ? `Block table of ${shortKey(request.key)}` : "Block table");
    const shown = ids.slice(0, MAX_CELLS);
    while (this.cells.children.length > shown.length) this.cells.lastChild.remove();
    shown.forEach((id, index) => {
      const cell = this.cells.children[index] ?? this.cells.appendChild(element("li", {}, element("b", {}, String(index)), element("span")));
      setText(cell.lastChild, String(id));
      const name = `block-${blocks.state(id)}`;
      if (cell.className !== name) cell.className = name;
      cell.title = `logical block ${index} is physical block ${id}, ${blocks.describe(id)}`;
    });
    this.note.hidden = ids.length <= MAX_CELLS && !(request && !ids.length);
    setText(this.note, request && !ids.length ? "It holds no block now." : `and ${plural(ids.length - MAX_CELLS, "more block")}`);
  }
}

export function shortKey(key) {
  const [id, choice] = key.split("/");
  return choice === "0" ? id.slice(0, 8) : `${id.slice(0, 8)}/${choice}`;
}
