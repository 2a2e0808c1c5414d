import assert from "node:assert/strict";
import { test } from "node:test";
import { ConnectionLostError, DuplexSession } from "../index.js";
import { SentInput, returnWaitS } from "../resuming.js";

const RESUME = { token: "s.secret", within_s: 60 };

// Sockets without a network: each new one gets the next of `plans`, which plays the server.
function network(...plans) {
  const sockets = [];
  class Socket {
    readyState = 0;
    bufferedAmount = 0;
    sent = [];
    constructor() {
      const plan = plans[sockets.length];
      sockets.push(this);
      queueMicrotask(() => {
        this.readyState = 1;
        this.onopen?.();
        plan?.(this);
      });
    }
    tell(event) {
      this.onmessage?.({ data: JSON.stringify(event) });
    }
    send(text) {
      this.sent.push(JSON.parse(text));
      this.onsent?.(this.sent.at(-1));
    }
    lose(code = 1006) {
      this.readyState = 3;
      this.onclose?.({ code, reason: "" });
    }
    close(code = 1000) {
      if (this.readyState !== 1) return;
      this.closedWith = code;
      this.lose(code);
    }
  }
  return { sockets, options: { WebSocket: Socket, resumable: true, returnWaitS: () => 0.001 } };
}

const unit = (number, part = 0) => ({
  type: "response.output.delta", kind: "text", text: `${number}`, chunk_index: number, unit: number, part,
  next_sample: 0,
});

function begin(socket) {
  socket.tell({ type: "session.queue_done" });
  socket.tell({ type: "session.created", session_id: "s", usage: {}, resume: RESUME });
}

function resume(...events) {
  return (socket) => {
    socket.tell({ type: "session.queued", position: 1 });
    socket.tell({ type: "session.resumed", unit: 1, next_sample: 240, lost_samples: 70, gap_s: 0.5, within_s: 60 });
    for (const event of events) socket.tell(event);
  };
}

function refuse(code) {
  return (socket) => {
    socket.tell({ type: "error", error: { code, message: "no" } });
    socket.lose(1013);
  };
}

async function next(outputs) {
  return (await outputs.next()).value;
}

test("a session returns, hears every event once, and sends again what the server lacks", async () => {
  const { sockets, options } = network(begin, resume(unit(0), { ...unit(1), replayed: true }));
  const losses = [];
  const returns = [];
  const seen = [];
  const session = new DuplexSession("ws://h:1", {
    ...options,
    uplink: "float32",
    onLost: () => losses.push(returns.length),
    onReturn: (back) => returns.push(back),
    onEvent: (event) => seen.push(event),
  });
  await session.connect();
  const outputs = session[Symbol.asyncIterator]();
  assert.equal(sockets[0].sent[0].payload.resumable, true);
  session.send(new Float32Array(320));
  sockets[0].tell(unit(0));
  assert.equal((await next(outputs)).unit, 0);
  sockets[0].lose();
  assert.ok(session.send(new Float32Array(160))); // while there is no connection
  const back = await next(outputs);
  assert.deepEqual([back.unit, back.replayed], [1, true]);
  const [asked, ...sounds] = sockets[1].sent;
  assert.deepEqual(asked, { type: "session.resume", token: "s.secret", unit: 0, part: 0, from_sample: 0 });
  assert.deepEqual(sounds.map(({ input }) => input.audio.length), [428, 856]); // 80 and 160 samples
  const told = returns.map(({ gapS, attempts, lostSamples, wasAsked }) => [gapS, attempts, lostSamples, wasAsked]);
  assert.deepEqual(told, [[0.5, 1, 70, false]]);
  assert.deepEqual(losses, [0]); // before the return
  assert.ok(!JSON.stringify([seen, session.created]).includes("secret"));
  session.close();
  sockets[1].tell({ type: "session.closed", reason: "user_stop" });
});

test("a refused return ends the session, a busy server costs no attempt", async () => {
  const lost = (socket) => socket.lose();
  const { sockets, options } = network(begin, refuse("resume_busy"), lost, lost, refuse("resume_lost"));
  let lossCount = 0;
  const session = new DuplexSession("ws://h:1", { ...options, onLost: () => (lossCount += 1) });
  await session.connect();
  sockets[0].lose();
  await assert.rejects(session[Symbol.asyncIterator]().next(), (error) => {
    assert.ok(error instanceof ConnectionLostError);
    return error.code === "resume_lost";
  });
  assert.equal(sockets.length, 5);
  assert.equal(lossCount, 1); // not once for each attempt
});

test("a client gives up after five attempts", async () => {
  const { sockets, options } = network(begin, ...Array(9).fill((socket) => socket.lose()));
  const session = await new DuplexSession("ws://h:1", options).connect();
  sockets[0].lose();
  await assert.rejects(session[Symbol.asyncIterator]().next(), ConnectionLostError);
  assert.equal(sockets.length, 6);
});

