// The talk page: its states, and one conversation at a time.

import { DuplexSession } from "../client/session.js";
import { Camera, WakeLock, openMicrophone, stop } from "./devices.js";
import { Replay } from "./replay.js";
import { SentSound } from "./sent.js";
import { KeyError, Settings } from "./settings.js";
import { Delay, Sound } from "./sound.js";
import { ENDS, View, duration, milliseconds, sentenceOf } from "./view.js";

const UNIT_MS = 1000; // unless the server says another duration
const SILENT_S = 0.1; // of 200 ms without any sound of the microphone
const MISSED_S = 3; // after a longer time without a connection, what was missed is not played

const SPEAK = "Speak now.";
const RECORDED =
  "With this key, the server records each conversation: agree to it in the page, or do not start.";
const MOVING = "The conversation moves to another worker.";
const AWAY = "The connection to the server is lost: the page connects again.";

const view = new View();
const settings = new Settings();
let talk = null;
let forget = () => {};

/** One conversation, from the click on Start to its end. */
class Talk {
  #leaving = new AbortController();
  #sound;
  #delay = new Delay(settings.firstDelayMs, settings.delayMs);
  #camera = new Camera(view.preview);
  #lock = new WakeLock();
  #microphone = null;
  #session = null;
  #replay;
  #state = "idle";
  #begunAt = 0;
  #ticking = 0;
  #picture = null; // for the piece that completes the next unit
  #sent = new SentSound(UNIT_MS);
  #droppedUnits = 0;
  #lostUnits = 0; // of the dropped ones, those that no unit in the strip shows yet
  #back = { gapS: 0, nextSample: 0, frame: 0 }; // the newest return after a loss
  #underruns = 0;
  #units = new Map(); // index -> {unit: what replay.units has, sent: the frame of its last sound}
  #serverMs = null;
  #turnMs = null; // how long the first unit of the running turn took
  #reason = "";
  #isMuted = false;
  #isOver = false;
  #warnings = new Set(); // sentences about what goes wrong now

