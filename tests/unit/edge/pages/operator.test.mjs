/** Tests of the modules of the operator page that know no page: `node --test`. */

import assert from "node:assert/strict";
import { test } from "node:test";

const folder = new URL("../../../../edge/duplane/edge/pages/operator/", import.meta.url);
const { Api, RefusedError } = await import(new URL("api.js", folder));
const { linePath, niceTop } = await import(new URL("charts.js", folder));
const { FabricModel, drainEffect, duration, slotState, workerState } = await import(new URL("model.js", folder));
const { unitLines } = await import(new URL("recordings.js", folder));
const { estimateRows } = await import(new URL("settings.js", folder));
const { readEvents, Watch } = await import(new URL("stream.js", folder));

const worker = (worker_id, facts = {}) => ({
  worker_id,
  slots: [{ slot: 0, state: "free" }],
  is_draining: false,
  is_silent: false,
  is_unreachable: false,
  lost_at: null,
  ...facts,
});
const lease = (lease_id, worker_id, session_id = "sess_1") => ({ lease_id, worker_id, session_id, slot: 0 });
const snapshot = (facts = {}) => ({
  now: 1000,
  is_known: true,
  workers: [],
  leases: [],
  tickets: [],
  ticket_limit: 10,
  store_refusal: "",
  cut: [],
  edge: null,
  samples: [],
  late_units: [],
  moves: [],
  ...facts,
});

function modelWith(facts) {
  const model = new FabricModel();
  model.take("snapshot", snapshot(facts));
  return model;
}

const texts = (model) => model.log.map((line) => line.text);

test("what the first snapshot has is no news", () => {
  const model = modelWith({ workers: [worker("w")], leases: [lease("l1", "w")] });
  assert.deepEqual(texts(model), []);
  assert.equal(model.leases.size, 1);
});

test("a session begins, moves and ends", () => {
  const model = modelWith({ workers: [worker("a"), worker("b")] });
  model.take("changes", { now: 1001, leases: [lease("l1", "a")] });
  model.take("changes", { now: 1002, leases: [lease("l1", "a")] });
  model.take("changes", { now: 1003, leases: [lease("l2", "b")], removed_leases: ["l1"] });
  model.take("changes", { now: 1004, removed_leases: ["l2", "never known"] });
  assert.deepEqual(texts(model), [
    "Session sess_1 begins at a, slot 0.",
    "Session sess_1 moves from a to b, slot 0.",
    "Session sess_1 ends at b, slot 0.",
  ]);
  assert.equal(model.leases.size, 0);
});

test("a snapshot tells what a page has missed", () => {
  const model = modelWith({ workers: [worker("a")], leases: [lease("l1", "a")] });
  model.take("unavailable", { now: 1001, reason: "the scheduler does not answer" });
  assert.equal(model.unavailable, "the scheduler does not answer");
  model.take("snapshot", snapshot({ workers: [worker("a", { is_draining: true })] }));
  assert.deepEqual(texts(model).slice(1), [
    "A scheduler answers again.",
    "Worker a is draining.",
    "Session sess_1 ends at a, slot 0.",
  ]);
  assert.equal(model.unavailable, "");
});

test("an edge that does not know the fabric yet takes nothing from the page", () => {
  const model = modelWith({ workers: [worker("a")], leases: [lease("l1", "a")] });
  model.take("snapshot", snapshot({ is_known: false, edge: { is_draining: true } }));
  assert.equal(model.leases.size, 1);
  assert.equal(model.isCurrent, false);
  assert.deepEqual(model.edge, { is_draining: true });
  assert.deepEqual(texts(model), []);
});

test("what the page remembers is bounded", () => {
  const model = modelWith({});
  for (let index = 0; index < 3000; index++) {
    model.take("changes", { now: index, leases: [lease(`l${index}`, "a", `sess_${index}`)] });
    model.take("changes", { now: index, removed_leases: [`l${index}`] });
    model.take("figures", { now: index, edge: {}, sample: { at_s: index }, late_units: [{}, {}], moves: [{}] });
  }
  assert.equal(model.log.length, 200);
  assert.equal(model.logCount, 6000);
  assert.equal(model.samples.length, 300);
  assert.equal(model.lateUnits.length, 64);
  assert.equal(model.moves.length, 64);
  assert.ok(model._sessions.size <= 1001);
});

test("states of workers and slots are words", () => {
  assert.equal(workerState(worker("w", { lost_at: 5, is_silent: true })), "lost");
  assert.equal(workerState(worker("w", { is_draining: true })), "draining");
  assert.equal(workerState(worker("w")), "serving");
  const granted = new Set([1]);
  assert.equal(slotState({ slot: 0, state: "free" }, granted), "free");
  assert.equal(slotState({ slot: 1, state: "free" }, granted), "granted");
  assert.equal(slotState({ slot: 1, state: "occupied", is_paused: true }, granted), "paused");
  assert.equal(slotState({ slot: 1, state: "broken" }, granted), "broken");
});

test("the dialog names the effect of a drain", () => {
  const slots = [
    { slot: 0, state: "occupied", kind: "audio_duplex" },
    { slot: 1, state: "occupied", kind: "audio_duplex", cannot_move: true },
    { slot: 2, state: "free" },
  ];
  const text = drainEffect(worker("w", { slots }), true);
  assert.match(text, /1 session moves when others have free slots/);
  assert.match(text, /1 session cannot move/);
  assert.match(text, /process ends/);
  assert.equal(drainEffect(worker("w"), false), "It accepts no new sessions.");
});

