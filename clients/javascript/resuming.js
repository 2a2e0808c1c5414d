// What a client keeps so that it can return to its session on another socket. Pure.

import { INPUT_RATE } from "./events.js";

export const ATTEMPTS = 5; // connections that are tried after a loss
export const REFUSALS = new Set(["resume_refused", "resume_expired", "resume_lost", "resume_stale"]);
const KEPT_SAMPLES = 10 * INPUT_RATE; // older input is lost if the server does not have it
// Sound beyond the units that the server has begun, while a client catches up after a return. A
// server drops the oldest of more than four units that wait.
const AHEAD_SAMPLES = 2 * INPUT_RATE;

/** Return the wait before an attempt, in seconds: 0.25 to 4, half of it random. */
export function returnWaitS(attempt) {
  return Math.min(4, 0.5 * 2 ** Math.min(attempt, 10)) * (0.5 + Math.random() / 2);
}

/** The input of the last 10 s: what is sent, and what waits for a socket. */
export class SentInput {
  isAsked = false; // the server is told the first sample, so none may be dropped
  #sent = [];
  #waiting = [];
  #end = 0;
  #dropped = 0; // samples that were never sent
  #limit = Infinity; // of the input to send, while the client catches up

  get firstSample() {
    return (this.#sent[0] ?? this.#waiting[0])?.first ?? this.#end;
  }

  add(samples, more) {
    this.#waiting.push({ ...more, first: this.#end, samples });
    this.#end += samples.length;
    if (this.isAsked) return;
    for (const kept of [this.#sent, this.#waiting]) {
      while (kept.length > 0 && endOf(kept[0]) <= this.#end - KEPT_SAMPLES) {
        const { samples: dropped } = kept.shift();
        if (kept === this.#waiting) this.#dropped += dropped.length;
      }
    }
  }

  /** Return the next input to send, or null if there is none that the server can take now. */
  take() {
    if (this.#waiting.length === 0) this.#limit = Infinity;
    if (this.#waiting.length === 0 || this.#waiting[0].first >= this.#limit) return null;
    this.#sent.push(this.#waiting.shift());
    return this.#sent.at(-1);
  }

  /** Let all input from a sample on wait again. Return how many samples before it are lost. */
  rewind(nextSample) {
    const lost = Math.max(this.#dropped, this.firstSample - nextSample);
    this.#dropped = 0;
    const kept = [...this.#sent, ...this.#waiting];
    this.#sent = kept.filter((one) => endOf(one) <= nextSample);
    this.#waiting = kept.slice(this.#sent.length);
    const [one] = this.#waiting;
    if (one && one.first < nextSample) {
      const at = nextSample - one.first;
      this.#sent.push({ ...one, samples: one.samples.subarray(0, at) });
      this.#waiting[0] = { ...one, first: nextSample, samples: one.samples.subarray(at) };
    }
    this.#limit = nextSample + AHEAD_SAMPLES;
    this.isAsked = false;
    return lost;
  }

  /** Read the `next_sample` of an event: perhaps there is more input to send now. */
  begun({ next_sample: sample }) {
    if (Number.isInteger(sample)) this.#limit = Math.max(this.#limit, sample + AHEAD_SAMPLES);
  }
}

function endOf(input) {
  return input.first + input.samples.length;
}

/** The token of a session, and the last event of a unit that the client has. */
export class Resumption {
  withinS = 0;
  #token = "";
  #queueToken = "";
  #unit = -1;
  #part = -1;

  get isPossible() {
    return this.#token !== "";
  }

  /** The fields of the settings that ask for a session to which the client can return. */
  get settings() {
    return { resumable: true, ...(this.#queueToken && { queue_token: this.#queueToken }) };
  }

  /** Note the tokens in an event. Return the event without them, for those who log it. */
  read({ queue_token: place, ...event }) {
    if (place) this.#queueToken = place;
    if (event.type === "session.created" && event.resume) {
      const { token, ...rest } = event.resume;
      this.#token = token;
      this.withinS = rest.within_s;
      return { ...event, resume: rest };
    }
    if (event.type === "session.resumed") this.withinS = event.within_s ?? this.withinS;
    return event;
  }

  /** Move the cursor to an event of a unit; false if the client has this event already. */
  isNew({ type, unit, part }) {
    if (type === "session.resumed" || !Number.isInteger(unit) || !Number.isInteger(part)) return true;
    if (unit < this.#unit || (unit === this.#unit && part <= this.#part)) return false;
    this.#unit = unit;
    this.#part = part;
    return true;
  }

  /** Return the first event of another socket. */
  request(firstSample) {
    const cursor = this.#unit < 0 ? {} : { unit: this.#unit, part: this.#part };
    return { type: "session.resume", token: this.#token, ...cursor, from_sample: firstSample };
  }
}
