// The sound of a conversation: the microphone to pieces at 16 kHz, and turns of the model to the
// loudspeaker. One AudioContext at the device's own rate has the clock of both.

import { Resampler } from "../client/sound.js";

const INPUT_RATE = 16000;
const OUTPUT_RATE = 24000;
const PIECE = INPUT_RATE / 5; // samples that are sent at once: 200 ms
const RESUME_MS = 3000; // a browser without a sound device never begins
const STALL_MS = 2000;
const MAX_LAGS = 100; // pieces that wait to be played; a piece lasts about a second

/** Thrown if the page can have no sound. The message is a sentence for the person. */
export class SoundError extends Error {}

/**
 * How long the first piece of a turn waits, in ms. It follows how unevenly the later pieces of
 * turns have come, and changes only between turns.
 */
export class Delay {
  #late = []; // of the newest units, how much later each came than the first one of its turn

  constructor(firstMs, fixedMs = null) {
    this.ms = fixedMs ?? firstMs;
    this.#isFixed = fixedMs !== null;
  }

  #isFixed;

  /** Add how long a unit took that was not the first one of its turn, and how long that one took. */
  add(latencyMs, firstMs) {
    this.#late.push(latencyMs - firstMs);
    if (this.#late.length > 30) this.#late.shift();
  }

  /** A turn is over: choose the delay of the next one. */
  update() {
    if (this.#isFixed || this.#late.length < 30) return;
    const sorted = this.#late.toSorted((a, b) => a - b);
    this.ms = Math.max(80, Math.min(600, sorted[28] + 40));
  }
}

/** Collects samples to pieces of one length. */
class Pieces {
  #piece = new Float32Array(PIECE);
  #filled = 0;

  *add(samples) {
    for (let at = 0; at < samples.length; ) {
      const part = samples.subarray(at, at + PIECE - this.#filled);
      this.#piece.set(part, this.#filled);
      this.#filled += part.length;
      at += part.length;
      if (this.#filled < PIECE) continue;
      yield this.#piece;
      this.#piece = new Float32Array(PIECE);
      this.#filled = 0;
    }
  }
}

/**
 * The sound of one conversation. Callbacks:
 *   onPiece({sound, end, lost}): 200 ms of the microphone at 16 kHz; `end` is the frame of its end.
 *   onHeard(id, frame): a piece of the model's sound begins.
 *   onCut([{id, played}]): only so many frames of these pieces are heard.
 *   onUnderrun(ms), onInputLevel(level), onOutputLevel(level), onStall(isStalled).
 */
export class Sound {
  #calls;
  #context;
  #source = null;
  #capture = null;
  #playback = null;
  #input = null; // resampler of the microphone
  #pieces = new Pieces();
  #lost = 0;
  #output = null; // of the turn: {resampler, given, made}, the last two in samples
  #lags = new Map(); // id -> frames of a piece that belong to the one before
  #isMuted = false;
  #watch = 0;
  #isClosed = false;

  /** Call this in the handler of a click, before anything asynchronous: phones demand it. */
  constructor(calls) {
    this.#calls = calls;
    try {
      navigator.audioSession.type = "play-and-record"; // else iOS plays in the ear piece
    } catch {
      // Other systems have no audio session.
    }
    this.#context = new AudioContext({ latencyHint: "interactive" });
    this.#context.resume().catch(() => {});
  }

  get rate() {
    return this.#context.sampleRate;
  }

  /** The frame that the context renders now. */
  get frame() {
    return Math.round(this.#context.currentTime * this.rate);
  }

  /** How long a rendered sample takes to the ear, in ms; null if the browser does not know. */
  get outputMs() {
    return this.#context.outputLatency ? this.#context.outputLatency * 1000 : null;
  }

  /** Begin with the stream of a microphone. Throws SoundError. */
  async open(stream, sinkId = "") {
    await this.#running();
    if (sinkId && this.#context.setSinkId) await this.#context.setSinkId(sinkId);
    try {
      await this.#context.audioWorklet.addModule("/pages/talk/sound.worklet.js");
    } catch {
      throw new SoundError("The server cannot be reached."); // it has the module
    }
    if (this.#isClosed) return; // the person has left meanwhile
    this.#playback = new AudioWorkletNode(this.#context, "playback", {
      numberOfInputs: 0,
      outputChannelCount: [2],
    });
    this.#playback.port.onmessage = ({ data }) => this.#played(data);
    this.#playback.connect(this.#context.destination);
    this.#capture = new AudioWorkletNode(this.#context, "capture", { numberOfOutputs: 0 });
    this.#capture.port.onmessage = ({ data }) => this.#captured(data);
    this.#input = new Resampler(this.rate);
    this.record(stream);
    this.#context.onstatechange = () => {
      // `interrupted`, by a call on a phone, ends by itself.
      if (this.#context.state === "suspended") this.#context.resume().catch(() => {});
    };
    this.#watchClock();
  }

  async #running() {
    const { promise, resolve } = Promise.withResolvers();
    const timer = setTimeout(resolve, RESUME_MS);
    this.#context.resume().then(resolve, resolve);
    await promise;
    clearTimeout(timer);
    if (this.#context.state !== "running") throw new SoundError("The browser has no sound device.");
  }

  /** Use the stream of another microphone. */
  record(stream) {
    this.#source?.disconnect();
    this.#source = this.#context.createMediaStreamSource(stream);
    this.#source.connect(this.#capture);
  }

  /** Send zeros: the model needs units also from a silent person. */
  mute(isMuted) {
    this.#isMuted = isMuted;
  }

  #captured({ sound, end, lost }) {
    if (this.#isMuted) sound.fill(0);
    this.#calls.onInputLevel(peak(sound));
    this.#lost += lost;
    for (const piece of this.#pieces.add(this.#input.add(sound))) {
      this.#calls.onPiece({ sound: piece, end, lost: this.#lost / this.rate });
      this.#lost = 0;
    }
  }

  /** Play float32 samples at 24 kHz. The first ones of a turn wait for `delayMs`. */
  play(id, samples, delayMs) {
    this.#output ??= { resampler: new Resampler(OUTPUT_RATE, this.rate), given: 0, made: 0 };
    const turn = this.#output;
    const sound = turn.resampler.add(samples);
    // The resampler needs later samples, so each piece ends a bit before the sound that made it.
    this.#lags.set(id, (turn.given * this.rate) / OUTPUT_RATE - turn.made);
    if (this.#lags.size > MAX_LAGS) this.#lags.delete(this.#lags.keys().next().value);
    turn.given += samples.length;
    turn.made += sound.length;
    if (sound.length === 0) return;
    const delay = Math.round((delayMs / 1000) * this.rate);
    this.#playback.port.postMessage({ id, sound, delay });
  }

  /** A turn is complete: play it to its end. */
  end() {
    if (!this.#output) return;
    this.#playback.port.postMessage({ tail: this.#output.resampler.tail() });
    this.#output = null;
  }

  /** Be silent now. */
  flush() {
    this.#output = null;
    this.#playback?.port.postMessage({ isFlush: true });
  }

  #played(data) {
    if (data.cut) {
      this.#calls.onCut(
        data.cut.map(({ id, played }) => ({ id, played: Math.max(0, played - this.#lag(id)) })),
      );
    } else if (data.underrun !== undefined) this.#calls.onUnderrun((data.underrun / this.rate) * 1000);
    else if (data.level !== undefined) this.#calls.onOutputLevel(data.level);
    else this.#calls.onHeard(data.id, data.frame + this.#lag(data.id));
  }

  #lag(id) {
    return this.#lags.get(id) ?? 0;
  }

  // A context can stop without a change of its state.
  #watchClock() {
    let last = -1;
    this.#watch = setInterval(() => {
      this.#calls.onStall(this.#context.currentTime === last);
      last = this.#context.currentTime;
    }, STALL_MS);
  }

  /** Let the sound go. Nothing waits for the browser: one without a sound device may never answer. */
  close() {
    this.#isClosed = true;
    clearInterval(this.#watch);
    this.#source?.disconnect();
    if (this.#capture) this.#capture.port.onmessage = null;
    if (this.#playback) this.#playback.port.onmessage = null;
    this.#context.close().catch(() => {});
  }
}

export function peak(samples) {
  let highest = 0;
  for (const sample of samples) highest = Math.max(highest, Math.abs(sample));
  return highest;
}
