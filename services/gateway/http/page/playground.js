// The playground: a conversation, streamed.

import { $, element, store } from "./dom.js";
import { InvalidSetting, Settings } from "./settings.js";
import { ConnectionLost, ServerError, chat } from "./sse.js";
import { Answer } from "./answer.js";

const TOP_LOGPROBS = 5;
const NEAR_END = 60; // px from the conversation's end within which it follows the text

export class Playground {
  constructor() {
    this.settings = new Settings();
    this.turns = []; // {role, content, node}; an assistant's is an Answer
    this.running = null; // the AbortController of the answer that is coming
    this.log = $("log");
    this.prompt = $("prompt");
    this.tokenView = $("token-view");
    this.tokenView.checked = store.get("token-view", false);
    this.listen();
    this.clear();
  }

  listen() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("input", () => this.fitPrompt());
    $("stop").addEventListener("click", () => this.running?.abort());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented) this.running?.abort();
    });
    $("new-chat").addEventListener("click", () => {
      this.clear();
      this.prompt.focus();
    });
    $("copy-curl").addEventListener("click", () => this.copyCurl());
    this.tokenView.addEventListener("change", () => {
      store.set("token-view", this.tokenView.checked);
      this.showTokens();
    });
    const settings = $("settings");
    const showSettings = (shown) => {
      settings.classList.toggle("open", shown);
      $("open-settings").setAttribute("aria-expanded", String(shown));
      (shown ? $("close-settings") : $("open-settings")).focus();
    };
    $("open-settings").addEventListener("click", () => showSettings(true));
    $("close-settings").addEventListener("click", () => showSettings(false));
    settings.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !settings.classList.contains("open")) return;
      event.preventDefault();
      showSettings(false);
    });
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    const hint = element("p.empty", {}, "Ask the model something. Nothing is stored on the server.");
    this.log.replaceChildren(hint);
    this.showTokens();
  }

  showTokens() {
    const { checked } = this.tokenView;
    $("token-scale").hidden = !checked;
    this.log.classList.toggle("tokens", checked);
  }

  fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  // What has been said, as a request's messages.
  messages() {
    const { system } = this.settings;
    const turns = this.turns.filter((turn) => turn.content !== "").map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...turns] : turns;
  }

  body(messages) {
    const body = { messages, ...this.settings.fields(), stream: true, stream_options: { include_usage: true } };
    if (this.tokenView.checked) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    return body;
  }

  send() {
    const content = this.prompt.value.trim();
    if (!content || this.running) return;
    if (!this.turns.length) this.log.replaceChildren();
    const node = element("article.turn.user", { "aria-label": "You" }, element("div.text", {}, content));
    this.turns.push({ role: "user", content, node });
    this.log.append(node);
    this.prompt.value = "";
    this.fitPrompt();
    this.answer();
  }

  async answer() {
    const messages = this.messages();
    const answer = new Answer(this.tokenView.checked, { retry: () => this.retry(answer), goOn: () => this.goOn(answer) });
    this.turns.push(answer);
    this.log.append(answer.node);
    await this.run(answer, messages);
  }

  // Once more from the same messages: what came after is dropped.
  retry(answer) {
    if (this.running) return;
    const at = this.turns.indexOf(answer);
    for (const turn of this.turns.splice(at)) turn.node.remove();
    this.answer();
  }

  // The rest of an answer that was cut off.
  async goOn(answer) {
    if (this.running) return;
    const more = answer.content ? { add_generation_prompt: false, continue_final_message: true } : {};
    await this.run(answer, this.messages(), more);
  }

  async run(answer, messages, more = {}) {
    const controller = new AbortController();
    this.setRunning(controller);
    answer.begin();
    this.scroll(true);
    let shade = false;
    try {
      const body = { ...this.body(messages), ...more };
      shade = Boolean(body.logprobs);
      for await (const chunk of chat(body, controller.signal)) {
        const follows = this.isAtEnd();
        answer.add(chunk, shade);
        this.scroll(follows);
      }
      answer.finish();
      $("announce").textContent = "The answer is complete.";
    } catch (error) {
      this.failed(answer, error);
    } finally {
      if (this.running === controller) this.setRunning(null);
      this.scroll(this.isAtEnd());
    }
  }

  failed(answer, error) {
    if (error.name === "AbortError") return answer.stopped();
    if (error instanceof InvalidSetting) error.field.focus();
    if (error instanceof ServerError && error.param) this.settings.mark(error.param);
    if (!(error instanceof ServerError || error instanceof ConnectionLost || error instanceof InvalidSetting)) {
      console.error(error);
    }
    answer.failed(error);
  }

  setRunning(controller) {
    this.running = controller;
    $("send").hidden = Boolean(controller);
    $("stop").hidden = !controller;
    this.log.classList.toggle("running", Boolean(controller));
    if (!controller && (document.activeElement === document.body || document.activeElement === $("stop"))) {
      this.prompt.focus({ preventScroll: true });
    }
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
  }

  scroll(follows) {
    if (follows) this.log.scrollTop = this.log.scrollHeight;
  }

  async copyCurl() {
    const button = $("copy-curl");
    let label = "Copied";
    try {
      const draft = this.prompt.value.trim();
      const messages = this.messages();
      if (draft) messages.push({ role: "user", content: draft });
      const body = JSON.stringify(this.body(messages.length ? messages : [{ role: "user", content: "Hello!" }]), null, 2);
      const url = new URL("v1/chat/completions", document.baseURI);
      await navigator.clipboard.writeText(
        `curl -N ${url} -H 'Content-Type: application/json' -d '${body.replaceAll("'", String.raw`'\''`)}'`,
      );
    } catch {
      label = "Not copied";
    }
    button.textContent = label;
    setTimeout(() => (button.textContent = "Copy as curl"), 1500);
  }
}
