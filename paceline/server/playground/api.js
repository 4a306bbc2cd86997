// The server, as the page sees it: requests, streams of events, and what went wrong in plain words.
// Invariant: whatever fails becomes an ApiError whose message can be shown as it is, or an AbortError when the user stopped it.

const KEY = "paceline-api-key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => {
    try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; }
  },
  set: (value) => {
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch { /* then the field alone holds it */ }
  },
};

let current = key.get();
export function useKey(value) {
  current = value.trim();
  key.set(current);
}

function headers() {
  return current ? { authorization: `Bearer ${current}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options?.headers, ...headers() } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. It may have been stopped; start it and try again.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch { /* not JSON: the status says enough */ }
  const wait = Number(response.headers.get("retry-after")) || 0;
  return new ApiError(inWords(response.status, said, wait), response.status);
}

function inWords(status, said, wait) {
  const later = wait ? `Try again in ${wait} s.` : "Try again in a moment.";
  switch (status) {
    case 401: return current ? "The server does not know this API key. Check it under Access." : "This server asks for an API key. Enter it under Access.";
    case 408: case 504: return `The server gave up: this took too long. ${said}`.trim();
    case 413: return "The conversation is too long for this server. Start a new chat.";
    case 429: return `The server is busy. ${later}`;
    case 503: return `The engine is not ready: it is starting or restarting. ${later}`;
    default: return said || `The server answered with an error (${status}).`;
  }
}

export async function getJson(path) {
  return (await ask(path)).json();
}

/** {status, isReady}: what /ready says, whatever its HTTP status; null when there is no answer. */
export async function readiness() {
  try {
    const response = await fetch("/ready", { cache: "no-store" });
    return { isReady: response.ok, status: (await response.json()).status ?? "ok" };
  } catch {
    return null;
  }
}

/** The events of a streamed answer, each with the time it came. Ends after [DONE]; a stream that breaks off before is an error. */
export async function* events(path, body, signal) {
  const response = await ask(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json" },
  });
  for await (const data of dataLines(response.body, signal)) {
    if (data === "[DONE]") return;
    const event = parsed(data);
    if (event.error) throw new ApiError(`The answer broke off: ${event.error.message}`);
    yield event;
  }
  throw new ApiError("The connection broke off before the answer was complete.");
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server sent something that is not JSON; a proxy between may have cut it.");
  }
}

async function* dataLines(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (kept + value).split(/\r?\n/);
      kept = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } catch (error) {
    if (signal?.aborted) throw new DOMException("stopped", "AbortError");
    throw new ApiError("The connection broke off before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {}); // frees the request on the server when we leave early
  }
}
