// A few requests, so that there is something to see.

import { chat } from "./sse.js";

const SYSTEM = "You are a helpful assistant who explains things to curious people, in plain words and with an example.";
const TOPICS = ["tides", "bread", "radio", "glaciers", "bees", "bridges", "violins", "maps"];

export function sampleLoad() {
  for (const topic of TOPICS) ask(`Tell me about ${topic}.`).catch(() => {}); // the view shows how it went
}

async function ask(content) {
  const messages = [{ role: "system", content: SYSTEM }, { role: "user", content }];
  for await (const _ of chat({ messages, max_tokens: 192, temperature: 0.7, stream: true }));
}
