// A conversation over /v1/realtime in dialect B. Runs in a browser as it is, and in Node.
//
// Usage: node realtime_client.mjs ws://127.0.0.1:8006 speech.f32 [seconds]
// (Node 20 and 21 need the flag --experimental-websocket.) To make speech.f32 from a WAV file:
// ffmpeg -i speech.wav -f f32le -ac 1 -ar 16000 speech.f32

import { DuplexSession, INPUT_RATE } from "../../clients/javascript/index.js";

// Send `sound` (Float32Array, 16 kHz), then silence, one second at a time. Calls `play` with the
// model's speech (Float32Array, 24 kHz) and returns the model's text.
export async function converse(server, sound, seconds, play) {
  const session = new DuplexSession(server, {
    instructions: "Be brief.",
    uplink: "float32",
    resumable: true, // the conversation survives its connection
  });
  await session.connect();
  let sent = 0;
  const sendUnit = () => {
    const unit = new Float32Array(INPUT_RATE);
    unit.set(sound.subarray(sent * INPUT_RATE, (sent + 1) * INPUT_RATE));
    session.send(unit);
    sent += 1;
  };
  let text = "";
  sendUnit();
  for await (const output of session) {
    text += output.text;
    play(output.audio);
    if (output.index < sent - 1) continue; // one more part of the answer to an earlier unit
    if (sent < seconds) sendUnit();
    else session.close(); // the iteration goes on until the server has answered everything
  }
  return text;
}

if (typeof process !== "undefined" && process.argv[2]) {
  const { readFile, writeFile } = await import("node:fs/promises");
  const [server, path, seconds] = process.argv.slice(2);
  const parts = [];
  const sound = new Float32Array(new Uint8Array(await readFile(path)).buffer);
  const text = await converse(server, sound, Number(seconds ?? 10), (samples) => {
    parts.push(Buffer.from(samples.buffer));
  });
  await writeFile(path.replace(/[^/]*$/, "answer.f32"), Buffer.concat(parts));
  console.log(text);
  process.exit(0);
}