test("durations fit a table", () => {
  assert.deepEqual(
    [-1, 59, 61, 3660, 200_000].map(duration),
    ["0 s", "59 s", "1 min 01 s", "1 h 01 min", "2 d 7 h"],
  );
});

test("steps without a value are gaps of a line", () => {
  const samples = [980, 982, 990, 992].map((at_s) => ({ at_s }));
  assert.equal(linePath(samples, [1, 2, 3, null], 1000, 10).match(/M/g).length, 2);
  assert.equal(linePath(samples, [1, 2, 3, 4], 2000, 10), "");
  assert.deepEqual([0, 1, 16, 20, 21, 1000].map(niceTop), [1, 1, 20, 20, 50, 1000]);
});

const bodyOf = (bytes) =>
  new ReadableStream({
    start(controller) {
      for (const byte of bytes) controller.enqueue(new Uint8Array([byte]));
      controller.close();
    },
  });

test("events are read from a body in pieces of any size", async () => {
  const text = 'event: a\ndata: {"x":"é"}\n\n: comment\n\nevent: b\ndata: {"y":1}\n\nevent: cut';
  const seen = [];
  for await (const event of readEvents(bodyOf(new TextEncoder().encode(text)))) seen.push(event);
  assert.deepEqual(seen, [
    { name: "a", fields: { x: "é" } },
    { name: "b", fields: { y: 1 } },
  ]);
});

function watchOf(answers) {
  const seen = { events: [], lost: [], asked: 0, key: "" };
  const api = {
    async ask() {
      seen.asked++;
      const answer = answers.shift();
      if (answer instanceof Error) throw answer;
      return { body: bodyOf(new TextEncoder().encode(answer)) };
    },
  };
  const watch = new Watch(api, {
    onEvent: (name) => seen.events.push(name),
    onLost: (reason, waitS) => {
      seen.lost.push(waitS);
      if (!answers.length) watch.stop();
    },
    onKeyNeeded: (reason) => (seen.key = reason),
  });
  return { watch, seen };
}

test("a refused key ends the attempts", async () => {
  const { watch, seen } = watchOf([new RefusedError(403, "only operators", 0)]);
  await watch.run();
  assert.deepEqual(seen, { events: [], lost: [], asked: 1, key: "only operators" });
});

test("a stream that ends is opened again, after the time that the edge names", async () => {
  const { watch, seen } = watchOf(["event: a\ndata: {}\n\n", new RefusedError(429, "too many", 6)]);
  await watch.run();
  assert.deepEqual(seen.events, ["a"]);
  assert.deepEqual(seen.lost, [1, 6]);
});

test("the key is in the header only", async () => {
  const stored = new Map();
  const asked = [];
  const storage = { getItem: (key) => stored.get(key) ?? null, setItem: (key, text) => stored.set(key, text) };
  const api = new Api(storage, async (path, request) => {
    asked.push([path, request.headers]);
    return Response.json({ detail: "no" }, { status: 404, headers: { "Retry-After": "3" } });
  });
  api.useKey("secret");
  await assert.rejects(api.ask("/x"), (error) => error.status === 404 && error.message === "no" && error.retryAfterS === 3);
  assert.deepEqual(asked, [["/x", { Authorization: "Bearer secret" }]]);
});

test("a recording has a line for each unit of speech, and one for units that listen", () => {
  const events = [
    { ts: 100, dir: "up", frame: { type: "session.init" } },
    { ts: 101, dir: "up", frame: { type: "input.append", audio: "@blob/000001.wav" } },
    { ts: 101.1, dir: "down", frame: { type: "response.output.delta", kind: "listen", chunk_index: 0 } },
    { ts: 102.1, dir: "down", frame: { type: "response.output.delta", kind: "listen", chunk_index: 1 } },
    {
      ts: 103.1,
      dir: "down",
      frame: {
        type: "response.output.delta",
        kind: "text",
        text: "Yes.",
        chunk_index: 2,
        metrics: { wall_clock_ms: 41.7, dropped_units: 2 },
      },
    },
    { ts: 104, dir: "down", frame: { type: "session.closed", reason: "timeout" } },
    { ts: 105, dir: "down", frame: null },
  ];
  assert.deepEqual(
    unitLines(events, 100).map(({ atS, text }) => [Math.round(atS * 10), text]),
    [
      [0, "client: session.init"],
      [11, "model listens (2 answers)"],
      [31, "model: response.output.delta · “Yes.” · unit 2 · 42 ms · 2 units dropped"],
      [40, "model: session.closed · “timeout”"],
      [50, "model: event"],
    ],
  );
});

test("estimates have a row for each kind of session", () => {
  const answer = {
    config: { eta_chat_s: 20, eta_audio_duplex_s: 120, ema_alpha: 0.3 },
    ema_alpha: 0.3,
    ema_chat_s: null,
    ema_audio_duplex_s: 75.2,
    ema_chat_samples: 0,
    ema_audio_duplex_samples: 4,
  };
  assert.deepEqual(
    estimateRows(answer).map((row) => row.cells),
    [
      ["chat", "20 s", "none has ended", "0"],
      ["audio_duplex", "2 min 00 s", "1 min 15 s", "4"],
    ],
  );
});
