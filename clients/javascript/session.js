// `DuplexSession`: one conversation with the model, over one WebSocket. index.d.ts describes it.

import {
  BusyError,
  ConnectionLostError,
  DuplexError,
  InputError,
  RefusedError,
  ServerError,
  errorOfClose,
  retryWaitS,
} from "./errors.js";
import { INPUT_RATE, OutputReader, appendEvent, queuePlace, settingsEvent } from "./events.js";
import { Resampler, encodedSound, samplesOf, toBase64 } from "./sound.js";

const CLOSE_MS = 10_000; // until the server has confirmed a close
const MAX_BUFFERED_BYTES = 1 << 20; // above it, sound is dropped: the newest, because it is not sent
const MAX_WAITING = 1_000; // outputs that nobody iterates over; then the session ends
const FATAL = new Set(["service_unavailable", "queue_full", "worker_busy", "worker_connect_failed"]);
const FAILED = new Set(["server_shutdown", "error", "backend_error"]);
const SCHEMES = { "ws:": "ws:", "wss:": "wss:", "http:": "ws:", "https:": "wss:" };

export class DuplexSession {
  created = null;
  end = null;
  droppedSends = 0;
  #url;
  #options;
  #socket = null;
  #connecting = null; // the AbortController of `connect`
  #outputs = new OutputReader();
  #waiting = []; // outputs and errors for the iteration
  #wakes = []; // of iterations that wait
  #failure = null;
  #refusal = null;
  #resampler = null;
  #mustListen = false;
  #isPaused = false;
  #isClosing = false;

  constructor(url, options = {}) {
    this.#options = {
      dialect: "B",
      mode: "audio",
      instructions: "You are a helpful assistant.",
      seed: null,
      options: {},
      uplink: "int16",
      attempts: 5,
      retryBaseS: 1,
      connectTimeoutS: 10,
      queueTimeoutS: 600,
      WebSocket: globalThis.WebSocket,
      ...options,
    };
    if (!this.#options.WebSocket) throw new TypeError("there is no WebSocket: give one in options");
    const { dialect, seed } = this.#options;
    if (seed !== null && dialect === "A") throw new TypeError("seed: dialect A has none");
    this.#url = fullUrl(url, this.#options);
  }

  // --- the beginning ---

