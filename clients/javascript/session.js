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
import { ATTEMPTS, REFUSALS, Resumption, SentInput, returnWaitS } from "./resuming.js";
import { Resampler, encodedSound, samplesOf, toBase64 } from "./sound.js";

const CLOSE_MS = 10_000; // until the server has confirmed a close
const MAX_BUFFERED_BYTES = 1 << 20; // above it, sound is dropped: the newest, because it is not sent
const MAX_WAITING = 1_000; // outputs that nobody iterates over; then the session ends
const LOOK_MS = 500; // between two looks whether the server still answers
const LEFT = 1000; // the close code of a client that does not return
const SILENT = 4000; // the close code of a connection on which nothing comes any more
const BUSY_S = 0.5; // before the next attempt, if the session changes its place just now
const LEAVE_S = 1; // before the next attempt to leave a server that shuts down
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
  #resumption = null; // of a resumable session
  #input = new SentInput();
  #unheardMs = null; // since when no message has come although sound was sent
  #timers = []; // of a resumable session

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
      resumable: false,
      silenceS: 6,
      returnWaitS,
      WebSocket: globalThis.WebSocket,
      ...options,
    };
    if (!this.#options.WebSocket) throw new TypeError("there is no WebSocket: give one in options");
    const { dialect, seed } = this.#options;
    if (seed !== null && dialect === "A") throw new TypeError("seed: dialect A has none");
    this.#url = fullUrl(url, this.#options);
    if (this.#options.resumable) this.#resumption = new Resumption();
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
        if (this.#resumption) this.#tellFirst(socket, () => this.#settings());
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
        if (!this.#resumption) this.#tell(socket, this.#settings());
        return false;
      case "session.go_away":
        throw new ConnectionLostError("the server shuts down", { code: "go_away" });
      case "session.created":
        this.created = event;
        this.#outputs.begin(event);
        // From here on: events that come before `connect` has returned are not lost.
        this.#use(socket);
        if (this.#resumption?.isPossible) {
          this.#timers.push(setInterval(() => this.#look(), LOOK_MS));
        }
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
    const encoded = voice ? toBase64(voice) : null;
    const resuming = this.#resumption?.settings ?? {};
    return settingsEvent(dialect, instructions, encoded, seed, options, resuming);
  }

  #use(socket) {
    this.#socket = socket;
    socket.onmessage = ({ data }) => this.#guard(() => this.#take(this.#parsed(data)));
    socket.onclose = (closed) => this.#closed(closed);
  }

  // --- the way back to the session ---

  #lost() {
    this.#comeBack();
    this.#options.onLost?.();
  }

  async #comeBack() {
    const lostMs = Date.now();
    let tried = 0;
    for (let waitS = this.#options.returnWaitS(tried); ; ) {
      await new Promise((resolve) => {
        this.#timers.push(setTimeout(resolve, waitS * 1000));
      });
      if (this.#isOver) return;
      try {
        await this.#ask(lostMs, tried + 1);
        return;
      } catch (error) {
        const isBusy = error.code === "resume_busy";
        if (!isBusy) tried += 1;
        waitS = isBusy ? BUSY_S : this.#options.returnWaitS(tried);
        const isLate = Date.now() + waitS * 1000 > lostMs + this.#resumption.withinS * 1000;
        if (REFUSALS.has(error.code) || tried >= ATTEMPTS || isLate) {
          this.#finish(error);
          return;
        }
      }
    }
  }

  // Go to another server before this one ends; without success, try again later.
  async #leave() {
    if (this.#isOver) return;
    const former = this.#socket;
    try {
      await this.#ask(null, 1);
      former.onmessage = former.onclose = null;
      former.close();
    } catch (error) {
      if (this.#isOver || former !== this.#socket) return;
      const isRefused = REFUSALS.has(error.code);
      if (former.readyState === 3) {
        // It has closed meanwhile.
        if (isRefused) this.#finish(error);
        else this.#lost();
        return;
      }
      if (isRefused) return;
      this.#timers.push(setTimeout(() => this.#leave(), LEAVE_S * 1000));
    }
  }

  // Ask for the session on a new socket. Rejects with a DuplexError.
  async #ask(lostMs, attempts) {
    const beganMs = Date.now();
    const socket = this.#newSocket();
    let timer;
    this.#input.isAsked = true;
    this.#refusal = null;
    try {
      await new Promise((resolve, reject) => {
        const { connectTimeoutS } = this.#options;
        const late = () => reject(new ConnectionLostError(`no answer within ${connectTimeoutS} s`));
        timer = setTimeout(late, connectTimeoutS * 1000);
        const reason = ({ code, reason: text }) =>
          this.#refusal
            ? new ConnectionLostError(this.#refusal.detail, { code: this.#refusal.code })
            : errorOfClose(code, text);
        socket.onclose = (closed) => reject(reason(closed));
        socket.onerror = () => {};
        socket.onmessage = ({ data }) => {
          try {
            const event = this.#parsed(data);
            if (event.type !== "session.resumed") return; // the server may tell a place first
            if (this.#isOver) {
              resolve();
              this.#leaveFor(socket);
              return;
            }
            this.#use(socket);
            this.#begun(event, lostMs, beganMs, attempts);
            resolve();
          } catch (error) {
            reject(error);
          }
        };
        this.#tellFirst(socket, () => this.#resumption.request(this.#input.firstSample));
      });
    } catch (error) {
      socket.onmessage = socket.onclose = null;
      socket.close(this.#isOver ? LEFT : SILENT);
      throw error;
    } finally {
      this.#input.isAsked = false;
      clearTimeout(timer);
    }
  }

  // A server that hears no end keeps the session for a client that returns.
  #leaveFor(socket) {
    socket.onmessage = socket.onclose = null;
    this.#tell(socket, { type: "session.close", reason: "user_stop" });
    socket.close(LEFT);
  }

  #begun(event, lostMs, beganMs, attempts) {
    const nowMs = Date.now();
    // Input that was sent, but did not arrive, is known only to the server.
    const lostSamples = Math.max(this.#input.rewind(event.next_sample ?? 0), event.lost_samples ?? 0);
    this.#unheardMs = null;
    this.#options.onReturn?.({
      gapS: event.gap_s ?? 0,
      awayS: lostMs === null ? 0 : (nowMs - lostMs) / 1000,
      tookS: (nowMs - beganMs) / 1000,
      attempts,
      lostSamples,
      wasAsked: lostMs === null,
    });
    this.#flush();
  }

  // Browsers do not show whether a connection still answers pings, but each unit has an answer.
  #look() {
    if (this.#unheardMs === null || Date.now() - this.#unheardMs < this.#options.silenceS * 1000) return;
    this.#unheardMs = null;
    const socket = this.#socket;
    socket.onmessage = socket.onclose = null;
    socket.close(SILENT, "silent");
    this.#lost();
  }

  #flush() {
    if (!this.#isOpen()) return;
    let input;
    while (this.#socket.bufferedAmount <= MAX_BUFFERED_BYTES && (input = this.#input.take())) {
      this.#append(input.samples, input.frames, input.inputId, input.mustListen);
      this.#unheardMs ??= Date.now();
    }
  }

  #stopTimers() {
    for (const timer of this.#timers.splice(0)) clearTimeout(timer); // also of intervals
  }

  // --- what the client does ---

  send(sound, { rate = INPUT_RATE, pictures = [], inputId = null } = {}) {
    if (inputId !== null && this.#options.dialect === "A") {
      throw new TypeError("inputId: dialect A has none");
    }
    const given = samplesOf(sound);
    const isKept = this.#resumption?.isPossible && !this.end && !this.#failure;
    if (this.#isPaused || this.#isClosing || !(isKept || this.#isOpen())) return false;
    if (this.#resampler?.rate !== rate) this.#resampler = new Resampler(rate);
    const samples = this.#resampler.add(given);
    if (!isKept && this.#socket.bufferedAmount > MAX_BUFFERED_BYTES) {
      this.droppedSends += 1;
      return false;
    }
    if (samples.length === 0 && pictures.length === 0) return false;
    let frames = pictures.map(toBase64);
    for (let at = 0; at === 0 || at < samples.length; at += INPUT_RATE) {
      const piece = samples.slice(at, at + INPUT_RATE); // the caller may use its memory again
      const mustListen = this.#mustListen;
      this.#mustListen = false;
      if (isKept) this.#input.add(piece, { frames, inputId, mustListen });
      else this.#append(piece, frames, inputId, mustListen);
      frames = [];
    }
    if (isKept) this.#flush();
    return true;
  }

  #append(piece, frames, inputId, mustListen) {
    const { dialect, uplink } = this.#options;
    const audio = piece.length > 0 ? encodedSound(piece, uplink) : "";
    this.#tell(this.#socket, appendEvent(dialect, audio, frames, mustListen, inputId));
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
    if (!this.#isOpen()) {
      const isAway = this.#resumption?.isPossible && !this.end && !this.#failure;
      if (this.#socket) this.#finish(null);
      if (isAway && !this.#input.isAsked) await this.#ask(null, 1).catch(() => {});
      return;
    }
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
    this.#unheardMs = null;
    if (this.#resumption && !this.#isNews(event)) return;
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

  // Handle the events about the socket of a resumable session; return whether to go on.
  #isNews(event) {
    if (event.type === "session.replaced") {
      // A client that leaves a server is perhaps told there first that it has another socket.
      if (!this.#input.isAsked) this.#finish(null, { reason: "replaced" });
      return false;
    }
    if (event.type === "session.go_away") {
      this.#timers.push(setTimeout(() => this.#leave(), (event.after_s ?? 0) * 1000));
      return false;
    }
    const isNew = this.#resumption.isNew(event);
    if (isNew) {
      this.#input.begun(event);
      this.#flush();
    }
    return isNew;
  }

  #add(item) {
    if (this.#waiting.length >= MAX_WAITING) {
      throw new ServerError(`nobody reads: ${MAX_WAITING} outputs wait`);
    }
    this.#waiting.push(item);
    this.#wake();
  }

  #closed(closed) {
    if (this.#isClosing) return this.#finish(null);
    if (this.#input.isAsked) return; // `#leave` has asked for another socket already
    const error = this.#errorOfClose(closed);
    if (!this.#resumption?.isPossible || error instanceof RefusedError) return this.#finish(error);
    if (!this.end && !this.#failure) this.#lost();
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
    this.#stopTimers();
    this.#socket.close(LEFT); // the server lingers until the client closes
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
    if (this.#resumption) event = this.#resumption.read(event); // no log gets the tokens
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

  // Tell the first event as soon as the connection is open.
  #tellFirst(socket, event) {
    if (socket.readyState === 1) this.#tell(socket, event());
    else socket.onopen = () => this.#tell(socket, event());
  }

  get #isOver() {
    return this.#isClosing || this.end !== null || this.#failure !== null;
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
