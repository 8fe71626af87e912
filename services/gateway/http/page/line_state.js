// What the feed has told so far: a snapshot replaces, a delta is merged.

const MAX_STEPS = 512;
const RATE_WINDOW = 3; // seconds over which the rate of tokens is taken
const REPLACED = ["model", "pool", "num_requests_more", "queue", "counters", "latency"];
const ENDED = new Set(["finished", "dropped"]);

export class LineState {
  constructor() {
    this.seen = new Map(); // by role and name: {incarnation, since, gone, starts}
    this.reset();
  }

  reset() {
    for (const name of REPLACED) this[name] = null;
    this.requests = new Map();
    this.steps = [];
    this.numStepsDropped = 0;
    this.services = [];
    this.blocks = new Blocks(0);
    this.outputs = []; // [t, output_tokens]
  }

  // Returns which members have changed.
  apply(event, data) {
    if (event === "snapshot") this.reset();
    this.t = data.t;
    for (const name of REPLACED) if (name in data) this[name] = data[name];
    if (data.pool && data.pool.num_blocks !== this.blocks.size) this.blocks = new Blocks(data.pool.num_blocks);
    if (data.blocks) this.blocks.apply(data.blocks);
    for (const request of data.requests ?? []) this.merge(request);
    if (data.steps) {
      this.steps.push(...data.steps);
      if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    }
    this.numStepsDropped += data.num_steps_dropped ?? 0;
    if (data.counters) this.outputs.push([data.t, data.counters.output_tokens]);
    if (data.services) this.meet(data.services);
    return new Set(event === "snapshot" ? [...REPLACED, "blocks", "requests", "steps", "services"] : Object.keys(data));
  }

  merge({ block_table: table, ...told }) {
    if (ENDED.has(told.state)) {
      this.requests.delete(told.key);
      return;
    }
    const request = this.requests.get(told.key) ?? { block_table: [] };
    Object.assign(request, told);
    if (table) request.block_table.splice(table.from, Infinity, ...table.ids);
    this.requests.set(told.key, request);
  }

  // Keeps, for each service, since when it is what it is, and how often it was seen to start anew.
  meet(services) {
    this.services = services;
    for (const { role, name, incarnation, alive } of services) {
      const place = role === "tokenizer" ? `${role} ${name}` : role; // there may be several, the others are alone
      const known = this.seen.get(place);
      if (!known || known.incarnation !== incarnation) {
        this.seen.set(place, { incarnation, since: this.t, gone: !alive, starts: known ? known.starts + 1 : 0 });
      } else if (known.gone === alive) {
        Object.assign(known, { gone: !alive, since: this.t });
      }
    }
  }

  known({ role, name }) {
    return this.seen.get(role === "tokenizer" ? `${role} ${name}` : role);
  }

  // Tokens per second over the last seconds, by the feed's clock; null before two counts are known.
  tokenRate(now) {
    while (this.outputs.length > 2 && this.outputs[1][0] < now - RATE_WINDOW) this.outputs.shift();
    if (this.outputs.length < 2) return this.outputs.length ? 0 : null;
    const [from, to] = [this.outputs[0], this.outputs.at(-1)];
    if (to[0] < now - RATE_WINDOW) return 0;
    return (to[1] - from[1]) / Math.max(0.2, now - from[0]);
  }

  // Who holds a block: [request, logical index].
  holders(id) {
    const found = [];
    for (const request of this.requests.values()) {
      const index = request.block_table.indexOf(id);
      if (index >= 0) found.push([request, index]);
    }
    return found;
  }
}

export const FREE = 0, CACHED = 1, OWNED = 2, SHARED_2 = 3, SHARED_4 = 4, SHARED_MORE = 5;

// Columns by block id, 1 … size.
export class Blocks {
  constructor(size) {
    this.size = size;
    this.refCnt = new Uint32Array(size + 1);
    this.named = new Uint8Array(size + 1);
    this.hash = new Uint32Array(size + 1);
    this.parent = new Int32Array(size + 1).fill(-1);
    this.hits = new Uint32Array(size + 1);
    this.changed = new Set();
    this.numApplied = 0;
  }

  apply({ runs, ref_cnt, hash, parent, hits }) {
    let i = 0;
    for (let run = 0; run < runs.length; run += 2) {
      for (let id = runs[run]; id < runs[run] + runs[run + 1]; id++, i++) {
        if (id > this.size) continue;
        this.refCnt[id] = ref_cnt[i];
        this.named[id] = hash[i] ? 1 : 0;
        this.hash[id] = hash[i] ? parseInt(hash[i], 16) : 0;
        this.parent[id] = parent[i];
        this.hits[id] = hits[i];
        this.changed.add(id);
      }
    }
    this.numApplied += 1;
  }

  state(id) {
    const n = this.refCnt[id];
    if (n === 0) return this.named[id] ? CACHED : FREE;
    if (n === 1) return OWNED;
    return n === 2 ? SHARED_2 : n <= 4 ? SHARED_4 : SHARED_MORE;
  }

  hashText(id) {
    return this.named[id] ? this.hash[id].toString(16).padStart(8, "0") : "";
  }

  describe(id) {
    const n = this.refCnt[id];
    if (n === 0) return this.named[id] ? "cached" : "free";
    return n === 1 ? "owned" : `shared by ${n}`;
  }
}
