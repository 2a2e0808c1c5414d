// The events of dialects A and B, and the outputs that they become. Pure.

import { fromBase64 } from "./sound.js";

export const INPUT_RATE = 16000;
export const OUTPUT_RATE = 24000;

export function queuePlace(event) {
  return {
    position: event.position,
    queueLength: event.queue_length,
    estimatedWaitS: event.estimated_wait_s || null,
    ticketId: event.ticket_id ?? "",
    reason: event.reason ?? "",
  };
}

/** Return the first event of a client. `voice` is base64 of a sound file, or null. A has no seed. */
export function settingsEvent(dialect, instructions, voice, seed, options, resuming = {}) {
  const hasOptions = Object.keys(options).length > 0;
  if (dialect === "A") {
    const session = { instructions, ...resuming };
    if (voice) Object.assign(session, { ref_audio: voice, tts_ref_audio: voice });
    if (hasOptions) session.voice_config = options;
    return { type: "session.update", session };
  }
  const payload = { system_prompt: instructions, ...resuming };
  if (seed !== null) payload.seed = seed;
  if (voice) payload.voice = { ref_audio_base64: voice, tts_ref_audio_base64: voice };
  if (hasOptions) payload.config = options;
  return { type: "session.init", payload };
}

/** Return an event with sound and pictures, which are base64. A has no `inputId`. */
export function appendEvent(dialect, audio, pictures, forceListen, inputId) {
  const content = {};
  if (audio) content.audio = audio;
  if (pictures.length > 0) content.video_frames = pictures;
  if (forceListen) content.force_listen = true;
  if (inputId !== null) content.input_id = inputId;
  if (dialect === "A") return { type: "input_audio_buffer.append", ...content };
  return { type: "input.append", input: content };
}

/** Makes outputs of the events of one session, and drops the speech that is interrupted. */
export class OutputReader {
  #index = -1;
  #hasNumbers = false; // the server numbers the units of B
  #lastKind = "";
  #isFlushing = false;

  /** Note what `session.created` says: servers of B that count tokens number the units. */
  begin(created) {
    this.#hasNumbers = created.usage !== undefined;
  }

  /** Drop the rest of the turn: speech, until the model listens or the turn ends. */
  flush() {
    this.#isFlushing = true;
  }

  /** Return the output in an event, or null. */
  read(event) {
    const output = this.#read(event);
    if (!output || !this.#isFlushing) return output;
    if (!output.speaks || output.endOfTurn) this.#isFlushing = false;
    return output.speaks ? null : output;
  }

  #read(event) {
    switch (event.type) {
      case "response.listen":
      case "response.output_audio.delta":
        this.#index += 1;
        return this.#output(event, event.type !== "response.listen", false, true);
      case "response.output.delta":
        return this.#part(event);
      default:
        return null;
    }
  }

  #part(event) {
    const before = this.#lastKind;
    this.#lastKind = event.kind;
    let isFirst = Number.isInteger(event.chunk_index);
    const speaks = event.kind !== "listen";
    const isEnd = !speaks && event.response_id != null;
    if (isFirst) {
      this.#hasNumbers = true;
      this.#index = event.chunk_index;
    } else if (!this.#hasNumbers) {
      // Each unit begins with text, or it is one listen.
      isFirst = !isEnd && !(event.kind === "audio" && before === "text");
      if (isFirst || this.#index < 0) this.#index += 1;
    } else if (!event.audio && !event.text && !isEnd) return null; // it completes no unit
    return this.#output(event, speaks, isEnd, isFirst);
  }

  #output(event, speaks, isEnd, isFirst) {
    const metrics = event.metrics ?? {};
    return {
      index: this.#index,
      speaks,
      text: event.text ?? "",
      audio: event.audio ? new Float32Array(fromBase64(event.audio).buffer) : new Float32Array(0),
      endOfTurn: isEnd || event.end_of_turn === true,
      interrupted: event.interrupted === true,
      droppedUnits: isFirst ? (metrics.dropped_units ?? 0) : 0,
      contextTokens: event.kv_cache_length ?? metrics.kv_cache_length ?? 0,
      listenProbability: metrics.listen_probability ?? null,
      turnId: event.response_id ?? null,
      inputId: event.input_id ?? null,
      unit: event.unit ?? null,
      part: event.part ?? null,
      replayed: event.replayed === true,
      metrics,
    };
  }
}