  // The sound begins here, in the handler of the click.
  constructor() {
    this.#sound = new Sound({
      onPiece: (piece) => this.#send(piece),
      onHeard: (id, frame) => this.#heard(id, frame),
      onCut: (event) => this.#cut(event),
      onUnderrun: () => this.#underrun(),
      onInputLevel: (level) => view.inputLevel(level),
      onOutputLevel: (level) => view.outputLevel(level),
      onStall: (isStalled) => this.#warn("The browser has stopped the sound.", isStalled),
    });
    this.#replay = new Replay(this.#sound.rate);
  }

  /** Whether the conversation has begun, or whether it was refused before. */
  get hasBegun() {
    return this.#begunAt > 0;
  }

  /** Hold the conversation. Returns the sentence that says how it ended. */
  async run() {
    try {
      await this.#begin();
      for await (const output of this.#session) this.#take(output);
      const { reason } = this.#session.end;
      return this.#reason || (ENDS[reason] ?? `The conversation is over (${reason}).`);
    } catch (error) {
      return this.#reason || sentenceOf(error, this.#state); // a reason: the person has left
    } finally {
      await this.#finish();
    }
  }

  async #begin() {
    this.#show("asking", "The browser asks whether it may use the microphone.");
    this.#microphone = await this.#openMicrophone();
    if (settings.hasCamera) await this.#unlessLeft(this.#camera.open(settings.camera));
    await settings.listDevices();
    await this.#unlessLeft(this.#sound.open(this.#microphone, settings.speaker));
    const options = await this.#unlessLeft(settings.session());
    this.#show("connecting", "Connecting.");
    this.#session = new DuplexSession(settings.url, {
      ...options,
      attempts: 1,
      resumable: true,
      onLost: () => this.#warn(AWAY, true),
      onReturn: (back) => this.#returned(back),
      onQueue: (place) => this.#queued(place),
      onEvent: (event) => this.#event(event),
      onError: (error) => view.say(`The server refuses an input: ${error.detail}`),
    });
    await this.#session.connect({ signal: this.#leaving.signal });
    this.#lock.hold();
    this.#ticking = setInterval(() => this.#tick(), 1000);
    this.#tick();
    this.#show("talking", SPEAK);
  }

  async #openMicrophone() {
    const asked = openMicrophone(settings.microphone);
    // The person may answer the browser's question after the click on Cancel.
    asked.then((stream) => this.#isOver && stop(stream)).catch(() => {});
    const stream = await this.#unlessLeft(asked);
    for (const track of stream.getTracks()) {
      track.onended = () => this.leave("The microphone is gone: connect it, then start again.");
    }
    return stream;
  }

  /** Use the microphone that the settings name now. */
  async changeMicrophone() {
    if (this.#state !== "talking") return;
    try {
      const stream = await this.#openMicrophone();
      if (this.#isOver) return;
      stop(this.#microphone);
      this.#microphone = stream;
      this.#sound.record(stream);
    } catch (error) {
      view.say(error.message);
    }
  }

  // The person may leave before or while the promise is awaited.
  async #unlessLeft(promise) {
    const { signal } = this.#leaving;
    const left = new Promise((_, reject) => {
      signal.addEventListener("abort", () => reject(signal.reason));
      if (signal.aborted) reject(signal.reason);
    });
    return Promise.race([promise, left]);
  }

  #show(state, sentence) {
    this.#state = state;
    view.state(state, sentence);
  }

  // --- the queue ---

  #queued({ position, queueLength, estimatedWaitS }) {
    const wait = estimatedWaitS ? `, about ${duration(estimatedWaitS)}` : "";
    this.#show("queued", `You wait for a free place: number ${position} of ${queueLength}${wait}.`);
  }

  #event(event) {
    if (event.type === "session.queue_done" && !this.hasBegun) {
      this.#begunAt = performance.now();
      this.#show("opening", "The model prepares itself.");
    }
    if (event.type === "session.moving") this.#warn(MOVING, true);
    // A key can demand recording, whatever the person has chosen. No sound is sent yet.
    if (event.recording && !settings.hasConsent) this.leave(RECORDED);
    else if (event.recording) view.advise("The server records this conversation.");
    if (event.unit_s) this.#sent.unitMs = event.unit_s * 1000;
    if (event.type === "session.resumed") this.#back.nextSample = event.next_sample;
    const { metrics, cost_all_ms: cost } = event;
    this.#serverMs = metrics?.wall_clock_ms ?? cost ?? null;
  }

  // --- what the person does ---

  #send({ sound, end, lost }) {
    if (this.#state !== "talking") return;
    this.#warn("No sound comes from the microphone.", lost > SILENT_S);
    const pictures = this.#pictures();
    if (!this.#session.send(sound, { pictures })) {
      const count = this.#session.droppedSends;
      if (count > 0) view.facts({ "not sent": `${count} × 200 ms: the network is slow` });
      return;
    }
    this.#sent.add(end);
    this.#replay.addSpoken(sound, end);
  }

  // The picture of a unit goes with the piece that completes it. It is made one piece earlier.
  #pictures() {
    if (!settings.hasCamera) return [];
    if (this.#sent.completesUnit(1)) {
      this.#camera.picture().then((picture) => {
        this.#picture = picture;
      });
    }
    if (!this.#sent.completesUnit() || !this.#picture) return [];
    const pictures = [this.#picture];
    this.#picture = null;
    return pictures;
  }

  interrupt() {
    if (this.#state !== "talking") return;
    this.#session.interrupt();
    this.#flush();
  }

  mute() {
    this.#isMuted = !this.#isMuted;
    this.#sound.mute(this.#isMuted);
    view.muted(this.#isMuted);
  }

  /** End the conversation, or leave the queue. */
  leave(reason = "") {
    this.#reason ||= reason || (this.#state === "queued" ? "You have left the queue." : ENDS.user_stop);
    this.#state = "ending";
    if (this.#session) this.#session.close();
    this.#leaving.abort();
  }

  /** The page goes away. */
  abandon() {
    this.#session?.close();
  }

  // --- what the model does ---

  #returned({ gapS, lostSamples }) {
    const { nextSample } = this.#back;
    this.#back = { gapS, nextSample, frame: this.#sound.frame };
    this.#lostUnits += this.#sent.lose(nextSample - lostSamples, lostSamples);
    this.#warn(AWAY, false);
  }

  #take(output) {
    if (!this.#units.has(output.index)) this.#addUnit(output);
    if (output.text) view.words(output.text);
    if (output.replayed && this.#back.gapS >= MISSED_S) this.#sound.end(); // else the page is behind
    else if (output.audio.length > 0) {
      this.#replay.addAnswer(output.index, output.audio);
      this.#sound.play(output.index, output.audio, this.#delay.ms);
    }
    if (output.interrupted) this.#flush();
    else if (output.endOfTurn) this.#endTurn();
    if (output.contextTokens) view.facts({ "context tokens": output.contextTokens });
  }

  #addUnit({ index, speaks, replayed, droppedUnits: dropped }) {
    this.#sent.drop(dropped);
    const lost = replayed ? 0 : this.#lostUnits;
    this.#lostUnits -= lost;
    const droppedUnits = dropped + lost;
    this.#droppedUnits += droppedUnits;
    const sent = this.#sent.endOf(index);
    const latencyMs = sent === undefined ? null : this.#ms(this.#sound.frame - sent);
    const unit = {
      index,
      speaks,
      latencyMs,
      isLate: latencyMs > this.#sent.unitMs,
      serverMs: this.#serverMs,
      heardMs: null,
      droppedUnits,
      hasMoved: this.#warnings.has(MOVING),
    };
    this.#warn(MOVING, false);
    this.#units.set(index, { unit, sent });
    this.#replay.units.push(unit);
    // The time without a connection says nothing about how evenly units come.
    if (speaks && sent > this.#back.frame) {
      if (this.#turnMs === null) this.#turnMs = latencyMs;
      else this.#delay.add(latencyMs, this.#turnMs);
    }
    view.unit(unit);
    view.facts({
      units: index + 1,
      "answer after": milliseconds(latencyMs),
      server: milliseconds(this.#serverMs),
      ...(this.#droppedUnits > 0 && { "dropped units": this.#droppedUnits }),
    });
  }

  #heard(id, frame) {
    this.#replay.heard(id, frame);
    const { unit, sent } = this.#units.get(id) ?? {};
    if (sent === undefined) return;
    unit.heardMs = this.#ms(frame - sent) + (this.#sound.outputMs ?? 0);
    view.unit(unit);
    view.facts({ "heard after": milliseconds(unit.heardMs) });
  }

  #endTurn() {
    this.#sound.end();
    view.endTurn();
    this.#turnMs = null;
    this.#delay.update();
  }

  #flush() {
    this.#sound.flush();
    view.endTurn(true);
    this.#turnMs = null;
  }

  #cut(pieces) {
    for (const { id, played } of pieces) this.#replay.cut(id, played);
  }

  #underrun() {
    this.#underruns += 1;
    view.facts({ "gaps in the sound": this.#underruns });
  }

  // Show the newest warning that holds; without one, that the person may speak.
  #warn(sentence, holds) {
    if (this.#warnings.has(sentence) === holds) return;
    if (holds) this.#warnings.add(sentence);
    else this.#warnings.delete(sentence);
    if (this.#state === "talking") view.say([...this.#warnings].at(-1) ?? SPEAK);
  }

  #tick() {
    const limitS = settings.durationS;
    if (limitS === null) return;
    const leftS = limitS - (performance.now() - this.#begunAt) / 1000;
    view.facts({ "time left": duration(Math.max(0, leftS)) });
  }

  #ms(frames) {
    return (frames / this.#sound.rate) * 1000;
  }

  async #finish() {
    this.#isOver = true;
    clearInterval(this.#ticking);
    this.#lock.release();
    this.#camera.close();
    stop(this.#microphone);
    await this.#session?.close();
    this.#sound.close();
    if (this.#replay.isEmpty) return;
    const recording = this.#session.created?.recording_session_id ?? null;
    const facts = { session: this.#session.created?.session_id ?? null, recording };
    forget = view.offer(this.#replay, facts);
  }
}

// --- the page ---

async function start() {
  if (!settings.isLoaded) {
    await load();
    return;
  }
  const refusal = settings.refusal;
  if (refusal) {
    view.say(refusal);
    return;
  }
  forget();
  view.clear();
  talk = new Talk();
  const sentence = await talk.run();
  const { hasBegun } = talk;
  talk = null;
  view.state("ended", sentence);
  if (hasBegun) return;
  // A refused upgrade does not say why: maybe the key has ended.
  await settings.load().catch((error) => {
    if (error instanceof KeyError && !talk) askForKey(error);
  });
}

function askForKey(error) {
  view.refuse(error.message, "");
  settings.askForKey(load);
}

async function load() {
  if (!window.isSecureContext) {
    const advice =
      "The browser gives a page the microphone only at https:// addresses and at localhost. Open the" +
      " page on the server's own machine, tunnel its port (ssh -L 8006:localhost:8006 HOST), or start" +
      " the server with --tls-self-signed, and with --api-keys or --auth none.";
    view.refuse("This address is not secure, so the page gets no microphone.", advice);
    return;
  }
  try {
    await settings.load();
    await settings.listDevices();
    view.state("idle", "Press Start and speak.");
  } catch (error) {
    if (error instanceof KeyError) askForKey(error);
    else view.state("idle", `${error.message} Start tries again.`);
  }
}

view.start.addEventListener("click", () => (talk ? talk.leave() : start()));
view.interrupt.addEventListener("click", () => talk?.interrupt());
view.mute.addEventListener("click", () => talk?.mute());
settings.onMicrophone = () => talk?.changeMicrophone();
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && talk) {
    event.preventDefault();
    talk.interrupt();
  } else if (event.key === "Enter" && !talk && document.activeElement === document.body) {
    view.start.click();
  }
});
window.addEventListener("pagehide", () => talk?.abandon());
load();
