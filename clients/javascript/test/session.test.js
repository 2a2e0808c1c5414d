import assert from "node:assert/strict";
import { test } from "node:test";
import {
  BusyError, ConnectionLostError, DuplexSession, InputError, RefusedError, ServerError, retryWaitS,
} from "../index.js";
import { errorOfClose } from "../errors.js";
import { OutputReader } from "../events.js";

// Sockets without a network: each new one gets the next of `plans`, which plays the server.
function network(...plans) {
  const sockets = [];
  class Socket {
    readyState = 1;
    bufferedAmount = 0;
    sent = [];
    constructor(url, protocols) {
      Object.assign(this, { url, protocols });
      sockets.push(this);
      queueMicrotask(() => plans.shift()?.(this));
    }
    tell(event) {
      this.onmessage?.({ data: JSON.stringify(event) });
    }
    send(text) {
      this.sent.push(JSON.parse(text));
      this.onsent?.(this.sent.at(-1));
    }
    close(code = 1000, reason = "") {
      if (this.readyState !== 1) return;
      this.readyState = 3;
      this.onclose?.({ code, reason });
    }
  }
  return { sockets, options: { WebSocket: Socket, retryBaseS: 0.001 } };
}

const URL = "ws://localhost:1";
const speech = (text, index) => ({
  type: "response.output.delta", kind: "text", response_id: "r", text, chunk_index: index,
});
const listen = (index) => ({
  type: "response.output.delta", kind: "listen", response_id: "r", chunk_index: index, interrupted: true,
});

function begin(socket) {
  socket.onsent = ({ type }) => {
    if (type === "session.init") socket.tell({ type: "session.created", session_id: "s" });
    if (type === "session.close") socket.tell({ type: "session.closed", reason: "user_stop" });
  };
  socket.tell({ type: "session.queue_done" });
}

function refuse(code) {
  return (socket) => {
    socket.tell({ type: "error", error: { code, message: "later" } });
    socket.close(1013);
  };
}

async function talking(settings = {}) {
  const { sockets, options } = network(begin);
  const session = await new DuplexSession(URL, { ...options, ...settings }).connect();
  return { session, socket: sockets[0], outputs: session[Symbol.asyncIterator]() };
}

test("a client tries again after a full queue, and shows its key to each server", async () => {
  const { sockets, options } = network(refuse("queue_full"), (socket) => socket.close(1006), begin);
  const session = new DuplexSession(URL, { ...options, key: "secret", model: "m" });
  await session.connect();
  assert.equal(sockets.length, 3);
  assert.equal(sockets[2].url, `${URL}/v1/realtime?mode=audio&model=m`);
  assert.deepEqual(sockets[2].protocols, ["duplane.realtime", "duplane.bearer.secret"]);
  await session.close();
  assert.deepEqual(session.end, { reason: "user_stop" });
});

test("a client gives up after its attempts, and at once if nothing can help", async () => {
  const busy = network(refuse("queue_full"), refuse("worker_busy"), begin);
  await assert.rejects(new DuplexSession(URL, { ...busy.options, attempts: 2 }).connect(), (error) => {
    assert.ok(error instanceof BusyError);
    assert.equal(error.message, "worker_busy: later");
    return error.closeCode === 1013;
  });
  const refused = network((socket) => socket.close(1008, "no"), begin);
  await assert.rejects(new DuplexSession(URL, refused.options).connect(), RefusedError);
  assert.equal(refused.sockets.length, 1);
});

test("refused settings are an error of the input", async () => {
  const { sockets, options } = network((socket) => {
    socket.tell({ type: "error", error: { code: "invalid_payload", message: "payload.seed: no" } });
  });
  await assert.rejects(new DuplexSession(URL, options).connect(), InputError);
  assert.equal(sockets.length, 1);
  assert.equal(sockets[0].readyState, 3);
});

test("a client leaves the queue by close, by a signal, and after the time limit", async () => {
  const queued = (leave) => (socket) => {
    socket.tell({ type: "session.queued", position: 2, queue_length: 3, estimated_wait_s: 0, reason: "no worker" });
    leave();
  };
  const places = [];
  const onQueue = (place) => places.push(place);
  let session;
  const first = network(queued(() => session.close()));
  session = new DuplexSession(URL, { ...first.options, onQueue });
  await assert.rejects(session.connect(), { name: "AbortError" });
  const place = { position: 2, queueLength: 3, estimatedWaitS: null, ticketId: "" };
  assert.deepEqual(places, [{ ...place, reason: "no worker" }]);
  const abort = new AbortController();
  const second = network(queued(() => abort.abort()));
  session = new DuplexSession(URL, second.options);
  await assert.rejects(session.connect({ signal: abort.signal }), { name: "AbortError" });
  const third = network(queued(() => {}));
  session = new DuplexSession(URL, { ...third.options, attempts: 1, queueTimeoutS: 0.01 });
  await assert.rejects(session.connect(), /no slot within 0.01 s/);
  for (const { sockets } of [first, second, third]) assert.equal(sockets[0].readyState, 3);
});

test("a broken conversation is an error, and is not begun again", async () => {
  const { session, socket, outputs } = await talking();
  socket.tell(speech("last word", 0));
  socket.close(1006);
  assert.equal((await outputs.next()).value.text, "last word");
  await assert.rejects(outputs.next(), ConnectionLostError);
  assert.equal(session.send(new Int16Array(320)), false);
});

