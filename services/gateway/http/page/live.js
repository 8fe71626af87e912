// The live view: the feed is open only while it is seen, and only what has changed is drawn again.

import { element, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { count } from "./format.js";
import { LineState } from "./line_state.js";
import { forgetPalette } from "./palette.js";
import { Pool } from "./pool.js";
import { Prefixes } from "./prefixes.js";
import { Requests, shortKey } from "./requests.js";
import { sampleLoad } from "./sample_load.js";
import { Services } from "./services.js";
import { Steps } from "./steps.js";
import { Tiles } from "./tiles.js";

export class LiveView {
  constructor(root) {
    this.root = root;
    this.state = new LineState();
    this.changed = new Set();
    this.frame = 0;
    this.lostAt = 0;
    this.feed = new Feed((event, data) => this.onEvent(event, data), (state, reason) => this.onState(state, reason));
    this.pool = new Pool((id) => this.onBlock(id));
    this.steps = new Steps();
    this.requests = new Requests(() => this.onLook(), sampleLoad);
    this.prefixes = new Prefixes();
    this.services = new Services();
    this.tiles = new Tiles();
    this.banner = element("p.banner", { role: "status" }, element("span.pulse"), "Connecting …");
    this.panels = element(
      "div.live-grid", {},
      element("div.column", {}, this.pool.node, this.steps.node, this.prefixes.node),
      this.requests.node,
    );
    root.append(this.banner, this.services.node, this.tiles.node, this.panels);
    root.classList.add("waiting");
  }

  show(asked) {
    const seen = asked && document.visibilityState === "visible";
    if (seen) {
      this.feed.start();
      this.clock ??= setInterval(() => this.schedule("clock"), 1000);
    } else {
      this.feed.stop();
      clearInterval(this.clock);
      this.clock = null;
    }
  }

  recolour() {
    forgetPalette();
    this.pool.drawAll();
    this.steps.draw();
    this.prefixes.draw();
  }

  onEvent(event, data) {
    for (const member of this.state.apply(event, data)) this.changed.add(member);
    this.heardAt = performance.now();
    this.schedule();
  }

  onState(state, reason) {
    const open = state === "open";
    this.banner.hidden = open;
    this.root.classList.toggle("waiting", !open);
    if (!open) this.banner.replaceChildren(element("span.pulse"), `No connection: ${reason}. Trying again …`);
  }

  schedule(member) {
    if (member) this.changed.add(member);
    this.frame ||= requestAnimationFrame(() => this.render());
  }

  // The feed's clock, which goes on between its events.
  now() {
    return this.state.t + (performance.now() - this.heardAt) / 1000;
  }

  render() {
    this.frame = 0;
    const { state, changed } = this;
    this.changed = new Set();
    if (state.t === undefined) return;
    const any = (...members) => members.some((member) => changed.has(member));
    if (any("pool", "blocks")) this.pool.update(state);
    if (any("steps")) this.steps.update(state);
    if (any("requests", "queue", "blocks", "num_requests_more")) {
      this.requests.update(state);
      this.onLook();
    }
    if (any("blocks", "pool", "clock")) this.prefixes.update(state);
    if (any("services", "clock")) this.services.update(state, this.now());
    if (any("counters", "latency", "queue", "pool", "clock")) this.tiles.update(state, this.now());
  }

  // Of the request that is looked at, the blocks and their table.
  onLook() {
    const request = this.state.requests.get(this.requests.looked);
    this.pool.mark(request?.block_table ?? []);
    this.requests.table.show(request, this.state.blocks);
    this.tellBlock();
  }

  onBlock(id) {
    this.block = id;
    this.tellBlock();
  }

  tellBlock() {
    const { blocks, pool } = this.state;
    const holders = this.block ? this.state.holders(this.block) : [];
    this.requests.point(new Set(holders.map(([request]) => request.key)));
    if (!this.block) {
      const hint = pool ? `${pool.block_size} tokens a block. Point at one to see what it holds.` : "No scheduler has told its blocks yet.";
      return setText(this.pool.info, hint);
    }
    const parts = [`Block ${this.block}`, blocks.describe(this.block)];
    if (blocks.named[this.block]) parts.push(`hash ${blocks.hashText(this.block)}`);
    if (blocks.hits[this.block]) parts.push(`${count(blocks.hits[this.block])} hits`);
    for (const [request, index] of holders.slice(0, 3)) parts.push(`logical ${index} of ${shortKey(request.key)}`);
    if (holders.length > 3) parts.push(`and ${holders.length - 3} more`);
    setText(this.pool.info, parts.join(" · "));
  }
}
