// One answer of the model's: its text or its tokens, what it cost, and what went wrong.

import { element } from "./dom.js";
import { count, milliseconds, plural, rate } from "./format.js";
import { whatIsAway } from "./sse.js";
import { TokenView } from "./tokens.js";

const SILENCE = 1500; // ms without a chunk after which it is asked what is away

export class Answer {
  constructor(withTokens, { retry, goOn }) {
    this.role = "assistant";
    this.content = "";
    this.text = element("div.text");
    this.tokens = element("div.text.token-text", { role: "group", "aria-label": "Tokens, arrows move between them" });
    this.view = withTokens ? new TokenView(this.tokens) : null;
    this.state = element("p.state", { role: "status" });
    this.figures = element("span.figures");
    const action = (label, run) => element("button.text-button", { type: "button", onclick: run }, label);
    this.goOnButton = action("Continue", goOn);
    this.copyButton = action("Copy", () => this.copy());
    this.footer = element("footer.turn-foot", { hidden: true }, this.figures, this.copyButton, this.goOnButton, action("Retry", retry));
    const body = withTokens ? [this.text, this.tokens] : [this.text];
    this.node = element("article.turn.assistant", { "aria-label": "Model" }, ...body, this.state, this.footer);
    this.node.classList.toggle("has-tokens", withTokens);
  }

  begin() {
    this.startedAt = this.heardAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.numChunks = 0;
    this.usage = null;
    this.finishReason = null;
    this.state.replaceChildren();
    this.state.className = "state";
    this.footer.hidden = true;
    this.node.setAttribute("aria-busy", "true");
    this.watch = setInterval(() => this.look(), 1000);
  }

  add(chunk, shade) {
    this.heardAt = performance.now();
    if (this.state.hasChildNodes()) this.state.replaceChildren();
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const text = choice.delta.content ?? "";
    const entries = choice.logprobs?.content ?? [];
    if (text || entries.length) {
      this.firstAt ??= this.heardAt;
      this.lastAt = this.heardAt;
      this.numChunks += 1;
    }
    this.content += text;
    if (text) this.text.append(text);
    if (shade && this.view) this.view.add(entries);
  }

  finish() {
    const { usage } = this;
    const parts = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(plural(usage.completion_tokens, "token"));
      this.addSpeed(parts, usage.completion_tokens);
      parts.push(`prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`);
    } else {
      this.addSpeed(parts, this.numChunks);
    }
    if (this.finishReason === "length") parts.push("cut off at the limit");
    this.end(parts, this.finishReason === "length");
  }

  stopped() {
    const parts = ["stopped"];
    this.addSpeed(parts, this.numChunks);
    this.end(parts, this.content !== "");
  }

  failed(error) {
    this.state.className = "state error";
    const label = error.status ? `${error.status} · ` : "";
    this.state.replaceChildren(label, error.message);
    if (error.retryAfter) this.state.append(` Try again in ${error.retryAfter} s.`);
    this.end([], this.content !== "" && !error.status);
  }

  addSpeed(parts, numTokens) {
    if (this.firstAt === null) return;
    parts.push(`first after ${milliseconds(this.firstAt - this.startedAt)}`);
    const seconds = (this.lastAt - this.firstAt) / 1000;
    if (numTokens > 1 && seconds > 0) parts.push(`${rate((numTokens - 1) / seconds)} tokens/s`);
  }

  end(parts, canGoOn) {
    clearInterval(this.watch);
    this.watch = null;
    if (!this.state.classList.contains("error")) this.state.replaceChildren();
    this.node.removeAttribute("aria-busy");
    this.figures.replaceChildren(...parts.map((part) => element("span", {}, part)));
    this.goOnButton.hidden = !canGoOn;
    this.copyButton.hidden = this.content === "";
    this.footer.hidden = false;
  }

  // While nothing comes: is something away, or does it only take its time?
  async look() {
    const silence = performance.now() - this.heardAt;
    if (silence < SILENCE || this.looking) return;
    this.looking = true;
    const away = await whatIsAway();
    this.looking = false;
    if (!this.watch || performance.now() - this.heardAt < SILENCE) return;
    const seconds = `${Math.round((performance.now() - this.heardAt) / 1000)} s`;
    const what = away ? `Waiting for ${away}` : this.firstAt ? "Waiting for the next token" : "Waiting for the first token";
    this.state.replaceChildren(element("span.pulse"), `${what} · ${seconds}`);
  }

  async copy() {
    await navigator.clipboard.writeText(this.content).catch(() => {});
    this.copyButton.textContent = "Copied";
    setTimeout(() => (this.copyButton.textContent = "Copy"), 1500);
  }
}