test("an interruption makes the model listen and drops the rest of the turn", async () => {
  const { session, socket, outputs } = await talking();
  socket.tell(speech("heard", 0));
  assert.equal((await outputs.next()).value.text, "heard");
  session.interrupt();
  session.send(new Int16Array(320));
  session.send(new Int16Array(320));
  const [, first, second] = socket.sent;
  assert.deepEqual([first.input.force_listen, second.input.force_listen], [true, undefined]);
  socket.tell(speech("dropped", 1));
  socket.tell(listen(2));
  socket.tell(speech("next turn", 3));
  const { value } = await outputs.next();
  assert.deepEqual([value.speaks, value.interrupted, value.endOfTurn], [false, true, true]);
  assert.equal((await outputs.next()).value.text, "next turn");
});

test("a paused session and a full network send nothing", async () => {
  const { session, socket } = await talking();
  session.pause();
  assert.equal(session.send(new Int16Array(320)), false);
  session.resume();
  socket.bufferedAmount = 2 ** 20 + 1;
  assert.equal(session.send(new Int16Array(320)), false);
  assert.equal(session.droppedSends, 1);
  socket.bufferedAmount = 0;
  assert.equal(session.send(new Int16Array(40000)), true);
  assert.equal(socket.sent.length, 1 + 3); // the settings, and appends of at most a second
});

test("a refused input is thrown, and the session goes on", async () => {
  const { socket, outputs } = await talking();
  socket.tell({ type: "error", error: { code: "invalid_payload", message: "input.audio: no" } });
  socket.tell(speech("here", 0));
  await assert.rejects(outputs.next(), InputError);
  assert.equal((await outputs.next()).value.text, "here");
});

test("what cannot be read, and what nobody reads, ends the session", async () => {
  const broken = await talking();
  broken.socket.onmessage({ data: "[" });
  await assert.rejects(broken.outputs.next(), ServerError);
  const flooded = await talking();
  for (let index = 0; index <= 1000; index += 1) flooded.socket.tell(speech("x", index));
  assert.equal(flooded.socket.readyState, 3);
});

test("the type of an error says whether to try again", () => {
  for (const code of [1001, 1006, 1011, 1013]) {
    for (let attempt = 0; attempt < 12; attempt += 1) {
      const waitS = retryWaitS(errorOfClose(code, ""), attempt);
      assert.ok(waitS >= Math.min(15, 2 ** attempt / 2) && waitS <= Math.min(30, 2 ** attempt));
    }
  }
  for (const code of [1003, 1008, 1009]) assert.equal(retryWaitS(errorOfClose(code, ""), 0), null);
});

test("a seed and the name of an input reach the server in B only", async () => {
  const { session, socket, outputs } = await talking({ seed: 7 });
  assert.equal(socket.sent[0].payload.seed, 7);
  session.send(new Int16Array(320), { inputId: "sound" });
  assert.equal(socket.sent[1].input.input_id, "sound");
  socket.tell({ ...listen(0), input_id: "sound", metrics: { wall_clock_ms: 5 } });
  const { value } = await outputs.next();
  assert.deepEqual([value.inputId, value.metrics], ["sound", { wall_clock_ms: 5 }]);
  const error = { code: "invalid_payload", message: "input.audio: no" };
  socket.tell({ type: "error", input_id: "sound", error });
  await assert.rejects(outputs.next(), { name: "InputError", inputId: "sound" });
  const { options } = network();
  const inA = { ...options, dialect: "A" };
  assert.throws(() => new DuplexSession(URL, { ...inA, seed: 7 }), /seed/);
  const other = new DuplexSession(URL, inA);
  assert.throws(() => other.send(new Int16Array(320), { inputId: "sound" }), /inputId/);
});

test("units of a server that numbers none are counted", () => {
  const plain = new OutputReader();
  plain.begin({ type: "session.created" });
  const numbered = new OutputReader();
  numbered.begin({ type: "session.created", usage: {} });
  const part = (kind, more = {}) => ({ type: "response.output.delta", kind, ...more });
  const inTurn = { response_id: "r" };
  const parts = [
    [null, 0, part("listen")],
    [0, 1, part("listen")],
    [1, 2, part("text", { ...inTurn, text: "a" })],
    [null, 2, part("audio", { ...inTurn, audio: "AAAAAA==" })],
    [2, 3, part("text", { ...inTurn, text: "b" })],
    [null, 3, part("listen", inTurn)],
    [3, 4, part("listen")],
  ];
  for (const [number, counted, event] of parts) {
    assert.equal(plain.read(event).index, counted);
    const output = numbered.read(number === null ? event : { ...event, chunk_index: number });
    // The answer to an append that completes no unit has no number and no content.
    assert.equal(output === null, event === parts[0][2]);
  }
});

test("a server that does not answer is given up", async () => {
  const { sockets, options } = network((socket) => {
    socket.readyState = 0;
  });
  const settings = { ...options, attempts: 1, connectTimeoutS: 0.01 };
  await assert.rejects(new DuplexSession(URL, settings).connect(), /does not answer within 0.01 s/);
  assert.equal(sockets.length, 1);
});
