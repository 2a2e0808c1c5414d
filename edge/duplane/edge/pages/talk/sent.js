// Which sound was sent when, and which of it belongs to which unit. Pure.

const PIECE_MS = 200;
const SAMPLES_OF_MS = 16; // of the input, at 16 kHz

/** The pieces of 200 ms that were sent, and the sound that is in no unit. */
export class SentSound {
  unitMs;
  #ends = []; // the frames at which the pieces end
  #droppedUnits = 0;
  #losses = []; // {fromMs, ms}: sound that no server has got, by its place in all sound

  constructor(unitMs) {
    this.unitMs = unitMs;
  }

  /** Note a piece that ends at this frame. */
  add(end) {
    this.#ends.push(end);
  }

  /** Units of sound came before the next unit of the model, which never got them. */
  drop(unitCount) {
    this.#droppedUnits += unitCount;
  }

  /** Sound was lost with a connection. Return how many units it would have been, rounded up. */
  lose(fromSample, sampleCount) {
    const ms = sampleCount / SAMPLES_OF_MS;
    if (ms > 0) this.#losses.push({ fromMs: fromSample / SAMPLES_OF_MS, ms });
    return Math.ceil(ms / this.unitMs);
  }

  /** Return whether the piece after the next `count` pieces completes a unit. */
  completesUnit(count = 0) {
    const index = this.#ends.length + count;
    return this.#unitsIn(index + 1) > this.#unitsIn(index);
  }

  /** Return the end of the piece that completed a unit; undefined if it was not sent yet. */
  endOf(unit) {
    let endMs = (unit + 1 + this.#droppedUnits) * this.unitMs;
    for (const { fromMs, ms } of this.#losses) if (endMs > fromMs) endMs += ms;
    return this.#ends[Math.ceil(endMs / PIECE_MS) - 1];
  }

  // The whole units of sound that the server has got in so many pieces.
  #unitsIn(pieceCount) {
    let gotMs = pieceCount * PIECE_MS;
    for (const { fromMs, ms } of this.#losses) {
      gotMs -= Math.max(0, Math.min(ms, pieceCount * PIECE_MS - fromMs));
    }
    return Math.floor(gotMs / this.unitMs);
  }
}
