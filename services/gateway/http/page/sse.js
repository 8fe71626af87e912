// Calls to this server: errors in its own words, and its streams of server-sent events.

export class ServerError extends Error {
  // `status` is 0 where the stream had begun.
  constructor(status, message, { param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

export class ConnectionLost extends Error {
  constructor() {
    super("The connection to the server is lost.");
  }
}

// The response, or a ServerError that says what its body says. AbortError passes through.
export async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ConnectionLost();
  }
  if (!response.ok) throw await serverError(response);
  return response;
}

async function serverError(response) {
  const text = await response.text().catch(() => "");
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  try {
    const { error } = JSON.parse(text);
    return new ServerError(response.status, error.message, { param: error.param, retryAfter });
  } catch {
    return new ServerError(response.status, text.slice(0, 300) || `HTTP ${response.status} ${response.statusText}`);
  }
}

// {event, data} of each event, data as text. Comments are {event: "", data: ""}: a sign of life.
// Ends when the stream ends; ConnectionLost when it breaks.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        yield parse(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ConnectionLost();
  }
}

function parse(block) {
  let event = "message";
  const data = [];
  let empty = true;
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
    else continue;
    empty = false;
  }
  return empty ? { event: "", data: "" } : { event, data: data.join("\n") };
}

// The chunks of a chat. What a stream ends with instead of [DONE] is thrown.
export async function* chat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    if (!data) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(0, chunk.error.message, { param: chunk.error.param });
    yield chunk;
  }
  throw new ConnectionLost();
}

// Why requests wait, in words for "Waiting for …"; "" when nothing is known to be away.
export async function whatIsAway() {
  let reason;
  try {
    const response = await fetch("ready", { signal: AbortSignal.timeout(3000) });
    ({ reason } = await response.json());
  } catch {
    return "the gateway";
  }
  if (!reason) return "";
  return (await awayRoles().catch(() => "")) || reason;
}

// The first snapshot of the live feed names the services.
async function awayRoles() {
  const response = await call("live?interval_ms=10000", { signal: AbortSignal.timeout(3000) });
  for await (const { event, data } of events(response)) {
    if (event === "snapshot") return awayAmong(JSON.parse(data).services);
  }
  return "";
}

export function awayAmong(services) {
  const usable = (service) => service.alive && service.ready && !service.stalled;
  const roles = ["tokenizer", "scheduler", "executor"].filter(
    (role) => !services.some((service) => service.role === role && usable(service)),
  );
  // A scheduler without an executor is not ready either: the furthest one away is what is waited for.
  const gone = roles.filter((role) => !services.some((service) => service.role === role && service.alive));
  const named = gone.length ? gone : roles.slice(-1);
  return named.map((role) => `the ${role}`).join(" and ");
}
