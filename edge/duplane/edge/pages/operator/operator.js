/** The operator page: the stream feeds a model, and the model is rendered. */

import { Api, RefusedError } from "./api.js";
import { Chart } from "./charts.js";
import { byId, confirmed, setText } from "./elements.js";
import { count, drainEffect, FabricModel } from "./model.js";
import { Recordings } from "./recordings.js";
import { Settings } from "./settings.js";
import { Watch } from "./stream.js";
import { Tables } from "./tables.js";

const api = new Api(sessionStorage, (...request) => fetch(...request));
const model = new FabricModel();
const status = byId("status", HTMLElement);
const content = byId("content", HTMLElement);
const login = byId("login", HTMLFormElement);

const PAUSE_FACTOR = 4;
const MAX_PAUSE_MS = 500; // a change is shown within a second

let clockOffsetS = 0; // the edge's clock minus that of this machine
let isLive = false;
let notice = ""; // of the last action
let isRenderDue = false;
let renderedMs = 0; // how long the last rendering took
/** @type {Watch | null} */
let watch = null;

const tables = new Tables(model, {
  drain: (worker, isStop) =>
    void act(
      {
        title: `${isStop ? "Stop" : "Drain"} worker ${worker.worker_id}?`,
        text: drainEffect(worker, isStop),
        yes: isStop ? "Stop the worker" : "Drain the worker",
      },
      `${workerPath(worker)}/drain`,
      { method: "POST", body: { is_stop: isStop } },
      `Worker ${worker.worker_id} was asked to ${isStop ? "stop" : "drain"}.`,
    ),
  undrain: (worker) =>
    void act(
      {
        title: `Take back the drain of worker ${worker.worker_id}?`,
        text: "It accepts new sessions again.",
        yes: "Take back the drain",
      },
      `${workerPath(worker)}/drain`,
      { method: "DELETE" },
      `Worker ${worker.worker_id} was asked to serve again.`,
    ),
  endSession: (lease) =>
    void act(
      {
        title: `End session ${lease.session_id}?`,
        text: "Its client is told that the server ends the session, and is disconnected.",
        yes: "End the session",
      },
      `/api/sessions/${encodeURIComponent(lease.session_id)}`,
      { method: "DELETE" },
      `Session ${lease.session_id} was ended.`,
    ),
  cancelTicket: (ticket) =>
    void act(
      {
        title: `Remove ${ticket.session_id || ticket.ticket_id} from the queue?`,
        text: "Its client is told that no slot is free, and is disconnected.",
        yes: "Remove it",
      },
      `/api/queue/${encodeURIComponent(ticket.ticket_id)}`,
      { method: "DELETE" },
      "The ticket was removed from the queue.",
    ),
});

const charts = [
  new Chart(
    "Queue",
    [{ name: "waiting", className: "first", value: (sample) => sample.waiting }],
    { unit: "", leastTop: 5 },
  ),
  new Chart(
    "Slots",
    [
      { name: "leased", className: "first", value: (sample) => sample.leases },
      { name: "all", className: "second", value: (sample) => sample.slots },
    ],
    { unit: "", leastTop: 5 },
  ),
  new Chart(
    "Units of this edge",
    [
      { name: "median", className: "first", value: (sample) => rounded(sample.p50_ms) },
      { name: "95 %", className: "second", value: (sample) => rounded(sample.p95_ms) },
    ],
    { unit: " ms", leastTop: 100, marks: (sample) => sample.late_count, note: "; marks: late units" },
  ),
];

/** @param {number | null} value */
function rounded(value) {
  return value === null ? null : Math.round(value);
}

/** @param {import("./model.js").Worker} worker */
function workerPath(worker) {
  return `/api/admin/workers/${encodeURIComponent(worker.worker_id)}`;
}

/**
 * Ask, then send a request.
 * @param {{title: string, text: string, yes: string}} question
 * @param {string} path
 * @param {{method: string, body?: unknown}} request
 * @param {string} done
 */
async function act(question, path, request, done) {
  if (!(await confirmed(question))) return;
  try {
    const answer = await (await api.ask(path, request)).json();
    notice = answer.success === false ? "It has ended already." : done;
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    notice = error instanceof RefusedError ? `The edge refuses: ${why}` : "The edge does not answer.";
  }
  renderSoon();
}

function renderSoon() {
  if (isRenderDue) return;
  isRenderDue = true;
  // A large fabric changes all the time: rendering leaves most of the time to the person's actions.
  setTimeout(() => requestAnimationFrame(render), Math.min(MAX_PAUSE_MS, PAUSE_FACTOR * renderedMs));
}

function render() {
  isRenderDue = false;
  const beganMs = performance.now();
  const now = Date.now() / 1000 + clockOffsetS;
  if (isLive) setText(status, liveStatus());
  tables.render(now);
  for (const chart of charts) chart.render(model.samples, now);
  setText(byId("fabric", HTMLElement), fabricSentence());
  setText(byId("edge", HTMLElement), edgeSentence());
  renderedMs = performance.now() - beganMs;
}

/** Return the sentence that readers of the screen hear when it changes: it has no counts. */
function liveStatus() {
  const facts = ["Live."];
  if (model.unavailable) {
    facts[0] = `No scheduler answers (${model.unavailable}). The page shows the last state that was known.`;
  } else if (!model.isCurrent) {
    facts[0] = "Connected. The state of the fabric is loading.";
  }
  if (model.storeRefusal) facts.push(`The scheduler grants no slots: ${model.storeRefusal}.`);
  if (notice) facts.push(notice);
  return facts.join(" ");
}

function fabricSentence() {
  if (!model.isKnown) return "";
  const workers = count(model.workers.size, "worker", "workers");
  const sessions = count(model.leases.size, "session", "sessions");
  const cut = model.cut.length ? ` The fabric has more ${model.cut.join(", ")} than the page can show.` : "";
  return `The fabric: ${workers}, ${sessions}, ${model.tickets.size} of at most ${model.ticketLimit} in the queue.${cut}`;
}

function edgeSentence() {
  const { edge } = model;
  if (!edge) return "";
  const sessions = edge.sessions.map(({ dialect, state, count: number }) => `${number} ${state} in dialect ${dialect}`);
  const facts = [`This edge: ${sessions.join(", ") || "no session"}.`];
  if (edge.unmovable) facts.push(`${count(edge.unmovable, "session", "sessions")} cannot move.`);
  if (edge.is_draining) facts.push("It drains: it accepts no new sessions.");
  return facts.join(" ");
}

function open() {
  watch?.stop();
  isLive = false;
  setText(status, "Connecting.");
  watch = new Watch(api, {
    onEvent: (name, fields) => {
      clockOffsetS = fields.now - Date.now() / 1000;
      model.take(name, fields);
      isLive = true;
      login.hidden = true;
      content.hidden = false;
      renderSoon();
    },
    onLost: (reason, waitS) => {
      isLive = false;
      setText(status, `${reason} The page tries again in ${waitS} s; it shows the last state that was known.`);
    },
    onKeyNeeded: (reason) => {
      isLive = false;
      setText(status, api.hasKey ? `The edge does not accept this key: ${reason}` : `The edge demands a key: ${reason}`);
      login.hidden = false;
      content.hidden = true;
      byId("key", HTMLInputElement).focus();
    },
  });
  void watch.run();
}

login.addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key", HTMLInputElement);
  api.useKey(field.value.trim());
  field.value = "";
  open();
});

byId("charts", HTMLElement).append(...charts.map((chart) => chart.element));
new Recordings(api);
new Settings(api);
setInterval(renderSoon, 1000); // ages grow
open();
