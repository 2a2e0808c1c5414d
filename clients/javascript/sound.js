// Sound of any rate as the appends of a session: 16 kHz, mono, int16 or float32. Pure.

const RATE = 16000;
const MIN_RATE = 8000;
const MAX_RATE = 192000;
const CROSSINGS = 24; // of the sinc with zero, on each side
const CUTOFF = 0.92; // of the lower Nyquist frequency
const BETA = 9; // of the Kaiser window: aliases are 90 dB below the sound or less

/** Return mono samples in float32 from int16 or float32. */
export function samplesOf(sound) {
  if (sound instanceof Int16Array) return Float32Array.from(sound, (level) => level / 32768);
  if (!(sound instanceof Float32Array)) {
    throw new TypeError("the sound must be an Int16Array or a Float32Array");
  }
  if (!sound.every(Number.isFinite)) throw new RangeError("samples must be finite");
  return sound;
}

/**
 * Converts a stream from one rate to another with a windowed sinc (Kaiser window). Its state lasts
 * from one call to the next, so that pieces of a stream join without a click.
 */
export class Resampler {
  #up;
  #down;
  #scale;
  #half;
  #filters = new Map(); // one for each position between two samples
  #waiting; // the sound that later outputs need
  #position = 0; // of the next output in `#waiting`, in 1/up of a sample

  constructor(rate, to = RATE) {
    if (!Number.isInteger(rate) || rate < MIN_RATE || rate > MAX_RATE) {
      throw new RangeError(`rate is ${rate}, must be from ${MIN_RATE} to ${MAX_RATE} Hz`);
    }
    this.rate = rate;
    const divisor = greatestCommonDivisor(rate, to);
    this.#up = to / divisor;
    this.#down = rate / divisor;
    this.#scale = Math.min(1, to / rate) * CUTOFF;
    this.#half = Math.ceil(CROSSINGS / this.#scale);
    this.#waiting = new Float32Array(this.#half - 1);
  }

  /** Return the next samples of the stream at the other rate. */
  add(samples) {
    if (this.#up === this.#down) return samples;
    const waiting = new Float32Array(this.#waiting.length + samples.length);
    waiting.set(this.#waiting);
    waiting.set(samples, this.#waiting.length);
    const width = 2 * this.#half;
    const made = [];
    let at = Math.floor(this.#position / this.#up);
    while (at + width <= waiting.length) {
      const taps = this.#taps(this.#position % this.#up);
      let sum = 0;
      for (let index = 0; index < width; index += 1) sum += taps[index] * waiting[at + index];
      made.push(sum);
      this.#position += this.#down;
      at = Math.floor(this.#position / this.#up);
    }
    at = Math.min(at, waiting.length);
    this.#position -= at * this.#up;
    this.#waiting = waiting.slice(at);
    return Float32Array.from(made);
  }

  /** Return the last samples, which wait for more sound. The stream is over. */
  tail() {
    return this.#up === this.#down ? new Float32Array(0) : this.add(new Float32Array(this.#half));
  }

  // The filter for an output `phase / up` after the input sample `half - 1`.
  #taps(phase) {
    let taps = this.#filters.get(phase);
    if (!taps) {
      const offset = phase / this.#up + this.#half - 1;
      taps = Float64Array.from({ length: 2 * this.#half }, (_, at) => this.#tap(at - offset));
      const total = taps.reduce((sum, tap) => sum + tap, 0);
      taps = taps.map((tap) => tap / total);
      this.#filters.set(phase, taps);
    }
    return taps;
  }

  #tap(distance) {
    const place = distance / this.#half;
    if (Math.abs(place) >= 1) return 0;
    const angle = Math.PI * this.#scale * distance;
    const sinc = angle ? Math.sin(angle) / angle : 1;
    return sinc * bessel(BETA * Math.sqrt(1 - place * place));
  }
}

function greatestCommonDivisor(a, b) {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}

// The modified Bessel function I0.
function bessel(value) {
  let total = 1;
  let term = 1;
  for (let number = 1; number < 40; number += 1) {
    term *= (value / (2 * number)) ** 2;
    total += term;
  }
  return total;
}

/**
 * Return base64 of samples. Int16 is half as long, and is a WAV file, as the protocols demand.
 * Samples outside of -1 to 1 are clipped in int16.
 */
export function encodedSound(samples, uplink) {
  if (uplink === "float32") {
    return toBase64(new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength));
  }
  const size = 2 * samples.length;
  const file = new DataView(new ArrayBuffer(44 + size));
  const words = [0x52494646, 0x57415645, 0x666d7420, 0x64617461]; // RIFF, WAVE, fmt, data
  [0, 8, 12, 36].forEach((at, index) => file.setUint32(at, words[index]));
  const numbers = { 4: 36 + size, 16: 16, 24: RATE, 28: 2 * RATE, 40: size };
  for (const at in numbers) file.setUint32(Number(at), numbers[at], true);
  const shorts = { 20: 1, 22: 1, 32: 2, 34: 16 }; // PCM, mono, bytes of a frame, bits
  for (const at in shorts) file.setUint16(Number(at), shorts[at], true);
  samples.forEach((sample, index) => {
    const level = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
    file.setInt16(44 + 2 * index, level, true);
  });
  return toBase64(new Uint8Array(file.buffer));
}

export function toBase64(bytes) {
  const parts = [];
  for (let at = 0; at < bytes.length; at += 8192) {
    parts.push(String.fromCharCode(...bytes.subarray(at, at + 8192)));
  }
  return btoa(parts.join(""));
}

export function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at += 1) bytes[at] = binary.charCodeAt(at);
  return bytes;
}
