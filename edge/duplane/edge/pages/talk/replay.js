// What was said in a conversation, as a sound file and as a list of units, made in the page.

import { Resampler } from "../client/sound.js";

const RATE = 24000;
const INPUT_RATE = 16000;
const MAX_S = 1800; // of sound that is kept; later sound is not

/** Collects the sound of both sides by the frames of one clock of `rate` Hz. */
export class Replay {
  units = []; // what `toJson` shows
  #rate;
  #begin = null; // the frame of the first sample
  #spoken = []; // pieces of the person, int16 at 16 kHz, without gaps
  #spokenCount = 0;
  #answers = new Map(); // id -> {sound: int16 at 24 kHz, frame: null until it is heard}

  constructor(rate) {
    this.#rate = rate;
  }

  get isEmpty() {
    return this.#spoken.length === 0;
  }

  /** Add 200 ms of the person, which end at `end`. */
  addSpoken(samples, end) {
    this.#begin ??= end - Math.round((samples.length * this.#rate) / INPUT_RATE);
    if (this.#spokenCount >= MAX_S * INPUT_RATE) return;
    this.#spoken.push(shorts(samples));
    this.#spokenCount += samples.length;
  }

  addAnswer(id, samples) {
    if (this.#spokenCount < MAX_S * INPUT_RATE) {
      this.#answers.set(id, { sound: shorts(samples), frame: null });
    }
  }

  /** An answer is heard from `frame` on. */
  heard(id, frame) {
    const answer = this.#answers.get(id);
    if (answer) answer.frame = frame;
  }

  /** Only `played` samples of an answer are heard. They count in the rate of the clock. */
  cut(id, played) {
    const answer = this.#answers.get(id);
    if (answer) answer.sound = answer.sound.subarray(0, Math.round((played * RATE) / this.#rate));
  }

  /** Return a WAV file: the person on the left, the model on the right. */
  toWav() {
    const resampler = new Resampler(INPUT_RATE, RATE);
    const left = this.#spoken.map((piece) => resampler.add(floats(piece)));
    left.push(resampler.tail());
    const placed = [...this.#answers.values()]
      .filter(({ frame }) => frame !== null)
      .map(({ sound, frame }) => {
        return { sound, at: Math.round(((frame - this.#begin) * RATE) / this.#rate) };
      });
    const ends = placed.map(({ sound, at }) => at + sound.length);
    const length = Math.max(0, sum(left), ...ends);
    const file = wavFile(length);
    let at = 0;
    for (const piece of left) {
      file.samples.set(interleaved(shorts(piece)), 2 * at);
      at += piece.length;
    }
    for (const { sound, at: begin } of placed) {
      for (let index = 0; index < sound.length; index += 1) {
        if (begin + index >= 0) file.samples[2 * (begin + index) + 1] = sound[index];
      }
    }
    return new Blob([file.bytes], { type: "audio/wav" });
  }

  toJson(facts) {
    const text = JSON.stringify({ ...facts, units: this.units }, null, 1);
    return new Blob([text], { type: "application/json" });
  }
}

function interleaved(sound) {
  const both = new Int16Array(2 * sound.length);
  for (let index = 0; index < sound.length; index += 1) both[2 * index] = sound[index];
  return both;
}

function sum(pieces) {
  return pieces.reduce((total, piece) => total + piece.length, 0);
}

function shorts(samples) {
  return Int16Array.from(samples, (sample) => {
    return Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
  });
}

function floats(samples) {
  return Float32Array.from(samples, (sample) => sample / 32768);
}

// A WAV file of int16 in two channels; `samples` is the part for the sound. All browsers run on
// machines that store numbers as WAV does.
function wavFile(length) {
  const size = 4 * length;
  const bytes = new ArrayBuffer(44 + size);
  const view = new DataView(bytes);
  const words = { 0: "RIFF", 8: "WAVE", 12: "fmt ", 36: "data" };
  for (const at in words) {
    [...words[at]].forEach((letter, index) => {
      view.setUint8(Number(at) + index, letter.charCodeAt(0));
    });
  }
  const numbers = { 4: 36 + size, 16: 16, 24: RATE, 28: 4 * RATE, 40: size };
  for (const at in numbers) view.setUint32(Number(at), numbers[at], true);
  const pairs = { 20: 1, 22: 2, 32: 4, 34: 16 }; // PCM, channels, bytes of a frame, bits
  for (const at in pairs) view.setUint16(Number(at), pairs[at], true);
  return { bytes, samples: new Int16Array(bytes, 44) };
}
