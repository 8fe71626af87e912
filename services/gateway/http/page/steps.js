// Each step as a bar: prefill and decode tokens against the budget.

import { element, setText } from "./dom.js";
import { count, milliseconds } from "./format.js";
import { palette } from "./palette.js";

const BAR = 7; // px, gap included
const HEIGHT = 132;
const TOP = 16; // px above the budget's line, for its label

export class Steps {
  constructor() {
    this.steps = [];
    this.chosen = null; // a step
    this.canvas = element("canvas.steps-canvas", { tabIndex: 0, role: "img" });
    this.canvas.style.height = `${HEIGHT}px`;
    this.info = element("p.info", { role: "status" });
    const key = (name, label) => element("li", {}, element(`i.${name}`), label);
    this.node = element(
      "section.panel.steps", { "aria-label": "Steps" },
      element(
        "header", {}, element("h2", {}, "Steps"), element("span.summary", {}, "tokens of each forward pass"),
        element("ul.legend", { "aria-label": "Legend" }, key("prefill", "prefill"), key("decode", "decode")),
      ),
      this.canvas, this.info,
    );
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.choose(null));
    this.canvas.addEventListener("blur", () => this.choose(null));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  update(state) {
    this.steps = state.steps;
    this.draw();
    const last = this.steps.at(-1);
    const label = last ? `${this.steps.length} steps. The last one: ${describe(last)}` : "No step since you look";
    this.canvas.setAttribute("aria-label", `${label}. Arrows move between steps.`);
    if (!this.chosen) setText(this.info, last ? describe(last) : "No step since you look.");
  }

  visible() {
    return this.steps.slice(-Math.floor(this.canvas.clientWidth / BAR));
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const ratio = Math.max(1, Math.round(devicePixelRatio));
    if (this.canvas.width !== width * ratio) {
      this.canvas.width = width * ratio;
      this.canvas.height = HEIGHT * ratio;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    const colours = palette();
    const steps = this.visible();
    const budget = Math.max(1, ...steps.map((step) => step.token_budget));
    const scale = (HEIGHT - TOP) / budget;
    steps.forEach((step, i) => {
      const x = width - (steps.length - i) * BAR;
      const prefill = step.num_prefill_tokens * scale;
      const decode = step.num_decode_tokens * scale;
      context.globalAlpha = this.chosen && this.chosen !== step ? 0.45 : 1;
      context.fillStyle = colours.decode;
      context.fillRect(x, HEIGHT - Math.max(1, decode), BAR - 1, Math.max(1, decode));
      context.fillStyle = colours.prefill;
      context.fillRect(x, HEIGHT - decode - prefill, BAR - 1, prefill);
      if (step.lost || step.num_preempted) {
        context.fillStyle = colours.bad;
        context.fillRect(x, HEIGHT - decode - prefill - 5, BAR - 1, 3);
      }
    });
    context.globalAlpha = 1;
    context.strokeStyle = colours.line;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(0, TOP - 0.5);
    context.lineTo(width, TOP - 0.5);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = colours.faint;
    context.font = colours.font;
    if (steps.length) context.fillText(`budget ${count(budget)}`, 0, TOP - 5);
  }

  at(event) {
    const { right } = this.canvas.getBoundingClientRect();
    return this.visible().at(-1 - Math.floor((right - event.clientX) / BAR)) ?? null;
  }

  choose(step) {
    if (step === this.chosen) return;
    this.chosen = step;
    setText(this.info, step ? describe(step) : this.steps.length ? describe(this.steps.at(-1)) : "No step since you look.");
    this.draw();
  }

  onKey(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !this.steps.length) return;
    event.preventDefault();
    const steps = this.visible();
    const at = this.chosen ? steps.indexOf(this.chosen) : steps.length;
    this.choose(steps[Math.min(steps.length - 1, Math.max(0, at + move))]);
  }
}

function describe(step) {
  const parts = [`Step ${count(step.step_id)}: ${count(step.num_prefill_tokens)} prefill + ${count(step.num_decode_tokens)} decode`];
  parts.push(`${count(step.num_running)} running`);
  if (step.num_waiting) parts.push(`${count(step.num_waiting)} waiting`);
  if (step.num_preempted) parts.push(`${count(step.num_preempted)} preempted`);
  if (step.lost) parts.push("lost with its executor");
  else parts.push(`${milliseconds(step.total_ms)}`);
  if (step.executor_ms !== null && !step.lost) parts.push(`executor ${milliseconds(step.executor_ms)}`);
  return parts.join(" · ");
}
