// The Live client of `openai` for Node, unchanged. Arguments: the base URL, the sample rate, and a file of int16
// samples, which is sent in pieces of a second. Writes each event of the server as one line, and then all texts of the
// model and the close reason.
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { LiveWS } from "openai/resources/live/ws";

const [baseURL, rate, file] = process.argv.slice(2);
const sound = readFileSync(file);
const secondBytes = 2 * Number(rate);
const unitCount = Math.floor(sound.length / secondBytes);
let text = "";
const live = new LiveWS(new OpenAI({ apiKey: "x", baseURL }));

live.on("error", (error) => {
  console.error(String(error));
  process.exit(1);
});
live.on("session.started", () => {
  for (let unit = 0; unit < unitCount; unit++) {
    const piece = sound.subarray(unit * secondBytes, (unit + 1) * secondBytes);
    live.send({ type: "session.input_audio.append", audio: piece.toString("base64") });
  }
});
live.on("event", (event) => console.log(JSON.stringify(event)));
live.on("session.output_transcript.delta", (event) => (text += event.delta));
live.on("session.usage.updated", (event) => {
  if (event.usage.seconds >= unitCount) live.send({ type: "session.close" });
});
live.on("session.closed", (event) => {
  console.log(JSON.stringify({ text, reason: event.reason }));
  live.close();
});
live.socket.on("open", () => {
  const format = { type: "audio/pcm", rate: Number(rate) };
  const session = { model: "gpt-live-1", instructions: "You are a helpful assistant.", audio: { format } };
  live.send({ type: "session.start", session });
});
