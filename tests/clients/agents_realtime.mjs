// The Realtime client of `@openai/agents-realtime` for Node, unchanged. Arguments: the base URL (ws://), and a file of
// int16 samples at 24 kHz, which is sent at once. Ends after four answers. Writes each event of the server as one line,
// and then the answers and the faults.
import { readFileSync } from "node:fs";
import { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession } from "@openai/agents-realtime";

const [url, file] = process.argv.slice(2);
const sound = readFileSync(file);
const answerCount = 4;
const answers = [];
const faults = [];

const transport = new OpenAIRealtimeWebSocket({ url: `${url}/realtime?model=gpt-realtime-2.1` });
const agent = new RealtimeAgent({ name: "assistant", instructions: "You are a helpful assistant." });
const session = new RealtimeSession(agent, { transport });

session.on("error", ({ error }) => faults.push(String(error?.message ?? error)));
session.on("audio_interrupted", () => faults.push("interrupted"));
transport.on("*", (event) => {
  console.log(JSON.stringify(event));
  if (event.type === "response.output_audio_transcript.done") answers.push(event.transcript);
});
transport.on("turn_done", () => {
  if (answers.length < answerCount) return;
  console.log(JSON.stringify({ answers, faults }));
  session.close();
});
await session.connect({ apiKey: "any" });
session.sendAudio(sound.buffer.slice(sound.byteOffset, sound.byteOffset + sound.length));
