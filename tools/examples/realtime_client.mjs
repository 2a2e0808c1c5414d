// A conversation over /v1/realtime in dialect B. Runs in a browser as it is, and in Node.
//
// Usage: node realtime_client.mjs ws://127.0.0.1:8006 speech.f32 [seconds]
// (Node 20 and 21 need the flag --experimental-websocket.) To make speech.f32 from a WAV file:
// ffmpeg -i speech.wav -f f32le -ac 1 -ar 16000 speech.f32

const UNIT_BYTES = 4 * 16000; // one second of float32 samples at 16 kHz

// Send `sound`, then silence, one second at a time. Calls `play` with the model's speech
// (Float32Array, 24 kHz) and returns the model's text.
export async function converse(server, sound, seconds, play) {
  const socket = new WebSocket(`${server}/v1/realtime?mode=audio`);
  const events = [];
  let wake = () => {};
  socket.onmessage = (message) => { events.push(JSON.parse(message.data)); wake(); };
  socket.onclose = () => { events.push({ type: "closed" }); wake(); };
  const receive = async () => {
    while (events.length === 0) await new Promise((resolve) => { wake = resolve; });
    const event = events.shift();
    if (event.type === "error") throw new Error(event.error.message);
    if (event.type === "closed") throw new Error("the connection is closed");
    return event;
  };
  const until = async (type) => { while ((await receive()).type !== type); };
  const send = (event) => socket.send(JSON.stringify(event));

  await until("session.queue_done"); // session.queued and session.queue_update come before it
  send({ type: "session.init", payload: { system_prompt: "Be brief." } });
  await until("session.created");
  let text = "";
  for (let at = 0; at < seconds; at += 1) {
    const unit = new Uint8Array(UNIT_BYTES);
    unit.set(sound.subarray(at * UNIT_BYTES, (at + 1) * UNIT_BYTES));
    send({ type: "input.append", input: { audio: toBase64(unit), input_id: `unit_${at}` } });
    // Every event of a unit has the input_id of the unit; the first event has chunk_index, too.
    let event;
    do {
      event = await receive();
      if (event.kind === "text") text += event.text;
      if (event.kind === "audio") play(new Float32Array(fromBase64(event.audio).buffer));
    } while (event.input_id !== `unit_${at}`);
  }
  send({ type: "session.close", reason: "user_stop" });
  for (;;) {
    const event = await receive(); // more events of the last unit may still come
    if (event.kind === "text") text += event.text;
    if (event.kind === "audio") play(new Float32Array(fromBase64(event.audio).buffer));
    if (event.type === "session.closed") return text;
  }
}

function toBase64(bytes) {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary);
}

function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

if (typeof process !== "undefined" && process.argv[2]) {
  const { readFile, writeFile } = await import("node:fs/promises");
  const [server, path, seconds] = process.argv.slice(2);
  const parts = [];
  const sound = new Uint8Array(await readFile(path));
  const text = await converse(server, sound, Number(seconds ?? 10), (samples) => {
    parts.push(Buffer.from(samples.buffer));
  });
  await writeFile(path.replace(/[^/]*$/, "answer.f32"), Buffer.concat(parts));
  console.log(text);
  process.exit(0);
}
