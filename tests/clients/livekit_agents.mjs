// LiveKit's plugin for OpenAI for Node, unchanged and without a room. `by_hand.sh` installs it. Arguments: `realtime`
// or `live`, the base URL, and a WAV file, which is sent at real-time pace. Writes the text and the length of each
// utterance of the model, and the faults.
import { readFileSync } from "node:fs";
import { initializeLogger, llm } from "@livekit/agents";
import * as openai from "@livekit/agents-plugin-openai";
import { AudioFrame } from "@livekit/rtc-node";

const [service, url, file] = process.argv.slice(2);
const wav = readFileSync(file);
const rate = wav.readUInt32LE(24);
const pieceSamples = rate / 10;
const tailPieces = 50;
initializeLogger({ pretty: false, level: "warn" });

function modelOf() {
  if (service === "live") {
    const model = new openai.realtime.GPTLiveModel({ baseURL: url, apiKey: "any", delegation: "client" });
    return new llm.DuplexRealtimeAdapter(model);
  }
  const baseURL = url.replace("http", "ws");
  return new openai.realtime.RealtimeModel({ baseURL, apiKey: "any", model: "gpt-realtime-2.1" });
}

async function hear(generation) {
  for await (const message of generation.messageStream) {
    const text = (async () => {
      let whole = "";
      for await (const part of message.textStream) whole += typeof part === "string" ? part : part.text;
      return whole;
    })();
    let seconds = 0;
    for await (const frame of message.audioStream) seconds += frame.samplesPerChannel / frame.sampleRate;
    console.log(`${JSON.stringify(await text)}, ${seconds.toFixed(2)} s`);
  }
}

const session = modelOf().session();
const hearing = [];
session.on("generation_created", (generation) => hearing.push(hear(generation)));
session.on("error", (event) => console.log("error:", event.error?.message ?? event));
await session._updateSession("You are a helpful assistant.", llm.ChatContext.empty(), llm.ToolContext.empty());
const sound = wav.subarray(44);
const samples = new Int16Array(sound.length / 2 + tailPieces * pieceSamples);
samples.set(new Int16Array(sound.buffer.slice(sound.byteOffset, sound.byteOffset + sound.length)));
const begin = performance.now();
for (let at = 0; at + pieceSamples <= samples.length; at += pieceSamples) {
  const due = begin + (1000 * at) / rate;
  await new Promise((resolve) => setTimeout(resolve, Math.max(0, due - performance.now())));
  session.pushAudio(new AudioFrame(samples.slice(at, at + pieceSamples), rate, 1, pieceSamples));
}
await session.close();
console.log(`${hearing.length} utterances`);
process.exit(0);
