/** The lists of the page: workers with their slots, sessions, the queue, late units, the log. */

import { byId, make, makeButton, reconcile, setDisabled, setText } from "./elements.js";
import { count, duration, placeOf, slotState, workerState } from "./model.js";

const MAX_ROWS = 500; // of one table; a caption says how many there are

/** What made a unit late, in words. Other stages are named as the worker names them. */
const STAGES = /** @type {Record<string, string>} */ ({
  edge: "wait in the edge",
  move: "move to another worker",
  rest: "network or a busy machine",
  inbox: "wait for earlier units",
  device: "wait for the device",
  prepare: "check of the unit",
});

/**
 * @typedef {{
 *   drain: (worker: import("./model.js").Worker, isStop: boolean) => void,
 *   undrain: (worker: import("./model.js").Worker) => void,
 *   endSession: (lease: import("./model.js").Lease) => void,
 *   cancelTicket: (ticket: import("./model.js").Ticket) => void,
 * }} Actions
 * @typedef {import("./model.js").FabricModel} FabricModel
 */

/** Renders a model. `render` may be called as often as the model changes. */
export class Tables {
  /** @param {FabricModel} model @param {Actions} actions */
  constructor(model, actions) {
    this._model = model;
    this._actions = actions;
    this._workers = byId("workers", HTMLUListElement);
    this._sessions = new Table("sessions", ["Session", "Kind", "Tenant", "Place", "State", "Since", "Ends in about", ""]);
    this._queue = new Table("queue", ["Place", "Session", "Kind", "Tenant", "Needs", "Waits for", "Wait of about", ""]);
    this._late = new Table("late", ["When", "Session", "What", "Where"]);
    this._log = byId("log", HTMLOListElement);
    this._shownLines = 0;
  }

  /** @param {number} now Unix time of the edge */
  render(now) {
    this._renderWorkers(now);
    this._renderSessions(now);
    this._renderQueue(now);
    this._renderLate(now);
    this._renderLog();
  }

  /** @param {number} now */
  _renderWorkers(now) {
    const { workers, leases } = this._model;
    byId("no-workers", HTMLElement).hidden = workers.size > 0 || !this._model.isKnown;
    /** @type {Map<string, Set<number>>} */
    const granted = new Map();
    for (const lease of leases.values()) {
      const slots = granted.get(lease.worker_id) ?? new Set();
      granted.set(lease.worker_id, slots.add(lease.slot));
    }
    const sorted = [...workers].sort(([one], [other]) => (one < other ? -1 : 1));
    reconcile(
      this._workers,
      sorted,
      (worker) => this._workerItem(worker.worker_id),
      (item, worker) => updateWorker(item, worker, granted.get(worker.worker_id) ?? new Set(), now),
    );
  }

  /** @param {string} id */
  _workerItem(id) {
    /** @param {string} name @param {(worker: import("./model.js").Worker) => void} act */
    const button = (name, act) =>
      makeButton({ text: name, className: name.toLowerCase(), label: `${name} worker ${id}` }, () => {
        const worker = this._model.workers.get(id);
        if (worker) act(worker);
      });
    return make(
      "li",
      { className: "worker" },
      make("h3", {}, make("span", { text: id }), make("span", { className: "state" })),
      make("p", { className: "facts" }),
      make("ol", { className: "slots", label: `Slots of ${id}` }),
      make(
        "p",
        { className: "row" },
        button("Drain", (worker) => this._actions.drain(worker, false)),
        button("Undrain", (worker) => this._actions.undrain(worker)),
        button("Stop", (worker) => this._actions.drain(worker, true)),
      ),
    );
  }

  /** @param {number} now */
  _renderSessions(now) {
    const leases = [...this._model.leases.values()].sort((one, other) => one.granted_at - other.granted_at);
    this._sessions.render(
      leases.slice(0, MAX_ROWS).map((lease) => ({
        key: lease.lease_id,
        cells: [
          lease.session_id || "without a name",
          lease.kind,
          lease.tenant,
          placeOf(lease),
          this._leaseState(lease),
          duration(now - lease.granted_at),
          lease.ends_at === null ? "" : duration(lease.ends_at - now),
        ],
        action: lease.session_id ? { text: "End", label: `End session ${lease.session_id}` } : null,
        row: lease,
      })),
      "No session runs.",
      this._model.cut.includes("leases"),
      this._actions.endSession,
      leases.length,
    );
  }

