/** The state that the events of the stream tell. It knows no page, so it also runs in Node. */

const MAX_LOG = 200;
const MAX_SAMPLES = 300;
const MAX_LATE = 64;
const MAX_ENDED = 1000; // sessions that have ended and may continue at another worker

/**
 * @typedef {{slot: number, state: string, lease_id?: string, session_id?: string, kind?: string,
 *   is_paused?: boolean, cannot_move?: boolean}} Slot
 * @typedef {{worker_id: string, address: string, release: string, pool: string, labels: Record<string, string>,
 *   device: string, device_description: string, kinds: string[], slots: Slot[],
 *   attached_at: number, reported_at: number, is_draining: boolean, is_silent: boolean,
 *   is_unreachable: boolean, lost_at: number | null, lost_reason: string, unit_count: number,
 *   unit_ms: number | null, memory_used_bytes: number | null, memory_bytes: number | null}} Worker
 * @typedef {{lease_id: string, worker_id: string, slot: number, kind: string, session_id: string,
 *   tenant: string, is_claimed: boolean, granted_at: number, ends_at: number | null}} Lease
 * @typedef {{ticket_id: string, kind: string, pool: string, session_id: string, tenant: string,
 *   position: number, needs: Record<string, string>, queued_at: number,
 *   estimated_wait_s: number | null}} Ticket
 * @typedef {{at_s: number, unit_count: number, late_count: number, p50_ms: number | null,
 *   p95_ms: number | null, waiting?: number, slots?: number, leases?: number}} Sample
 * @typedef {{session_id: string, worker_id: string, sequence: number, at_s: number,
 *   taken_ms: number, stage: string, stage_ms: number}} LateUnit
 * @typedef {{session_id: string, at_s: number, from_worker_id: string, to_worker_id: string,
 *   cause: string, outcome: string, silent_ms: number}} Move
 * @typedef {{is_draining: boolean, unmovable: number,
 *   sessions: {dialect: string, state: string, count: number}[]}} EdgeFacts
 */

const TABLES = /** @type {const} */ ([
  ["workers", "worker_id"],
  ["leases", "lease_id"],
  ["tickets", "ticket_id"],
]);

export class FabricModel {
  constructor() {
    /** @type {Map<string, Worker>} */
    this.workers = new Map();
    /** @type {Map<string, Lease>} */
    this.leases = new Map();
    /** @type {Map<string, Ticket>} */
    this.tickets = new Map();
    /** @type {Sample[]} */
    this.samples = [];
    /** @type {LateUnit[]} */
    this.lateUnits = [];
    /** @type {Move[]} */
    this.moves = [];
    /** @type {EdgeFacts | null} */
    this.edge = null;
    this.isKnown = false; // whether the page has a state, which may be an old one
    this.isCurrent = false; // whether the edge knows the present state
    this.ticketLimit = 0;
    this.storeRefusal = "";
    /** @type {string[]} */
    this.cut = [];
    this.unavailable = "";
    this.now = 0; // the edge's Unix time of the last event
    /** @type {{atS: number, text: string}[]} */
    this.log = [];
    this.logCount = 0; // of all lines, also of those that are forgotten
    /** @type {Map<string, {leases: Set<string>, workerId: string}>} */
    this._sessions = new Map();
    /** @type {Map<string, string>} */
    this._workerStates = new Map();
  }

  /** @param {string} name @param {any} fields */
  take(name, fields) {
    this.now = fields.now;
    switch (name) {
      case "snapshot":
        this._takeSnapshot(fields);
        break;
      case "changes":
        this._takeRows(fields, true);
        break;
      case "figures":
        this.edge = fields.edge;
        this.samples = [...this.samples, fields.sample].slice(-MAX_SAMPLES);
        this._takePast(fields);
        break;
      case "unavailable":
        if (!this.unavailable) this._note(`No scheduler answers: ${fields.reason}`);
        this.unavailable = fields.reason;
        break;
    }
  }

  /** @param {any} fields */
  _takeSnapshot(fields) {
    // An edge that has not heard from a scheduler yet knows less than the page.
    this.isCurrent = fields.is_known;
    if (fields.is_known) this._takeFabric(fields);
    this.edge = fields.edge;
    this.samples = fields.samples;
    this.lateUnits = [];
    this.moves = [];
    this._takePast(fields);
  }

  /** @param {any} fields */
  _takeFabric(fields) {
    if (this.unavailable) this._note("A scheduler answers again.");
    this.unavailable = "";
    for (const [table, key] of TABLES) {
      const known = new Set(fields[table].map((/** @type {any} */ row) => row[key]));
      fields[`removed_${table}`] = [...this[table].keys()].filter((id) => !known.has(id));
    }
    this._takeRows(fields, this.isKnown);
    this.isKnown = true;
    this.ticketLimit = fields.ticket_limit;
    this.storeRefusal = fields.store_refusal;
    this.cut = fields.cut;
  }

