// What the page shows and says. All changes of the document are made here and in settings.js.

import {
  BusyError,
  ConnectionLostError,
  InputError,
  RefusedError,
  ServerError,
} from "../client/errors.js";

const MAX_UNITS = 120; // squares in the strip; older ones are removed
const MAX_TURNS = 200; // in the text; older ones are removed

const find = (id) => document.getElementById(id);

/** The names of the states, with the text of the main button. */
const BUTTONS = {
  idle: "Start",
  asking: "Cancel",
  connecting: "Cancel",
  queued: "Leave the queue",
  opening: "Cancel",
  talking: "End",
  ended: "Start again",
};

export class View {
  start = find("start");
  interrupt = find("interrupt");
  mute = find("mute");
  preview = find("preview");
  #status = find("status");
  #units = find("units");
  #squares = new Map(); // index -> the square of a unit
  #turn = null; // the paragraph of the running turn
  #facts = new Map();

  /** Show a state and its sentence. */
  state(name, sentence) {
    const isTalking = name === "talking";
    document.body.dataset.state = name;
    this.start.textContent = BUTTONS[name];
    this.start.disabled = false;
    // A button that has the focus and disappears would leave the keyboard nowhere.
    const isLost = !isTalking && [this.interrupt, this.mute].includes(document.activeElement);
    this.interrupt.hidden = this.mute.hidden = !isTalking;
    find("levels").hidden = !isTalking;
    if (isLost) this.start.focus();
    this.say(sentence);
  }

  /** Show a sentence; screen readers say it. */
  say(sentence) {
    if (this.#status.textContent !== sentence) this.#status.textContent = sentence;
  }

  /** The page cannot work here: show why, and what helps. */
  refuse(sentence, advice) {
    this.say(sentence);
    this.advise(advice);
    this.start.disabled = true;
  }

  advise(text) {
    find("advice").textContent = text;
    find("advice").hidden = !text;
  }

  muted(isMuted) {
    this.mute.setAttribute("aria-pressed", String(isMuted));
    this.mute.textContent = isMuted ? "Unmute" : "Mute";
  }

  inputLevel(level) {
    find("input-level").value = level;
  }

  outputLevel(level) {
    find("output-level").value = level;
  }

  /** Remove what an earlier conversation has left. */
  clear() {
    this.#units.replaceChildren();
    this.#squares.clear();
    this.#facts.clear();
    find("text").replaceChildren();
    find("summary").textContent = "";
    find("after").hidden = true;
    this.#turn = null;
    this.muted(false);
    this.advise("");
  }

  /** Show a unit in the strip, also after its facts have changed. */
  unit({ index, speaks, latencyMs, isLate, heardMs, droppedUnits, hasMoved }) {
    const kinds = [speaks ? "speaks" : "listens"]; // classes of talk.css
    if (isLate) kinds.push("late");
    if (droppedUnits > 0) kinds.push("dropped");
    if (hasMoved) kinds.push("moved");
    const heard = heardMs === null ? "" : `, heard after ${milliseconds(heardMs)}`;
    let square = this.#squares.get(index);
    if (!square) {
      square = document.createElement("li");
      this.#squares.set(index, square);
      this.#units.append(square);
      if (this.#squares.size > MAX_UNITS) {
        const [oldest] = this.#squares.keys();
        this.#squares.get(oldest).remove();
        this.#squares.delete(oldest);
      }
    }
    square.className = kinds.join(" ");
    square.title = `Unit ${index}: ${kinds.join(", ")}, ${milliseconds(latencyMs)}${heard}`;
    this.#units.scrollLeft = this.#units.scrollWidth;
  }

  /** Show facts below the strip. */
  facts(facts) {
    for (const [name, value] of Object.entries(facts)) this.#facts.set(name, value);
    const parts = [...this.#facts].map(([name, value]) => `${name} ${value}`);
    find("summary").textContent = parts.join(" · ");
  }

  /** Add words to the text of the running turn. */
  words(text) {
    if (!this.#turn) {
      this.#turn = document.createElement("p");
      find("text").append(this.#turn);
      if (find("text").childElementCount > MAX_TURNS) find("text").firstElementChild.remove();
    }
    this.#turn.append(text);
    find("text").scrollTop = find("text").scrollHeight;
  }

  /** The turn is over. `isCut`: it was interrupted. */
  endTurn(isCut = false) {
    if (isCut && this.#turn) {
      this.#turn.classList.add("cut");
      this.#turn.append(" (interrupted)");
    }
    this.#turn = null;
  }

  /** Offer the replay and the files of a conversation. Returns a function that lets them go. */
  offer(replay, facts) {
    let addresses;
    try {
      addresses = [replay.toWav(), replay.toJson(facts)].map((blob) => URL.createObjectURL(blob));
    } catch (error) {
      // The memory of a phone may be too small. Another conversation is possible.
      this.advise(`The page cannot replay the conversation: ${error.message}`);
      return () => {};
    }
    find("replay").src = find("sound-file").href = addresses[0];
    find("unit-file").href = addresses[1];
    find("recorded").hidden = !facts.recording;
    find("recorded").textContent = `The server has recorded this conversation as ${facts.recording}.`;
    find("after").hidden = false;
    return () => addresses.forEach((address) => URL.revokeObjectURL(address));
  }
}

/** What the page says when a conversation ended in order, by the server's reason. */
export const ENDS = {
  user_stop: "The conversation is over.",
  stopped: "The conversation is over.",
  timeout: "The time of this conversation is used up.",
  context_full: "The model's memory of this conversation is full.",
  replaced: "Another connection has taken this conversation over.",
};

const LOST = "The connection to the server is lost, and the conversation with it.";
/** What the page says when it does not get its conversation back, by the server's code. */
const NOT_RESUMED = {
  resume_lost: "The connection was lost, and the server does not have the conversation any more.",
  resume_expired: "The connection was lost for too long: the server has ended the conversation.",
  resume_refused: "The connection was lost, and the server refuses to continue the conversation.",
  resume_stale: "The connection was lost, and the server lacks the last part of the conversation.",
};

/** Return what the page says about an error. `state` is where it happened. */
export function sentenceOf(error, state) {
  if (error instanceof BusyError) return "The server has no place free now: try again later.";
  if (error instanceof InputError) return `The server refuses the settings: ${error.detail}`;
  if (error instanceof RefusedError) return `The server refuses this conversation: ${error.detail}`;
  if (error instanceof ConnectionLostError) {
    return state === "talking"
      ? (NOT_RESUMED[error.code] ?? LOST)
      : "The server cannot be reached, or it refuses this page or its key.";
  }
  if (error instanceof ServerError) {
    return error.code === "server_shutdown" || error.closeCode === 1001
      ? "The server shuts down."
      : "The model has failed, and the conversation is lost.";
  }
  return error.message;
}

export function milliseconds(value) {
  return value === null ? "–" : `${Math.round(value)} ms`;
}

export function duration(seconds) {
  const whole = Math.ceil(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} min`;
}