  /** @param {import("./model.js").Lease} lease */
  _leaseState(lease) {
    if (!lease.is_claimed) return "granted";
    const slot = this._model.workers.get(lease.worker_id)?.slots.find((one) => one.lease_id === lease.lease_id);
    if (slot?.is_paused) return "paused";
    return slot?.cannot_move ? "held, cannot move" : "held";
  }

  /** @param {number} now */
  _renderQueue(now) {
    const tickets = [...this._model.tickets.values()].sort(
      (one, other) => one.pool.localeCompare(other.pool) || one.position - other.position,
    );
    this._queue.render(
      tickets.slice(0, MAX_ROWS).map((ticket) => ({
        key: ticket.ticket_id,
        cells: [
          `${ticket.position}${ticket.pool ? ` in ${ticket.pool}` : ""}`,
          ticket.session_id || "without a name",
          ticket.kind,
          ticket.tenant,
          Object.entries(ticket.needs).map(([name, value]) => `${name}=${value}`).join(", "),
          duration(now - ticket.queued_at),
          ticket.estimated_wait_s === null ? "no slot serves it" : duration(ticket.estimated_wait_s),
        ],
        action: { text: "Remove", label: `Remove ticket ${ticket.ticket_id} from the queue` },
        row: ticket,
      })),
      "Nobody waits.",
      this._model.cut.includes("tickets"),
      this._actions.cancelTicket,
      tickets.length,
    );
  }

  /** @param {number} now */
  _renderLate(now) {
    const late = this._model.lateUnits.map((unit) => ({
      atS: unit.at_s,
      key: `unit ${unit.session_id} ${unit.sequence} ${unit.at_s}`,
      cells: [
        unit.session_id,
        `unit ${unit.sequence} took ${Math.round(unit.taken_ms)} ms, ${Math.round(unit.stage_ms)} ms of it: ` +
          (STAGES[unit.stage] ?? unit.stage),
        unit.worker_id,
      ],
    }));
    const moves = this._model.moves.map((move) => ({
      atS: move.at_s,
      key: `move ${move.session_id} ${move.at_s}`,
      cells: [
        move.session_id,
        `move (${move.cause}): ${move.outcome}, silent for ${Math.round(move.silent_ms)} ms`,
        move.to_worker_id ? `${move.from_worker_id} to ${move.to_worker_id}` : move.from_worker_id,
      ],
    }));
    const all = [...late, ...moves].sort((one, other) => other.atS - one.atS);
    this._late.render(
      all.map(({ key, cells, atS }) => ({
        key,
        cells: [`${duration(now - atS)} ago`, ...cells],
        action: null,
        row: null,
      })),
      "No unit was late and no session has moved.",
      false,
      () => {},
    );
  }

  _renderLog() {
    // New lines come first; lines that stand stay, so that only new ones are read aloud.
    for (; this._shownLines < this._model.logCount; this._shownLines++) {
      const line = this._model.log.at(this._shownLines - this._model.logCount);
      if (line) this._log.prepend(make("li", { text: `${clockTime(line.atS)} ${line.text}` }));
    }
    while (this._log.children.length > this._model.log.length) this._log.lastElementChild?.remove();
  }
}

/** @param {number} atS */
export function clockTime(atS) {
  return new Date(atS * 1000).toLocaleTimeString();
}

/**
 * What the slots of an item were drawn from.
 * @type {WeakMap<Element, {worker: import("./model.js").Worker, grants: string}>}
 */
const shownSlots = new WeakMap();

/**
 * @param {HTMLLIElement} item
 * @param {import("./model.js").Worker} worker
 * @param {ReadonlySet<number>} granted
 * @param {number} now
 */
function updateWorker(item, worker, granted, now) {
  const state = workerState(worker);
  item.dataset["state"] = state;
  setText(part(item, ".state"), state);
  setText(part(item, ".facts"), workerFacts(worker, now));
  setDisabled(part(item, ".drain"), worker.lost_at !== null || worker.is_draining);
  setDisabled(part(item, ".undrain"), worker.lost_at !== null || !worker.is_draining);
  setDisabled(part(item, ".stop"), worker.lost_at !== null);
  // Large fabrics have thousands of slots, of which few have changed.
  const grants = [...granted].join(" ");
  const shown = shownSlots.get(item);
  if (shown?.worker === worker && shown.grants === grants) return;
  shownSlots.set(item, { worker, grants });
  reconcile(
    part(item, ".slots"),
    worker.slots.map((slot) => [String(slot.slot), slot]),
    () => make("li"),
    (cell, slot) => {
      const word = worker.lost_at === null ? slotState(slot, granted) : "lost";
      if (cell.className !== word) cell.className = word;
      setText(cell, `${slot.slot} ${word}`);
      cell.title = slot.session_id ? `session ${slot.session_id} (${slot.kind})` : "";
    },
  );
}

