"""The talk page in a real browser, before an edge whose model follows a script."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import soundfile
from support.browser import Browser, Tab
from support.paths import ROOT
from support.time_limits import WITHIN_S, until

from duplane.fabric.v1 import session_pb2

QUESTIONS = ROOT / "tools/duplane/tools/talk/samples/questions.wav"
ANSWER_RATE = 24_000
Sound = np.ndarray[Any, np.dtype[np.float32]]
TAP = b"""
registerProcessor("tap", class extends AudioWorkletProcessor {
  #sound = new Float32Array(4096);
  #filled = 0;

  process([[channel]]) {
    if (!channel) return true;
    this.#sound.set(channel, this.#filled);
    this.#filled += channel.length;
    if (this.#filled < this.#sound.length) return true;
    const end = currentFrame + channel.length;
    this.port.postMessage({ frame: end - this.#filled, sound: this.#sound.slice() });
    this.#filled = 0;
    return true;
  }
});
"""
# What the page plays and offers, and its microphones, are kept where a test finds them.
OBSERVE = """
window.played = [];
window.loudCount = 0; // samples that are not 0
window.lateS = 0; // how much later sound of a turn came than it would be due without a delay
window.offered = [];
window.microphones = [];
const offer = URL.createObjectURL;
URL.createObjectURL = (blob) => {
  window.offered.push(blob);
  return offer.call(URL, blob);
};
const ask = navigator.mediaDevices?.getUserMedia;
if (ask) {
  navigator.mediaDevices.getUserMedia = async (wanted) => {
    const stream = await ask.call(navigator.mediaDevices, wanted);
    window.microphones.push(stream);
    return stream;
  };
}
// The frame at which a key was pressed.
addEventListener("keydown", () => {
  if (!window.context) return;
  window.keyFrame = window.context.currentTime * window.context.sampleRate;
}, true);
const Node = AudioWorkletNode;
window.AudioWorkletNode = class extends Node {
  constructor(context, name, options) {
    super(context, name, options);
    if (name !== "playback") return;
    window.context = context;
    const post = this.port.postMessage.bind(this.port);
    let dueS = null; // when the next sound of the running turn is due
    this.port.postMessage = (message) => {
      if (message.sound) {
        dueS ??= context.currentTime;
        window.lateS = Math.max(window.lateS, context.currentTime - dueS);
        dueS += message.sound.length / context.sampleRate;
      } else dueS = null;
      post(message);
    };
    context.audioWorklet.addModule("/pages/tap.js").then(() => {
      const tap = new Node(context, "tap", { numberOfOutputs: 0 });
      tap.port.onmessage = ({ data }) => {
        window.played.push(data);
        for (const level of data.sound) window.loudCount += level !== 0;
      };
      this.connect(tap);
    });
  }
};
"""
# The sound of all turns as the page plays it, in one piece, without the silence between them.
EXPECTED = """
(async (turns) => {
  const { Resampler } = await import("/pages/client/sound.js");
  const parts = [];
  for (const turn of turns) {
    const resampler = new Resampler(24000, window.context.sampleRate);
    for (const text of turn) {
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      parts.push(resampler.add(new Float32Array(bytes.buffer)));
    }
    parts.push(resampler.tail());
  }
  return encode(parts);
})
"""
ENCODE = """
window.encode = (parts) => {
  const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) { all.set(part, at); at += part.length; }
  return encodeBytes(all.buffer);
};
window.encodeBytes = (buffer) => {
  const bytes = new Uint8Array(buffer);
  let text = "";
  for (let from = 0; from < bytes.length; from += 8192) {
    text += String.fromCharCode(...bytes.subarray(from, from + 8192));
  }
  return btoa(text);
};
"""


def floats(text: str) -> Sound:
    return np.frombuffer(pybase64.b64decode(text), np.float32)


def quiet_microphone(folder: Path) -> Path:
    """Return a file of a quiet noise for the microphone."""
    noise = np.random.default_rng(1).normal(0, 0.01, 48_000 * 4).astype(np.float32)
    path = folder / "noise.wav"
    soundfile.write(path, noise, 48_000, subtype="PCM_16")
    return path


def speech(seed: int) -> bytes:
    """Return one second of noise, which differs from that of any other seed."""
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, ANSWER_RATE)
    return noise.astype("<f4").tobytes()


def check_each_sample_once(expected: Sound, played: Sound) -> None:
    """Check that nothing was lost, played twice or changed. Gaps do not matter."""
    loud = played[np.flatnonzero(played)]
    wanted = expected[np.flatnonzero(expected)]
    assert len(loud) == len(wanted)
    assert np.abs(loud - wanted).max() < 1e-7


class Script:
    """Speaks in the units of each turn, and listens to all others."""

    def __init__(self, turns: Sequence[range]) -> None:
        self.turns = turns
        self.heard: list[session_pb2.Unit] = []

    def __call__(self, unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
        self.heard.append(unit)
        if unit.force_listen:  # the rest of a turn is not said any more
            self.turns = [turn for turn in self.turns if unit.sequence not in turn]
        delta = session_pb2.Delta(sequence=unit.sequence, listen=session_pb2.Listen())
        for turn in self.turns:
            if unit.sequence in turn:
                delta = session_pb2.Delta(
                    sequence=unit.sequence,
                    speech=session_pb2.Speech(
                        text=f"word{unit.sequence} ", audio=speech(unit.sequence)
                    ),
                    end_of_turn=unit.sequence == turn[-1],
                )
        delta.state_change.SetInParent()  # so that the conversation can move
        return [session_pb2.ConverseResponse(delta=delta)]


class Page:
    """The talk page in one tab."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab

    async def state(self) -> str:
        return await self.tab.evaluate("document.body.dataset.state ?? ''")

    async def until_state(self, *states: str, within_s: float = WITHIN_S) -> None:
        async def is_there() -> bool:
            return await self.state() in states

        try:
            await until(is_there, within_s)
        except TimeoutError:
            said = await self.tab.text("status")
            last = [event["type"] for _, event in self.tab.frames[-5:]]
            raise AssertionError(f"{await self.state()}, not {states}: {said} {last}") from None

    async def status(self) -> str:
        return await self.tab.text("status")

    async def start(self) -> None:
        await self.until_state("idle", "ended")
        await self.tab.click("start")

    async def talk(self) -> None:
        """Start, and wait until the conversation runs."""
        await self.start()
        await self.until_state("talking")

    async def end(self) -> None:
        """End the running conversation."""
        await self.tab.click("start")
        await self.until_state("ended")

    async def leave_sound_unchanged(self) -> None:
        """Switch off what changes the sound of the microphone."""
        await self.until_state("idle")
        for setting in ("echo", "noise", "gain"):
            await self.tab.click(setting)

    async def give_key(self, key: str) -> None:
        """Type a key and use it."""
        await self.tab.evaluate(f"document.getElementById('key').value = '{key}'")
        await self.tab.click("use-key")

    async def words(self) -> list[str]:
        """Return the text of each turn."""
        script = "[...document.querySelectorAll('#text p')].map((each) => each.textContent)"
        return await self.tab.evaluate(script)

    async def until_words(self, count: int, within_s: float = WITHIN_S) -> None:
        """Wait until the page shows the text of so many turns."""

        async def is_there() -> bool:
            return len(await self.words()) >= count

        await until(is_there, within_s)

    async def until_loud(self, count: int) -> None:
        """Wait until so many samples that are not 0 were played."""
        await self.tab.until(f"window.loudCount >= {count}")

    async def played(self) -> Sound:
        """Return all samples that were played, with the silence."""
        await self.tab.evaluate(ENCODE)
        return floats(await self.tab.evaluate("encode(window.played.map(({ sound }) => sound))"))

    async def offered(self, index: int) -> bytes:
        """Return a file that the page offers."""
        await self.tab.evaluate(ENCODE)
        script = f"offered.at({index}).arrayBuffer().then(encodeBytes)"
        return pybase64.b64decode(await self.tab.evaluate(script))

    async def expected(self, turns: Sequence[Sequence[bytes]]) -> Sound:
        """Return what these sounds become at the rate of the browser."""
        await self.tab.evaluate(ENCODE)
        texts = [[pybase64.b64encode(sound).decode() for sound in turn] for turn in turns]
        return floats(await self.tab.evaluate(f"({EXPECTED})({texts})"))


@contextlib.asynccontextmanager
async def browser(
    folder: Path, *flags: str, microphone: Path | None = None, has_permission: bool = True
) -> AsyncGenerator[Browser]:
    """Run a browser whose microphone plays a file once, or without one a quiet noise.

    Without the permission the browser asks a person whether a page may use the microphone.
    """
    file = f"{microphone}%noloop" if microphone else quiet_microphone(folder)
    capture = f"--use-file-for-fake-audio-capture={file}"
    async with Browser.running(folder, (capture, *flags), has_permission=has_permission) as running:
        yield running


async def open_page(running: Browser, address: str, host: str = "localhost") -> Page:
    """Open the page of an edge in a new tab, and observe what it plays."""
    tab = await running.tab()
    await tab.call("Page.addScriptToEvaluateOnNewDocument", source=OBSERVE)
    await tab.serve("/pages/tap.js", TAP)
    port = address.rpartition(":")[2]
    await tab.open(f"http://{host}:{port}/")
    return Page(tab)