  async connect({ signal } = {}) {
    if (this.#connecting || this.#isClosing) throw new Error("a session connects once");
    this.#connecting = new AbortController();
    const stop = () => this.#connecting.abort(signal.reason);
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop);
    try {
      for (let attempt = 0; ; attempt += 1) {
        try {
          await this.#attempt(this.#connecting.signal);
          return this;
        } catch (error) {
          if (!(error instanceof DuplexError) || attempt + 1 >= this.#options.attempts) throw error;
          const waitS = retryWaitS(error, attempt, this.#options.retryBaseS);
          if (waitS === null) throw error;
          await sleep(waitS * 1000, this.#connecting.signal);
        }
      }
    } finally {
      signal?.removeEventListener("abort", stop);
    }
  }

  async #attempt(signal) {
    signal.throwIfAborted();
    const { connectTimeoutS, queueTimeoutS } = this.#options;
    const socket = this.#newSocket();
    this.#refusal = null;
    const timers = [];
    let stop;
    try {
      await new Promise((resolve, reject) => {
        const after = (seconds, action) => timers.push(setTimeout(action, seconds * 1000));
        after(connectTimeoutS, () => {
          const reason = `the server does not answer within ${connectTimeoutS} s`;
          if (socket.readyState === 0) reject(new ConnectionLostError(reason));
        });
        after(queueTimeoutS, () => reject(new BusyError(`no slot within ${queueTimeoutS} s`)));
        stop = () => reject(signal.reason);
        signal.addEventListener("abort", stop);
        socket.onclose = (closed) => reject(this.#errorOfClose(closed));
        socket.onerror = () => {}; // `onclose` follows
        socket.onmessage = ({ data }) => {
          try {
            if (this.#begin(socket, this.#parsed(data))) resolve();
          } catch (error) {
            reject(error);
          }
        };
      });
    } catch (error) {
      socket.onmessage = socket.onclose = null;
      socket.close();
      throw error;
    } finally {
      timers.forEach(clearTimeout);
      signal.removeEventListener("abort", stop);
    }
  }

  #newSocket() {
    const { key, WebSocket } = this.#options;
    const protocols = key ? ["duplane.realtime", `duplane.bearer.${key}`] : [];
    try {
      return new WebSocket(this.#url, protocols);
    } catch (error) {
      throw new RefusedError(error.message); // a key with characters that no subprotocol may have
    }
  }

  // Handle one event before the conversation has begun; return whether it begins now.
  #begin(socket, event) {
    switch (event.type) {
      case "session.queued":
      case "session.queue_update":
        this.#options.onQueue?.(queuePlace(event));
        return false;
      case "session.queue_done":
        this.#tell(socket, this.#settings());
        return false;
      case "session.created":
        this.created = event;
        this.#outputs.begin(event);
        // From here on: events that come before `connect` has returned are not lost.
        socket.onmessage = ({ data }) => this.#guard(() => this.#take(this.#parsed(data)));
        socket.onclose = (closed) => this.#closed(closed);
        this.#socket = socket;
        return true;
      case "session.closed":
        throw new ServerError("the session ended before it began", { code: event.reason });
      case "error":
        if (!FATAL.has(errorOf(event).code)) throw errorOf(event);
        return false;
      default:
        return false;
    }
  }

  #settings() {
    const { dialect, instructions, voice, seed, options } = this.#options;
    return settingsEvent(dialect, instructions, voice ? toBase64(voice) : null, seed, options);
  }

  // --- what the client does ---

  send(sound, { rate = INPUT_RATE, pictures = [], inputId = null } = {}) {
    if (inputId !== null && this.#options.dialect === "A") {
      throw new TypeError("inputId: dialect A has none");
    }
    const given = samplesOf(sound);
    if (this.#isPaused || this.#isClosing || !this.#isOpen()) return false;
    if (this.#resampler?.rate !== rate) this.#resampler = new Resampler(rate);
    const samples = this.#resampler.add(given);
    if (this.#socket.bufferedAmount > MAX_BUFFERED_BYTES) {
      this.droppedSends += 1;
      return false;
    }
    if (samples.length === 0 && pictures.length === 0) return false;
    let frames = pictures.map(toBase64);
    for (let at = 0; at === 0 || at < samples.length; at += INPUT_RATE) {
      this.#append(samples.subarray(at, at + INPUT_RATE), frames, inputId);
      frames = [];
    }
    return true;
  }

  #append(piece, frames, inputId) {
    const { dialect, uplink } = this.#options;
    const audio = piece.length > 0 ? encodedSound(piece, uplink) : "";
    this.#tell(this.#socket, appendEvent(dialect, audio, frames, this.#mustListen, inputId));
    this.#mustListen = false;
  }

  interrupt() {
    this.#mustListen = true;
    this.#outputs.flush();
  }

  pause() {
    this.#isPaused = true;
    this.#resampler = null;
  }

  resume() {
    this.#isPaused = false;
  }

  async close(reason = "user_stop") {
    if (this.#isClosing) return;
    this.#isClosing = true;
    this.#connecting?.abort(new DOMException("the session is closed", "AbortError"));
    if (!this.#isOpen()) return;
    this.#tell(this.#socket, { type: "session.close", reason });
    let timer;
    await Promise.race([
      this.#over(),
      new Promise((resolve) => {
        timer = setTimeout(resolve, CLOSE_MS);
      }),
    ]);
    clearTimeout(timer);
    this.#finish(null);
  }

  async #over() {
    while (!this.end && !this.#failure) await this.#wait();
  }

  // --- what the server does ---

  [Symbol.asyncIterator]() {
    return {
      next: async () => {
        if (!this.#socket) throw new Error("the session is not connected");
        while (this.#waiting.length === 0) {
          if (this.#failure) throw this.#failure;
          if (this.end) return { done: true, value: undefined };
          await this.#wait();
        }
        const next = this.#waiting.shift();
        if (next instanceof InputError) throw next;
        return { done: false, value: next };
      },
      return: async () => ({ done: true, value: undefined }),
    };
  }

  #take(event) {
    if (this.end || this.#failure) return;
    if (event.type === "session.closed") {
      const hasFailed = FAILED.has(event.reason) && !this.#isClosing;
      const details = { code: event.reason };
      this.#finish(hasFailed ? new ServerError("the server ended the session", details) : null, event);
    } else if (event.type === "error") {
      const error = errorOf(event);
      if (FATAL.has(error.code)) return; // the close follows
      if (this.#options.onError) this.#options.onError(error);
      else this.#add(error);
    } else {
      const output = this.#outputs.read(event);
      if (output) this.#add(output);
    }
  }

  #add(item) {
    if (this.#waiting.length >= MAX_WAITING) {
      throw new ServerError(`nobody reads: ${MAX_WAITING} outputs wait`);
    }
    this.#waiting.push(item);
    this.#wake();
  }

  #closed(closed) {
    if (this.#isClosing) this.#finish(null);
    else this.#finish(this.#errorOfClose(closed));
  }

  #guard(action) {
    try {
      action();
    } catch (error) {
      const isOurs = error instanceof DuplexError;
      this.#finish(isOurs ? error : new ServerError(`an output cannot be read: ${error.message}`));
    }
  }

  // The session is over: with an error, or in order. Later calls change nothing.
  #finish(failure, { reason = "closed" } = {}) {
    if (!this.end && !this.#failure) {
      if (failure) this.#failure = failure;
      else this.end = { reason };
    }
    this.#socket.close(); // the server lingers until the client closes
    this.#wake();
  }

  #parsed(data) {
    let event = null;
    try {
      event = JSON.parse(data);
    } catch {
      // The next line says it.
    }
    if (typeof event?.type !== "string") {
      throw new ServerError("the server sent a message that is no event");
    }
    if (event.type === "error") this.#refusal = errorOf(event);
    this.#options.onEvent?.(event);
    return event;
  }

  #errorOfClose({ code, reason }) {
    const refusal = this.#refusal;
    if (!refusal || !FATAL.has(refusal.code)) return errorOfClose(code, reason);
    return errorOfClose(code, refusal.detail, refusal.code);
  }

  #tell(socket, event) {
    if (socket.readyState === 1) socket.send(JSON.stringify(event)); // else `onclose` says why
  }

  #isOpen() {
    return this.#socket !== null && this.#socket.readyState === 1;
  }

  #wait() {
    return new Promise((resolve) => {
      this.#wakes.push(resolve);
    });
  }

  #wake() {
    for (const wake of this.#wakes.splice(0)) wake();
  }
}

function fullUrl(text, { mode, model }) {
  const url = new URL(text);
  if (!(url.protocol in SCHEMES)) throw new TypeError(`url is ${text}, must be ws:// or wss://`);
  url.protocol = SCHEMES[url.protocol];
  if (url.pathname === "/") url.pathname = "/v1/realtime";
  url.searchParams.set("mode", mode);
  if (model) url.searchParams.set("model", model);
  return url.href;
}

function errorOf(event) {
  const { code = "", message = JSON.stringify(event.error) } = event.error ?? {};
  return new InputError(message, { code, inputId: event.input_id ?? null });
}

function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
