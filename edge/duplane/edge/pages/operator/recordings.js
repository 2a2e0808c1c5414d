/** The list of recordings, and a player that shows the units beside the sound. */

import { byId, make, makeButton, setText } from "./elements.js";
import { duration } from "./model.js";
import { Table } from "./tables.js";

const MAX_SOUND_BYTES = 256 * 1024 * 1024; // of a replay that the page keeps in memory
const MAX_ROWS = 5000;

/**
 * @typedef {{session_id: string, created_at: number, duration_s: number | null, mode: string,
 *   dialect: string | null, worker: string | null, close_reason: string | null,
 *   is_incomplete: boolean}} Meta
 * @typedef {{ts: number, dir: string, frame: any}} RecordedEvent
 * @typedef {{atS: number, text: string}} Line
 */

export class Recordings {
  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this._api = api;
    this._status = byId("recordings-status", HTMLElement);
    this._sound = byId("sound", HTMLAudioElement);
    this._units = byId("units", HTMLTableElement);
    /** @type {Table<Meta>} */
    this._table = new Table("recordings", ["Begun", "Session", "Duration", "Mode", "Dialect", "End", ""]);
    /** @type {{atS: number, row: HTMLTableRowElement}[]} */
    this._lines = [];
    this._opened = 0;
    byId("load-recordings", HTMLButtonElement).addEventListener("click", () => void this._load());
    this._sound.addEventListener("timeupdate", () => this._mark());
  }

  async _load() {
    setText(this._status, "The list is loading.");
    try {
      const { total, sessions } = await this._api.json("/api/sessions");
      this._table.render(
        sessions.map((/** @type {Meta} */ meta) => ({
          key: meta.session_id,
          cells: [
            new Date(meta.created_at * 1000).toLocaleString(),
            meta.session_id,
            meta.duration_s === null ? "runs" : duration(meta.duration_s),
            meta.mode,
            meta.dialect ?? "",
            `${meta.close_reason ?? ""}${meta.is_incomplete && meta.duration_s !== null ? " (incomplete)" : ""}`,
          ],
          action: { text: "Play", label: `Play recording ${meta.session_id}` },
          row: meta,
        })),
        "There is no recording.",
        total > sessions.length,
        (meta) => void this._open(meta),
      );
      setText(this._status, "");
    } catch (error) {
      setText(this._status, `The list was not loaded: ${messageOf(error)}.`);
    }
  }

  /** @param {Meta} meta */
  async _open(meta) {
    const opened = ++this._opened;
    setText(this._status, `Recording ${meta.session_id} is loading.`);
    const path = `/api/sessions/${encodeURIComponent(meta.session_id)}`;
    try {
      const { events } = await this._api.json(`${path}/recording`);
      if (opened !== this._opened) return; // another recording was chosen meanwhile
      this._showUnits(meta, unitLines(events, meta.created_at));
      const sound = await this._readSound(`${path}/assets/replay.wav`);
      if (opened !== this._opened) return;
      this._useSound(sound);
      const title = byId("player-title", HTMLElement);
      setText(title, `Recording ${meta.session_id}`);
      byId("player", HTMLElement).hidden = false;
      setText(this._status, sound ? "" : "This recording has no replay: it is too long, still runs, or its session had no sound.");
      title.tabIndex = -1;
      title.focus();
    } catch (error) {
      setText(this._status, `The recording was not loaded: ${messageOf(error)}.`);
    }
  }

  /** @param {string} path */
  async _readSound(path) {
    try {
      const answer = await this._api.ask(path);
      if (Number(answer.headers.get("Content-Length")) > MAX_SOUND_BYTES) {
        await answer.body?.cancel();
        return null;
      }
      return await answer.blob();
    } catch (error) {
      if (/** @type {{status?: number}} */ (error).status === 404) return null;
      throw error;
    }
  }

  /** @param {Blob | null} sound */
  _useSound(sound) {
    if (this._sound.src) URL.revokeObjectURL(this._sound.src);
    this._sound.hidden = sound === null;
    if (sound) this._sound.src = URL.createObjectURL(sound);
    else this._sound.removeAttribute("src");
  }

  /** @param {Meta} meta @param {readonly Line[]} lines */
  _showUnits(meta, lines) {
    this._lines = lines.slice(0, MAX_ROWS).map(({ atS, text }) => {
      const at = `${atS.toFixed(1)} s`;
      const jump = makeButton({ text: at, label: `Go to ${at}` }, () => {
        this._sound.currentTime = atS;
      });
      return { atS, row: make("tr", {}, make("td", {}, jump), make("td", { text })) };
    });
    const more = lines.length > MAX_ROWS ? `; the first ${MAX_ROWS} are shown` : "";
    const caption = make("caption", { text: `${lines.length} events of ${meta.session_id}${more}` });
    this._units.replaceChildren(caption, make("tbody", {}, ...this._lines.map(({ row }) => row)));
  }

  /** Mark the line that sounds now. */
  _mark() {
    const atS = this._sound.currentTime;
    let current = null;
    for (const line of this._lines) {
      if (line.atS > atS) break;
      current = line.row;
    }
    for (const { row } of this._lines) {
      if (row === current) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
    current?.scrollIntoView({ block: "nearest" });
  }
}

/**
 * Return the lines beside the sound: one for each unit in which the model speaks, for the settings,
 * for errors and for the end. Units in which it listens follow one another and share a line;
 * appended sound has none.
 * @param {readonly RecordedEvent[]} events
 * @param {number} beganS
 * @returns {Line[]}
 */
export function unitLines(events, beganS) {
  /** @type {Line[]} */
  const lines = [];
  let listened = 0;
  for (const { ts, dir, frame } of events) {
    const type = String(frame?.type ?? "");
    if (dir === "up" && (type.endsWith(".append") || type === "audio_chunk")) continue;
    const atS = Math.max(0, ts - beganS);
    if (dir === "down" && isListening(frame, type)) {
      listened++;
      const text = `model listens${listened > 1 ? ` (${listened} answers)` : ""}`;
      if (listened > 1) lines[lines.length - 1] = { atS: lines[lines.length - 1]?.atS ?? atS, text };
      else lines.push({ atS, text });
      continue;
    }
    listened = 0;
    lines.push({ atS, text: describe(frame, dir, type) });
  }
  return lines;
}

/** @param {any} frame @param {string} type */
function isListening(frame, type) {
  return type === "response.listen" || frame?.kind === "listen" || frame?.is_listen === true;
}

/** @param {any} frame @param {string} dir @param {string} type */
function describe(frame, dir, type) {
  const said = [frame?.text, frame?.delta, frame?.error?.message, frame?.reason].find(
    (each) => typeof each === "string" && each && !each.startsWith("@"),
  );
  const ms = frame?.metrics?.wall_clock_ms;
  const facts = [`${dir === "up" ? "client" : "model"}: ${type || "event"}`];
  if (said) facts.push(`“${said}”`);
  if (typeof frame?.chunk_index === "number") facts.push(`unit ${frame.chunk_index}`);
  if (typeof ms === "number" && ms > 0) facts.push(`${Math.round(ms)} ms`);
  if (frame?.metrics?.dropped_units > 0) facts.push(`${frame.metrics.dropped_units} units dropped`);
  return facts.join(" · ");
}

/** @param {unknown} error */
function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}
