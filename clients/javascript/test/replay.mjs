// Be the client of transcripts. Usage: node replay.mjs URL, with a name in each line of the input.
// Writes a JSON object for each name: what the client has seen.

import { DuplexError, DuplexSession } from "../index.js";

async function seenIn(url, name) {
  const seen = {
    positions: [], text: "", sample_count: 0, unit_count: 0, turn_count: 0, interrupted_count: 0,
    faults: [], end: null, error: null, code: "",
  };
  const indices = new Set();
  const demands = {
    "replay.append": () => session.send(new Float32Array(16000)),
    "replay.close": () => session.close(),
  };
  const session = new DuplexSession(`${url}/?transcript=${name}`, {
    dialect: name.startsWith("a_") ? "A" : "B",
    attempts: 1,
    onQueue: (place) => seen.positions.push(place.position),
    onError: (error) => seen.faults.push(error.code),
    // The demand may come with the event that makes it possible.
    onEvent: (event) => queueMicrotask(() => demands[event.type]?.()),
  });
  try {
    await session.connect();
    for await (const output of session) {
      indices.add(output.index);
      seen.text += output.text;
      seen.sample_count += output.audio.length;
      seen.turn_count += output.endOfTurn;
      seen.interrupted_count += output.interrupted;
    }
  } catch (error) {
    if (!(error instanceof DuplexError)) throw error;
    seen.error = error.name;
    seen.code = error.code;
  }
  seen.unit_count = indices.size;
  seen.end = session.end?.reason ?? null;
  return seen;
}

let names = "";
for await (const part of process.stdin) names += part;
for (const name of names.trim().split("\n")) {
  console.log(JSON.stringify(await seenIn(process.argv[2], name)));
}