test("a server that shuts down is left before its connection ends", async () => {
  const { sockets, options } = network(begin, resume(unit(0)));
  const returns = [];
  const session = new DuplexSession("ws://h:1", {
    ...options, onLost: () => assert.fail("nothing is lost"), onReturn: (back) => returns.push(back),
  });
  await session.connect();
  sockets[0].tell({ type: "session.go_away", within_s: 600, after_s: 0 });
  assert.equal((await next(session[Symbol.asyncIterator]())).unit, 0);
  assert.equal(sockets[0].readyState, 3);
  assert.equal(returns[0].wasAsked, true);
  session.close();
  sockets[1].tell({ type: "session.closed", reason: "user_stop" });
});

for (const isRefused of [false, true]) {
  const end = isRefused ? "is left in vain" : "is left";
  test(`a server that ends its connection before another one has answered ${end}`, async () => {
    const answer = (socket) => {
      sockets[0].tell({ type: "session.replaced" });
      sockets[0].lose(1000);
      (isRefused ? refuse("resume_busy") : resume(unit(0)))(socket);
    };
    const { sockets, options } = network(begin, answer, resume(unit(0)));
    let lossCount = 0;
    const onLost = () => (lossCount += 1);
    const session = await new DuplexSession("ws://h:1", { ...options, onLost }).connect();
    sockets[0].tell({ type: "session.go_away", within_s: 600, after_s: 0 });
    assert.equal((await next(session[Symbol.asyncIterator]())).unit, 0);
    assert.equal(sockets.length, isRefused ? 3 : 2);
    assert.equal(lossCount, isRefused ? 1 : 0);
    session.close();
    sockets.at(-1).tell({ type: "session.closed", reason: "user_stop" });
  });
}

for (const when of ["before", "during"]) {
  test(`a session that is closed ${when} the return ends at the server, too`, async () => {
    let answer;
    const ask = (socket) => {
      answer = () => resume(unit(0))(socket);
      if (when === "before") answer();
      else session.close(); // the server has not answered yet
    };
    const { sockets, options } = network(begin, ask);
    const session = new DuplexSession("ws://h:1", {
      ...options,
      returnWaitS: () => (when === "before" ? 3600 : 0.001),
      onReturn: () => assert.fail("the session is over"),
    });
    await session.connect();
    const outputs = session[Symbol.asyncIterator]();
    sockets[0].lose();
    if (when === "before") await session.close();
    assert.equal((await outputs.next()).done, true);
    if (when === "during") answer();
    assert.deepEqual(sockets[1].sent.map(({ type }) => type), ["session.resume", "session.close"]);
    assert.equal(sockets[1].closedWith, 1000);
    assert.equal(sockets.length, 2);
  });
}

test("a session that another connection has taken ends", async () => {
  const { sockets, options } = network(begin);
  const session = await new DuplexSession("ws://h:1", options).connect();
  sockets[0].tell({ type: "session.replaced" });
  assert.deepEqual(session.end, { reason: "replaced" });
});

test("a connection on which no answer comes counts as lost", async () => {
  const { sockets, options } = network(begin, resume(unit(0)));
  let lossCount = 0;
  const onLost = () => (lossCount += 1);
  const session = await new DuplexSession("ws://h:1", { ...options, silenceS: 0.1, onLost }).connect();
  session.send(new Float32Array(160));
  assert.equal((await next(session[Symbol.asyncIterator]())).unit, 0);
  assert.equal(lossCount, 1);
  assert.equal(sockets[0].closedWith, 4000); // with 1000 the session would end
  session.close();
  sockets[1].tell({ type: "session.closed", reason: "user_stop" });
});

test("a client that waits shows its place to the next server", async () => {
  const { sockets, options } = network((socket) => {
    socket.tell({ type: "session.queued", position: 3, queue_token: "sealed" });
    socket.lose();
  }, begin);
  const session = await new DuplexSession("ws://h:1", { ...options, retryBaseS: 0.001 }).connect();
  assert.equal(sockets[1].sent[0].payload.queue_token, "sealed");
  session.close();
  sockets[1].tell({ type: "session.closed", reason: "user_stop" });
});

test("input is kept for ten seconds, and sent again no faster than the server takes it", () => {
  const kept = new SentInput();
  const second = new Float32Array(16000);
  for (let count = 0; count < 12; count += 1) kept.add(second, {});
  assert.equal(kept.firstSample, 32000);
  assert.equal(kept.rewind(32000), 32000); // the server was told the first sample
  assert.equal(kept.rewind(16000), 16000); // it was not
  const taken = () => {
    let count = 0;
    while (kept.take()) count += 1;
    return count;
  };
  assert.equal(taken(), 1); // 2 s beyond sample 16,000, of which one is lost
  kept.begun({ next_sample: 48000 });
  assert.equal(taken(), 2);
  kept.begun({ next_sample: 1e6 });
  assert.equal(taken(), 7);
  for (let attempt = 0; attempt < 8; attempt += 1) {
    assert.ok(returnWaitS(attempt) >= 0.25 && returnWaitS(attempt) <= 4);
  }
});
