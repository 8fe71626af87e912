// KV memory as a grid of blocks. Only blocks that have changed are drawn again; what is selected is a layer above.

import { element, setText } from "./dom.js";
import { count, percent } from "./format.js";
import { palette } from "./palette.js";

const CELLS = [16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2]; // px, gap included
const LEGEND = ["free", "cached", "owned", "shared by 2", "by 3 or 4", "by more"];

export class Pool {
  // `onBlock` gets the id under the pointer or the cursor, 0 for none.
  constructor(onBlock) {
    this.onBlock = onBlock;
    this.cursor = 0;
    this.marked = [];
    this.grid = element("canvas.grid");
    this.layer = element("canvas.grid.layer", { tabIndex: 0, role: "img" });
    this.box = element("div.pool-box", {}, this.grid, this.layer);
    this.summary = element("span.summary");
    this.info = element("p.info", { role: "status" });
    const legend = element("ul.legend", { "aria-label": "Legend" });
    LEGEND.forEach((label, state) => legend.append(element("li", {}, element(`i.block-${state}`), label)));
    this.node = element(
      "section.panel.pool", { "aria-label": "KV memory" },
      element("header", {}, element("h2", {}, "KV memory"), this.summary, legend), this.box, this.info,
    );
    new ResizeObserver(() => this.layout()).observe(this.box);
    this.layer.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.layer.addEventListener("pointerdown", (event) => this.point(this.at(event)));
    this.layer.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.point(0));
    this.layer.addEventListener("keydown", (event) => this.onKey(event));
    this.layer.addEventListener("blur", () => this.point(0));
  }

  update(state) {
    if (this.blocks !== state.blocks) {
      this.blocks = state.blocks;
      this.point(0);
      this.layout();
    } else {
      const context = this.grid.getContext("2d");
      for (const id of this.blocks.changed) this.draw(context, id);
    }
    this.blocks.changed.clear();
    const { pool } = state;
    if (!pool) return setText(this.summary, "");
    const used = pool.num_blocks - pool.num_free;
    const text = `${count(used)} of ${count(pool.num_blocks)} blocks in use, ${percent(used, pool.num_blocks)}`;
    setText(this.summary, text);
    this.layer.setAttribute("aria-label", `${text}; ${count(pool.num_cached)} hold a known prefix. Arrows move between blocks.`);
  }

  // The largest cells with which all blocks have room.
  layout() {
    const width = this.box.clientWidth;
    if (!this.blocks?.size || !width) return;
    const maxHeight = width < 600 ? 260 : 300;
    const fits = (cell) => Math.ceil(this.blocks.size / Math.floor(width / cell)) * cell <= maxHeight;
    this.cell = CELLS.find(fits) ?? CELLS.at(-1);
    this.columns = Math.floor(width / this.cell);
    const height = Math.ceil(this.blocks.size / this.columns) * this.cell;
    this.ratio = Math.max(1, Math.round(devicePixelRatio));
    for (const canvas of [this.grid, this.layer]) {
      canvas.width = width * this.ratio;
      canvas.height = height * this.ratio;
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").scale(this.ratio, this.ratio);
    }
    this.drawAll();
  }

  drawAll() {
    if (!this.columns) return;
    this.colours = palette().blocks;
    const context = this.grid.getContext("2d");
    context.clearRect(0, 0, this.grid.width, this.grid.height);
    for (let id = 1; id <= this.blocks.size; id++) this.draw(context, id);
    this.drawLayer();
  }

  draw(context, id) {
    const [x, y, size] = this.place(id);
    context.fillStyle = this.colours[this.blocks.state(id)];
    context.fillRect(x, y, size, size);
  }

  place(id) {
    const { cell, columns } = this;
    return [((id - 1) % columns) * cell, Math.floor((id - 1) / columns) * cell, cell > 3 ? cell - 1 : cell];
  }

  // The blocks of what is selected.
  mark(ids) {
    if (ids.length === this.marked.length && ids.every((id, i) => id === this.marked[i])) return;
    this.marked = [...ids];
    this.drawLayer();
  }

  drawLayer() {
    if (!this.columns) return;
    const context = this.layer.getContext("2d");
    context.clearRect(0, 0, this.layer.width, this.layer.height);
    const { veil, ink } = palette();
    if (this.marked.length) {
      context.fillStyle = veil;
      context.fillRect(0, 0, this.layer.width, this.layer.height);
      for (const id of this.marked) {
        const [x, y, size] = this.place(id);
        context.clearRect(x - 1, y - 1, size + 2, size + 2);
      }
    }
    if (this.cursor) {
      const [x, y, size] = this.place(this.cursor);
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, size + 2, size + 2);
    }
  }

  at(event) {
    const { left, top } = this.layer.getBoundingClientRect();
    const column = Math.floor((event.clientX - left) / this.cell);
    const id = Math.floor((event.clientY - top) / this.cell) * this.columns + column + 1;
    return column >= 0 && column < this.columns && id >= 1 && id <= this.blocks.size ? id : 0;
  }

  point(id) {
    if (id === this.cursor) return;
    this.cursor = id;
    this.drawLayer();
    this.onBlock(id);
  }

  onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (!step || !this.blocks?.size) return;
    event.preventDefault();
    this.point(Math.min(this.blocks.size, Math.max(1, this.cursor ? this.cursor + step : 1)));
  }
}
