// The prefix tree: depth to the right, a branch in a row of its own.

import { element, setText } from "./dom.js";
import { plural } from "./format.js";
import { palette } from "./palette.js";
import { prefixTree } from "./prefix_tree.js";

const ROW = 16;
const WIDEST = 14; // px of a block
const MAX_ROWS = 24;
const EVERY = 1000; // ms; the tree of a large pool takes a while to make

export class Prefixes {
  constructor() {
    this.tree = { segments: [], rows: [], depth: 0, numMore: 0 };
    this.madeAt = -EVERY;
    this.chosen = -1;
    this.canvas = element("canvas.prefix-canvas", { tabIndex: 0, role: "img" });
    this.summary = element("span.summary");
    this.info = element("p.info", { role: "status" });
    this.node = element(
      "section.panel.prefixes", { "aria-label": "Prefix tree" },
      element("header", {}, element("h2", {}, "Prefix tree"), this.summary), this.canvas, this.info,
    );
    new ResizeObserver(() => this.draw()).observe(this.node);
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.choose(-1));
    this.canvas.addEventListener("blur", () => this.choose(-1));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  update(state) {
    const { pool, blocks } = state;
    setText(this.summary, pool ? `${plural(pool.num_cached, "block")} with a known prefix` : "");
    const now = performance.now();
    if (this.blocks === blocks && (now - this.madeAt < EVERY || this.numApplied === blocks.numApplied)) return;
    this.blocks = blocks;
    this.numApplied = blocks.numApplied;
    this.madeAt = now;
    this.tree = prefixTree(blocks, MAX_ROWS);
    this.chosen = Math.min(this.chosen, this.tree.segments.length - 1);
    this.draw();
    const text = this.describeAll();
    this.canvas.setAttribute("aria-label", `${text} Arrows move between its parts.`);
    if (this.chosen < 0) setText(this.info, text);
    else this.tell();
  }

  draw() {
    const width = this.node.clientWidth - 32;
    const { segments, rows, depth } = this.tree;
    const height = Math.max(ROW, rows.length * ROW);
    this.canvas.hidden = !segments.length;
    if (width <= 0 || !segments.length) return;
    this.cell = Math.min(WIDEST, (width - 60) / depth);
    const ratio = Math.max(1, Math.round(devicePixelRatio));
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = palette().font;
    segments.forEach((segment, index) => this.drawSegment(context, segment, index === this.chosen));
    context.fillStyle = palette().faint;
    rows.forEach(({ hits, end }, row) => {
      if (hits) context.fillText(plural(hits, "hit"), end * this.cell + 6, row * ROW + ROW - 4);
    });
  }

  drawSegment(context, { ids, depth, row, parentRow }, chosen) {
    const { blocks, cell } = this;
    const { blocks: colours, line, ink } = palette();
    const [x, y] = [depth * cell, row * ROW];
    if (parentRow >= 0 && parentRow !== row) {
      context.strokeStyle = line;
      context.beginPath();
      context.moveTo(x - 3.5, parentRow * ROW + ROW - 3);
      context.lineTo(x - 3.5, y + ROW / 2 - 0.5);
      context.lineTo(x, y + ROW / 2 - 0.5);
      context.stroke();
    }
    const gap = cell > 3 ? 1 : 0;
    ids.forEach((id, i) => {
      context.fillStyle = colours[blocks.state(id)];
      context.fillRect(x + i * cell, y + 3, Math.max(0.5, cell - gap), ROW - 6);
    });
    if (chosen) {
      context.strokeStyle = ink;
      context.lineWidth = 1.5;
      context.strokeRect(x - 0.5, y + 1.5, ids.length * cell, ROW - 3);
      context.lineWidth = 1;
    }
  }

  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const column = (event.clientX - left) / this.cell;
    const row = Math.floor((event.clientY - top) / ROW);
    return this.tree.segments.findIndex((s) => s.row === row && column >= s.depth && column < s.depth + s.ids.length);
  }

  choose(index) {
    if (index === this.chosen) return;
    this.chosen = index;
    this.draw();
    this.tell();
  }

  tell() {
    const segment = this.tree.segments[this.chosen];
    if (!segment) return setText(this.info, this.describeAll());
    const { ids, depth, hits } = segment;
    const where = ids.length > 1 ? `Blocks ${depth} to ${depth + ids.length - 1} of a prompt` : `Block ${depth} of a prompt`;
    setText(this.info, `${where} · ${this.blocks.describe(ids[0])} · ${plural(hits, "hit")} · hash ${this.blocks.hashText(ids[0])} · in block ${ids[0]}${ids.length > 1 ? " and on" : ""}`);
  }

  describeAll() {
    const { segments, numMore, depth } = this.tree;
    if (!segments.length) return "No prefix is known yet. Full blocks are named by what they hold, and found again.";
    const more = numMore ? ` ${plural(numMore, "more branch").replace(/hs$/, "hes")} not drawn.` : "";
    return `${plural(segments.filter((s) => s.parentRow < 0).length, "first block")} · longest path ${plural(depth, "block")}.${more}`;
  }

  onKey(event) {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    this.choose(Math.min(this.tree.segments.length - 1, Math.max(0, this.chosen + move)));
  }
}
