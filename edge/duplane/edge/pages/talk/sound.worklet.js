// The two processors of the page's sound. Both run on the audio thread and count the same frames.

const BLOCK_S = 0.01; // of the microphone's sound in one message
const REBUFFER_S = 0.1; // of waiting after the sound of a turn was late
const FADE_S = 0.01; // of the end of sound that is interrupted
const LEVEL_S = 0.1; // between two levels of what is played

/** Sends the microphone's sound in blocks, with zeros for frames without sound. */
class Capture extends AudioWorkletProcessor {
  #block = new Float32Array(Math.round(BLOCK_S * sampleRate));
  #filled = 0;
  #lost = 0; // frames of the block that had no sound
  #next = currentFrame; // the first frame that is not in a block yet

  process([channels]) {
    while (this.#next < currentFrame) this.#add(0, 1);
    const length = channels[0]?.length ?? 0; // 0 while the microphone gives nothing
    for (let at = 0; at < length; at += 1) {
      let sum = 0;
      for (const channel of channels) sum += channel[at];
      this.#add(sum / channels.length, 0);
    }
    return true;
  }

  #add(sample, lost) {
    this.#block[this.#filled] = Math.max(-1, Math.min(1, sample)); // gain control exceeds 1
    this.#filled += 1;
    this.#next += 1;
    this.#lost += lost;
    if (this.#filled < this.#block.length) return;
    const message = { sound: this.#block, end: this.#next, lost: this.#lost };
    this.#block = new Float32Array(this.#block.length);
    this.port.postMessage(message, [message.sound.buffer]);
    this.#filled = this.#lost = 0;
  }
}

/**
 * Plays the sound of turns. The first piece of a turn waits for a delay, which hides that later
 * pieces come at uneven times. The page's own thread may stall, so all decisions are made here.
 */
class Playback extends AudioWorkletProcessor {
  #pieces = []; // {id, sound, from: the first frame that may play it, at: samples played}
  #isOpen = false; // whether more sound of the turn may come
  #emptySince = null; // the frame at which an open turn had nothing to play
  #peak = 0;
  #levelAt = 0;

  constructor() {
    super();
    this.port.onmessage = ({ data }) => {
      if (data.sound) this.#add(data);
      else if (data.tail) this.#end(data.tail);
      else this.#flush();
    };
  }

  #add({ id, sound, delay }) {
    let from = 0;
    if (!this.#isOpen) from = currentFrame + delay;
    else if (this.#emptySince !== null) {
      from = currentFrame + Math.round(REBUFFER_S * sampleRate);
      this.port.postMessage({ underrun: from - this.#emptySince });
    }
    this.#isOpen = true;
    this.#emptySince = null;
    this.#pieces.push({ id, sound, from, at: 0 });
  }

  // `tail` is the rest of the turn, which its last piece was too short for.
  #end(tail) {
    if (tail.length > 0) this.#pieces.push({ id: null, sound: tail, from: 0, at: 0 });
    this.#isOpen = false;
    this.#emptySince = null;
  }

  #flush() {
    const faded = new Float32Array(Math.round(FADE_S * sampleRate));
    const [first] = this.#pieces;
    const hasBegun = first && first.at > 0;
    let filled = 0;
    const cut = []; // {id, played: samples that are heard}
    for (const { id, sound, at } of this.#pieces) {
      const count = hasBegun ? Math.min(sound.length - at, faded.length - filled) : 0;
      faded.set(sound.subarray(at, at + count), filled);
      filled += count;
      if (id !== null) cut.push({ id, played: at + count });
    }
    for (let at = 0; at < filled; at += 1) faded[at] *= 1 - at / filled;
    this.#pieces = filled ? [{ id: null, sound: faded.subarray(0, filled), from: 0, at: 0 }] : [];
    this.#isOpen = false;
    this.#emptySince = null;
    this.port.postMessage({ cut });
  }

  process(_, [channels]) {
    const [output] = channels;
    let filled = 0;
    while (filled < output.length && this.#pieces.length > 0) {
      const [piece] = this.#pieces;
      const now = currentFrame + filled;
      if (piece.from > now) {
        filled += piece.from - now;
        continue;
      }
      if (piece.at === 0 && piece.id !== null) this.port.postMessage({ id: piece.id, frame: now });
      const part = piece.sound.subarray(piece.at, piece.at + output.length - filled);
      output.set(part, filled);
      filled += part.length;
      piece.at += part.length;
      if (piece.at === piece.sound.length) this.#pieces.shift();
    }
    if (this.#pieces.length === 0 && this.#isOpen) this.#emptySince ??= currentFrame + filled;
    for (const channel of channels.slice(1)) channel.set(output);
    this.#measure(output);
    return true;
  }

  #measure(output) {
    for (const sample of output) this.#peak = Math.max(this.#peak, Math.abs(sample));
    if (currentFrame < this.#levelAt) return;
    this.port.postMessage({ level: this.#peak });
    this.#peak = 0;
    this.#levelAt = currentFrame + LEVEL_S * sampleRate;
  }
}

registerProcessor("capture", Capture);
registerProcessor("playback", Playback);
