/** The stream of events of the edge: it is read, and opened again when it ends. */

import { RefusedError } from "./api.js";

const PATH = "/api/admin/watch";
const SILENCE_MS = 10_000; // the edge sends figures every 2 s; a longer silence is a lost connection
const MAX_WAIT_S = 15;

/**
 * Yield the events of a body of type text/event-stream, as far as this edge writes them.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<{name: string, fields: any}>}
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = parseEvent(text.slice(0, end));
        text = text.slice(end + 2);
        if (event) yield event;
      }
    }
  } finally {
    reader.releaseLock();
  }
}

/** @param {string} text */
function parseEvent(text) {
  let name = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { name, fields: JSON.parse(data.join("\n")) } : null;
}

/** Reads the stream until `stop`. */
export class Watch {
  /**
   * @param {import("./api.js").Api} api
   * @param {{
   *   onEvent: (name: string, fields: any) => void,
   *   onLost: (reason: string, waitS: number) => void,
   *   onKeyNeeded: (reason: string) => void,
   *   silenceMs?: number,
   * }} handlers
   */
  constructor(api, handlers) {
    this._api = api;
    this._handlers = handlers;
    this._stopped = new AbortController();
  }

  stop() {
    this._stopped.abort();
  }

  async run() {
    let waitS = 0;
    while (!this._stopped.signal.aborted) {
      let reason = "The edge has ended the stream.";
      let leastS = 1;
      try {
        await this._read(() => (waitS = 0));
      } catch (error) {
        if (this._stopped.signal.aborted) return;
        if (error instanceof RefusedError && error.needsKey) {
          this._handlers.onKeyNeeded(error.message);
          return;
        }
        reason = error instanceof RefusedError ? `The edge refuses: ${error.message}.` : "The edge does not answer.";
        if (error instanceof RefusedError) leastS = Math.max(leastS, error.retryAfterS);
      }
      waitS = Math.min(MAX_WAIT_S, Math.max(leastS, 2 * waitS));
      this._handlers.onLost(reason, waitS);
      await pause(waitS * 1000, this._stopped.signal);
    }
  }

  /** @param {() => void} onOpen */
  async _read(onOpen) {
    const lost = new AbortController();
    const abort = () => lost.abort();
    this._stopped.signal.addEventListener("abort", abort);
    const silenceMs = this._handlers.silenceMs ?? SILENCE_MS;
    let timer = setTimeout(abort, silenceMs);
    try {
      const answer = await this._api.ask(PATH, { signal: lost.signal });
      if (!answer.body) return;
      for await (const { name, fields } of readEvents(answer.body)) {
        clearTimeout(timer);
        timer = setTimeout(abort, silenceMs);
        onOpen();
        this._handlers.onEvent(name, fields);
      }
    } finally {
      clearTimeout(timer);
      abort();
      this._stopped.signal.removeEventListener("abort", abort);
    }
  }
}

/** @param {number} ms @param {AbortSignal} signal @returns {Promise<void>} */
function pause(ms, signal) {
  if (signal.aborted) return Promise.resolve();
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
}