  /** @param {any} fields */
  _takePast(fields) {
    this.lateUnits = [...this.lateUnits, ...fields.late_units].slice(-MAX_LATE);
    this.moves = [...this.moves, ...fields.moves].slice(-MAX_LATE);
  }

  /** @param {any} fields @param {boolean} isNews */
  _takeRows(fields, isNews) {
    for (const row of fields.workers ?? []) {
      this.workers.set(row.worker_id, row);
      this._noteWorker(row.worker_id, workerState(row), isNews);
    }
    for (const id of fields.removed_workers ?? []) {
      this.workers.delete(id);
      this._noteWorker(id, "gone", isNews);
    }
    // Begins come before ends: a session that moves holds two leases for a moment.
    for (const row of fields.leases ?? []) {
      const isNew = !this.leases.has(row.lease_id);
      this.leases.set(row.lease_id, row);
      if (isNew) this._noteBegin(row, isNews);
    }
    for (const id of fields.removed_leases ?? []) {
      const lease = this.leases.get(id);
      this.leases.delete(id);
      if (lease) this._noteEnd(lease, isNews);
    }
    for (const row of fields.tickets ?? []) this.tickets.set(row.ticket_id, row);
    for (const id of fields.removed_tickets ?? []) this.tickets.delete(id);
  }

  /** @param {string} id @param {string} state @param {boolean} isNews */
  _noteWorker(id, state, isNews) {
    const before = this._workerStates.get(id) ?? "gone";
    if (state === "gone") this._workerStates.delete(id);
    else this._workerStates.set(id, state);
    if (isNews && before !== state) {
      this._note(before === "gone" ? `Worker ${id} is attached.` : `Worker ${id} is ${state}.`);
    }
  }

  /** @param {Lease} lease @param {boolean} isNews */
  _noteBegin(lease, isNews) {
    const id = lease.session_id || lease.lease_id;
    const session = this._sessions.get(id);
    if (session && session.workerId !== lease.worker_id) {
      this._note(`Session ${id} moves from ${session.workerId} to ${placeOf(lease)}.`);
    } else if (!session && isNews) {
      this._note(`Session ${id} begins at ${placeOf(lease)}.`);
    }
    const leases = session?.leases ?? new Set();
    leases.add(lease.lease_id);
    this._sessions.delete(id); // the newest is the last one
    this._sessions.set(id, { leases, workerId: lease.worker_id });
    this._forgetEnded();
  }

  /** @param {Lease} lease @param {boolean} isNews */
  _noteEnd(lease, isNews) {
    const id = lease.session_id || lease.lease_id;
    const session = this._sessions.get(id);
    session?.leases.delete(lease.lease_id);
    if (isNews && !session?.leases.size) this._note(`Session ${id} ends at ${placeOf(lease)}.`);
  }

  _forgetEnded() {
    for (const [id, session] of this._sessions) {
      if (this._sessions.size <= this.leases.size + MAX_ENDED) return;
      if (!session.leases.size) this._sessions.delete(id);
    }
  }

  /** @param {string} text */
  _note(text) {
    this.logCount++;
    this.log.push({ atS: this.now, text });
    if (this.log.length > MAX_LOG) this.log.shift();
  }
}

/** @param {Lease} lease */
export function placeOf(lease) {
  return `${lease.worker_id}, slot ${lease.slot}`;
}

/**
 * Return the state of a worker in one word or two.
 * @param {Worker} worker
 */
export function workerState(worker) {
  if (worker.lost_at !== null) return "lost";
  if (worker.is_unreachable) return "unreachable";
  if (worker.is_silent) return "silent";
  if (worker.is_draining) return "draining";
  return "serving";
}

/**
 * Return the state of a slot in one word. A slot is granted while its session has not claimed it.
 * @param {Slot} slot
 * @param {ReadonlySet<number>} granted
 */
export function slotState(slot, granted) {
  if (slot.state === "occupied" && slot.is_paused) return "paused";
  if (slot.state === "occupied") return "held";
  if (["free", "withheld"].includes(slot.state) && granted.has(slot.slot)) return "granted";
  return slot.state;
}

/**
 * Say what a drain does, for the dialog that asks.
 * @param {Worker} worker
 * @param {boolean} isStop
 */
export function drainEffect(worker, isStop) {
  const held = worker.slots.filter((slot) => slot.state === "occupied");
  const fixed = held.filter((slot) => slot.cannot_move || slot.kind === "chat").length;
  const moving = held.length - fixed;
  const effects = ["It accepts no new sessions."];
  if (moving) effects.push(`${count(moving, "session moves", "sessions move")} when others have free slots.`);
  if (fixed) effects.push(`${count(fixed, "session", "sessions")} cannot move, and can run to the end.`);
  if (isStop) effects.push("Then its process ends. This cannot be taken back.");
  return effects.join(" ");
}

/** @param {number} number @param {string} one @param {string} many */
export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

/**
 * Return a duration in words that fit a table.
 * @param {number} seconds
 */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
