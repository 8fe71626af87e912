// The figures: throughput, latencies, cache, preemptions.

import { element, setText } from "./dom.js";
import { count, milliseconds, percent, rate } from "./format.js";

export class Tiles {
  constructor() {
    this.tiles = {
      rate: new Tile("Output", "Tokens per second over the last seconds"),
      ttft: new Tile("First token", "From a request's arrival to its first token, as clients see it"),
      itl: new Tile("Between tokens", "From one token to the next, as clients see it"),
      cache: new Tile("Found in the cache", "Of the prompts' tokens since the scheduler's start"),
      preemptions: new Tile("Preemptions", "Since the scheduler's start"),
    };
    this.node = element("dl.tiles", {}, ...Object.values(this.tiles).map((tile) => tile.node));
  }

  update(state, now) {
    const { counters, latency } = state;
    const speed = state.tokenRate(now);
    this.tiles.rate.show(speed === null ? "–" : rate(speed), "tokens/s");
    for (const name of ["ttft", "itl"]) {
      const told = latency?.[name];
      const rest = told?.count ? `p90 ${milliseconds(told.p90)} · p99 ${milliseconds(told.p99)}` : "none yet";
      this.tiles[name].show(milliseconds(told?.p50), rest);
    }
    this.tiles.cache.show(
      counters ? percent(counters.prefix_cache_hits, counters.prefix_cache_queries) : "–",
      counters ? `${count(counters.prefix_cache_hits)} of ${count(counters.prefix_cache_queries)} tokens` : "",
    );
    this.tiles.preemptions.show(counters ? count(counters.preemptions) : "–", counters ? `${count(counters.steps)} steps` : "");
  }
}

class Tile {
  constructor(label, title) {
    this.value = element("dd.tile-value");
    this.rest = element("dd.tile-rest");
    this.node = element("div.tile", { title }, element("dt", {}, label), this.value, this.rest);
  }

  show(value, rest) {
    setText(this.value, value);
    setText(this.rest, rest);
  }
}
