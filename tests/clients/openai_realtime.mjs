// The Realtime client of `openai` for Node, unchanged. Arguments: the base URL (https://), and a file of int16 samples
// at 24 kHz, which is sent at once. Ends with the first answer. Writes each event of the server as one line, and then
// the answers and the faults.
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [baseURL, file] = process.argv.slice(2);
const client = new OpenAI({ apiKey: "any", baseURL });
const realtime = new OpenAIRealtimeWS({ model: "gpt-realtime-2.1" }, client);
const faults = [];

realtime.on("error", (error) => faults.push(String(error)));
realtime.on("event", (event) => console.log(JSON.stringify(event)));
realtime.on("session.created", () => {
  const session = { type: "realtime", instructions: "You are a helpful assistant." };
  realtime.send({ type: "session.update", session });
  realtime.send({ type: "input_audio_buffer.append", audio: readFileSync(file).toString("base64") });
});
realtime.on("response.done", (event) => {
  const answers = event.response.output.flatMap((item) => item.content.map((part) => part.transcript));
  console.log(JSON.stringify({ answers, faults }));
  realtime.close();
});
