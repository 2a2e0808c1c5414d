// The settings of the page: what the server offers, what the person chose, and where it is kept.
// The key stays in sessionStorage, everything else in localStorage. Voices are not kept.

const STORE = "duplane.talk";
const KEY_STORE = "duplane.key";
const VOICE_S = 30;
const VOICE_RATE = 16000;
const PROMPT = "You are a helpful assistant.";
const KEPT = ["prompt", "preset", "penalty", "microphone", "speaker", "camera-device", "delay", "dialect"];
const SWITCHES = ["echo", "noise", "gain", "camera"];
const CONSENT = {
  always: "This server records each conversation. I agree.",
  unless_refused: "The server may record this conversation.",
  on_request: "The server may record this conversation.",
};

const find = (id) => document.getElementById(id);

/** Thrown if the server wants a key, or another one. */
export class KeyError extends Error {}

export class Settings {
  #defaults = { playback_delay_ms: 200, records: null };
  #presets = [];
  isLoaded = false;
  onMicrophone = () => {}; // called if the person chooses another one

  constructor() {
    const kept = stored();
    for (const id of KEPT) if (id in kept) setValue(find(id), kept[id]);
    for (const id of SWITCHES) if (id in kept) find(id).checked = kept[id];
    find("prompt").value ||= PROMPT;
    find("settings").addEventListener("change", () => this.#store());
    find("settings").addEventListener("submit", (event) => event.preventDefault());
    find("preset").addEventListener("change", () => this.#usePreset());
    for (const id of ["microphone", "echo", "noise", "gain"]) {
      find(id).addEventListener("change", () => this.onMicrophone());
    }
    find("speaker-row").hidden = !("setSinkId" in AudioContext.prototype);
  }

  /** Ask the server what it offers. Throws KeyError, and Error with a sentence. */
  async load() {
    this.#defaults = await ask("/api/frontend_defaults");
    this.isLoaded = true;
    find("key-row").hidden = true;
    this.#showConsent();
    const presets = await ask("/api/presets");
    this.#presets = Object.entries(presets).flatMap(([mode, all]) => {
      return all.map((preset) => ({ mode, ...preset }));
    });
    const named = this.#presets.map(({ id, name }, index) => [String(index), name ?? id]);
    fill(find("preset"), [["", "None"], ...named], stored().preset);
    find("preset-row").hidden = named.length === 0;
    await this.#listVoices();
  }