/** @param {import("./model.js").Worker} worker @param {number} now */
function workerFacts(worker, now) {
  const facts = [worker.address, worker.device_description || worker.device];
  const labels = Object.entries(worker.labels).map(([name, value]) => `${name}=${value}`);
  facts.push(worker.release && `release ${worker.release}`);
  facts.push(worker.pool && `pool ${worker.pool}`, labels.join(", "));
  if (worker.unit_ms !== null) facts.push(`units ${worker.unit_ms} ms (median)`);
  if (worker.memory_used_bytes !== null) facts.push(memory(worker.memory_used_bytes, worker.memory_bytes));
  if (worker.lost_at === null) facts.push(`attached for ${duration(now - worker.attached_at)}`);
  else facts.push(`lost ${duration(now - worker.lost_at)} ago: ${worker.lost_reason}`);
  if (worker.is_silent) facts.push(`last report ${duration(now - worker.reported_at)} ago`);
  return facts.filter(Boolean).join(" · ");
}

/** @param {number} used @param {number | null} total */
function memory(used, total) {
  const gib = (/** @type {number} */ bytes) => (bytes / 2 ** 30).toFixed(1);
  return total === null ? `${gib(used)} GiB used` : `${gib(used)} of ${gib(total)} GiB used`;
}

/** @param {Element} item @param {string} selector @returns {Element} */
function part(item, selector) {
  const found = item.querySelector(selector);
  if (!found) throw new Error(`a row has no ${selector}`);
  return found;
}

/**
 * A table whose rows have texts and at most one button.
 * @template Row
 */
export class Table {
  /** @param {string} id @param {readonly string[]} heads */
  constructor(id, heads) {
    this._table = byId(id, HTMLTableElement);
    this._caption = make("caption");
    const cells = heads.map((head) => {
      const cell = make("th", { text: head });
      cell.scope = "col";
      return head ? cell : make("td");
    });
    this._head = make("thead", {}, make("tr", {}, ...cells));
    this._head.hidden = true; // until there are rows
    this._body = make("tbody");
    this._table.replaceChildren(this._caption, this._head, this._body);
    /** @type {Map<string, Row>} */
    this._rows = new Map();
  }

  /**
   * @param {readonly {key: string, cells: readonly string[], row: Row,
   *   action: {text: string, label: string} | null}[]} rows
   * @param {string} none
   * @param {boolean} isCut
   * @param {(row: Row) => void} act
   * @param {number} [all] how many rows there are, if `rows` has only the first ones
   */
  render(rows, none, isCut, act, all = rows.length) {
    const shown = rows.slice(0, MAX_ROWS);
    this._rows = new Map(shown.map((each) => [each.key, each.row]));
    setText(this._caption, captionOf(all, shown.length, none, isCut));
    this._head.hidden = !rows.length;
    reconcile(
      this._body,
      shown.map((each) => [each.key, each]),
      (each) => this._row(each, act),
      (line, each) => each.cells.forEach((text, index) => setText(/** @type {Element} */ (line.children[index]), text)),
    );
  }

  /**
   * @param {{key: string, cells: readonly string[], action: {text: string, label: string} | null}} each
   * @param {(row: Row) => void} act
   */
  _row({ key, cells, action }, act) {
    const line = make("tr", {}, ...cells.map(() => make("td")));
    if (action) {
      const button = makeButton(action, () => {
        const row = this._rows.get(key);
        if (row !== undefined) act(row);
      });
      line.append(make("td", {}, button));
    }
    return line;
  }
}

/** @param {number} all @param {number} shown @param {string} none @param {boolean} isCut */
function captionOf(all, shown, none, isCut) {
  if (!all) return none;
  const rows = isCut ? `More than ${all} rows` : count(all, "row", "rows");
  return shown < all || isCut ? `${rows}; the first ${shown} are shown.` : rows;
}
