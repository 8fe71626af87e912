// The connection to /live: it opens again by itself, and exists only between start and stop.

import { call, events } from "./sse.js";

const INTERVAL = 200; // ms between events
const SILENCE = 15000; // ms; the server writes at least a comment every 5 s
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5000;

export class Feed {
  // `onEvent` gets "snapshot" or "delta" and its data. `onState` gets "open", or "lost" with a reason.
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.controller = null;
  }

  start() {
    if (this.controller) return;
    this.controller = new AbortController();
    this.run(this.controller.signal);
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  async run(stopped) {
    let pause = FIRST_PAUSE;
    while (!stopped.aborted) {
      let reason = "the server has ended it";
      try {
        await this.read(stopped, () => (pause = FIRST_PAUSE));
      } catch (error) {
        reason = error.message;
      }
      if (stopped.aborted) return;
      this.onState("lost", reason);
      await sleep(pause, stopped);
      pause = Math.min(LONGEST_PAUSE, pause * 2);
    }
  }

  async read(stopped, heard) {
    const connection = new AbortController();
    const end = () => connection.abort();
    stopped.addEventListener("abort", end);
    let timer = setTimeout(end, SILENCE);
    try {
      const response = await call(`live?interval_ms=${INTERVAL}`, { signal: connection.signal });
      for await (const { event, data } of events(response)) {
        clearTimeout(timer);
        timer = setTimeout(end, SILENCE);
        if (stopped.aborted) return;
        if (event !== "snapshot" && event !== "delta") continue;
        if (event === "snapshot") this.onState("open");
        heard();
        this.onEvent(event, JSON.parse(data));
      }
    } catch (error) {
      throw error.name === "AbortError" ? new Error("the server is silent") : error;
    } finally {
      clearTimeout(timer);
      stopped.removeEventListener("abort", end);
      connection.abort();
    }
  }
}

function sleep(ms, stopped) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    stopped.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