  async #listVoices() {
    const { ref_audios: voices } = await ask("/api/assets/ref_audio");
    fill(find("voice"), [
      ["", "The model's own"],
      ["default", "The server's default"],
      ["preset", "That of the preset"],
      ...voices.map(({ id, name }) => [`stored:${id}`, name]),
    ]);
  }

  /** The server wants a key: ask for it. `use` is called when there is one. */
  askForKey(use) {
    find("key-row").hidden = false;
    find("use-key").onclick = () => {
      sessionStorage.setItem(KEY_STORE, find("key").value.trim());
      find("key").value = "";
      use();
    };
  }

  /** List microphones, loudspeakers and cameras. They have names once the person has agreed. */
  async listDevices() {
    const devices = await navigator.mediaDevices.enumerateDevices();
    const lists = { audioinput: "microphone", audiooutput: "speaker", videoinput: "camera-device" };
    for (const [kind, id] of Object.entries(lists)) {
      const found = devices.filter((device) => device.kind === kind && device.deviceId);
      const named = found.map(({ deviceId, label }, at) => [deviceId, label || `Device ${at + 1}`]);
      fill(find(id), [["", "The usual one"], ...named], stored()[id]);
    }
  }

  #showConsent() {
    const { records } = this.#defaults;
    find("consent-row").hidden = !records;
    find("consent-text").textContent = CONSENT[records] ?? "";
  }

  #usePreset() {
    const preset = this.#presets[find("preset").value];
    if (!preset) return;
    find("prompt").value = promptOf(preset) || PROMPT;
    if (preset.ref_audio) find("voice").value = "preset";
    this.#store();
  }

  #store() {
    const kept = Object.fromEntries(KEPT.map((id) => [id, find(id).value]));
    for (const id of SWITCHES) kept[id] = find(id).checked;
    try {
      localStorage.setItem(STORE, JSON.stringify(kept));
    } catch {
      // The browser keeps nothing, so the settings last as long as the page.
    }
  }

  /** Why the conversation may not begin; empty if it may. */
  get refusal() {
    const mustAgree = this.#defaults.records === "always" && !this.hasConsent;
    return mustAgree ? "This server records each conversation: agree to it, or do not start." : "";
  }

  /** Whether the person agrees that the server records the conversation. */
  get hasConsent() {
    return find("consent").checked;
  }

  get microphone() {
    return {
      deviceId: find("microphone").value,
      echo: find("echo").checked,
      noise: find("noise").checked,
      gain: find("gain").checked,
    };
  }

  get speaker() {
    return find("speaker").value;
  }

  get hasCamera() {
    return find("camera").checked;
  }

  get camera() {
    return find("camera-device").value;
  }

  get firstDelayMs() {
    return this.#defaults.playback_delay_ms;
  }

  /** The delay that the person chose; null if it follows the network. */
  get delayMs() {
    return find("delay").value === "" ? null : Number(find("delay").value);
  }

  /** How long the server lets a conversation last, in seconds; null if it does not say. */
  get durationS() {
    return this.#defaults.session_s?.[this.hasCamera ? "video" : "audio"] ?? null;
  }

  get url() {
    const url = new URL("/v1/realtime", location.href);
    const { records } = this.#defaults;
    if (records) url.searchParams.set("recording", this.hasConsent ? "on" : "off");
    return url.href;
  }

  /** The options of a DuplexSession. Throws Error with a sentence if the voice cannot be read. */
  async session() {
    const penalty = find("penalty").value;
    return {
      dialect: find("dialect").value,
      mode: this.hasCamera ? "video" : "audio",
      instructions: find("prompt").value,
      voice: await this.#voice(),
      options: penalty === "" ? {} : { length_penalty: Number(penalty) },
      key: sessionStorage.getItem(KEY_STORE) || undefined,
    };
  }

  async #voice() {
    const [file] = find("voice-file").files;
    if (file) return voiceOf(file);
    const chosen = find("voice").value;
    if (chosen === "default") return bytes((await ask("/api/default_ref_audio")).base64);
    if (chosen.startsWith("stored:")) {
      const id = encodeURIComponent(chosen.slice("stored:".length));
      return bytes((await ask(`/api/assets/ref_audio/${id}`)).base64);
    }
    const preset = this.#presets[find("preset").value];
    if (chosen !== "preset" || !preset?.ref_audio) return undefined;
    const path = `/api/presets/${preset.mode}/${encodeURIComponent(preset.id)}/audio`;
    return bytes((await ask(path)).ref_audio.data);
  }
}

// The text of a preset's instructions: a text, or the texts among parts.
function promptOf({ system_prompt: prompt, system_content: content }) {
  if (typeof prompt === "string") return prompt;
  if (!Array.isArray(content)) return "";
  return content
    .filter((part) => typeof part.text === "string")
    .map((part) => part.text)
    .join("");
}

/** Return the samples of a sound file: mono, float32, 16 kHz, the first 30 s. */
async function voiceOf(file) {
  const context = new OfflineAudioContext(1, 1, VOICE_RATE);
  let sound;
  try {
    sound = await context.decodeAudioData(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no sound that the browser can read.`);
  }
  const mono = new Float32Array(Math.min(sound.length, VOICE_S * VOICE_RATE));
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    const samples = sound.getChannelData(channel);
    for (let at = 0; at < mono.length; at += 1) mono[at] += samples[at] / sound.numberOfChannels;
  }
  return new Uint8Array(mono.buffer);
}

async function ask(path) {
  const key = sessionStorage.getItem(KEY_STORE);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let answer;
  try {
    answer = await fetch(path, { headers });
  } catch {
    throw new Error("The server cannot be reached.");
  }
  if (answer.status === 401) {
    throw new KeyError(key ? "The server does not accept this key." : "This server asks for a key.");
  }
  if (!answer.ok) throw new Error(`The server refuses ${path} with status ${answer.status}.`);
  return answer.json();
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function fill(select, options, chosen = select.value) {
  select.replaceChildren(...options.map(([value, name]) => new Option(name, value)));
  setValue(select, chosen);
}

function setValue(control, value) {
  control.value = value;
  if (control.selectedIndex === -1) control.selectedIndex = 0;
}
