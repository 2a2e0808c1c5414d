"""A real Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
import soundfile
import soxr
from support.time_limits import WITHIN_S, until
from websockets.asyncio.client import ClientConnection, connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = "REQUIRE_BROWSER"
MICROPHONE_RATE = 48_000
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-device-for-media-stream",
    "--remote-debugging-port=0",
)
Json = dict[str, Any]


def chromium() -> str:
    """Return the program. Skips the test if there is none, unless REQUIRE_BROWSER=1 demands it."""
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"there is no Chromium, and {REQUIRED}=1 demands one")
    pytest.skip("Chromium is not installed")


def microphone_file(sound: Path, folder: Path, before_s: int, after_s: float) -> Path:
    """Return a sound file, with its own noise before and silence after, for Chromium's microphone.

    Chromium begins to play it when a page gets the microphone. The first second must be noise.
    """
    samples, rate = soundfile.read(sound, dtype="float32")
    target = folder / f"microphone-{sound.stem}.wav"
    resampled = soxr.resample(samples, rate, MICROPHONE_RATE)
    with soundfile.SoundFile(target, "w", MICROPHONE_RATE, 1, "PCM_16") as file:
        file.write(np.tile(resampled[:MICROPHONE_RATE], before_s))
        file.write(resampled)
        file.write(np.zeros(round(after_s * MICROPHONE_RATE), np.float32))
    return target


class Tab:
    """One page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self._modules: dict[str, bytes] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self.errors: list[str] = []
        """Uncaught exceptions, errors of the console, and violations of the policy."""
        self.frames: list[tuple[str, Json]] = []
        """Events of WebSockets: `sent` or `received`, and the event."""
        self.sent_s: list[float] = []
        """When events were sent, in seconds of a clock of the browser."""
        self.addresses: list[str] = []
        """What the page has loaded."""

    async def call(self, method: str, **parameters: Any) -> Json:
        """Call a method of the DevTools protocol."""
        return await self._browser.call(method, self._session, **parameters)

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression, which may be a promise."""
        answer = await self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if failure := answer.get("exceptionDetails"):
            raise AssertionError(failure)
        return answer["result"].get("value")

    async def open(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def until(self, condition: str, within_s: float = WITHIN_S) -> None:
        """Wait until an expression is true. It may be an element, which is true."""

        async def is_true() -> bool:
            return await self.evaluate(f"Boolean({condition})")

        await until(is_true, within_s)

    async def text(self, element: str) -> str:
        """Return the text of the element with this id."""
        return await self.evaluate(f"document.getElementById('{element}').innerText")

    async def close(self) -> None:
        """Close the page, as a person closes its tab."""
        await self.call("Page.close")

    async def click(self, element: str) -> None:
        """Click the element with this id, as a person does."""
        await self.evaluate(f"document.getElementById('{element}').click()")

    async def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    async def picture(self, name: str) -> None:
        """Write a picture of the page to the directory PICTURES, if there is one."""
        if folder := os.environ.get("PICTURES"):
            taken = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
            await asyncio.to_thread(
                (Path(folder) / f"{name}.png").write_bytes, pybase64.b64decode(taken["data"])
            )

    async def choose_file(self, element: str, file: Path) -> None:
        """Choose a file in the input with this id."""
        document = await self.call("DOM.getDocument")
        root = document["root"]["nodeId"]
        found = await self.call("DOM.querySelector", nodeId=root, selector=f"#{element}")
        await self.call("DOM.setFileInputFiles", files=[str(file)], nodeId=found["nodeId"])

    async def serve(self, path: str, script: bytes) -> None:
        """Let the page load a module that its server does not have."""
        self._modules[path] = script
        patterns = [{"urlPattern": f"*{each}"} for each in self._modules]
        await self.call("Fetch.enable", patterns=patterns)

    async def _answer(self, event: Json) -> None:
        address: str = event["request"]["url"]
        script = next(each for path, each in self._modules.items() if address.endswith(path))
        await self.call(
            "Fetch.fulfillRequest",
            requestId=event["requestId"],
            responseCode=200,
            responseHeaders=[{"name": "Content-Type", "value": "text/javascript"}],
            body=pybase64.b64encode(script).decode(),
        )

    def take(self, method: str, event: Json) -> None:
        """Keep what an event of the DevTools protocol says."""
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(str(event["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Fetch.requestPaused":
                answering = asyncio.ensure_future(self._answer(event))
                self._answers.add(answering)
                answering.add_done_callback(self._answers.discard)
            case "Network.requestWillBeSent":
                self.addresses.append(event["request"]["url"])
            case "Network.webSocketFrameSent" | "Network.webSocketFrameReceived":
                frame = event["response"]
                if frame["opcode"] == 1:
                    side = "sent" if method.endswith("Sent") else "received"
                    self.frames.append((side, orjson.loads(frame["payloadData"])))
                    if side == "sent":
                        self.sent_s.append(event["timestamp"])


class Browser:
    """A running Chromium."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._tabs: dict[str, Tab] = {}
        self._count = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, folder: Path, flags: Sequence[str] = (), *, has_permission: bool = True
    ) -> AsyncGenerator[Browser]:
        """Run a browser with a profile of its own in `folder`."""
        profile = folder / "profile"
        asked = ("--use-fake-ui-for-media-stream",) if has_permission else ()
        program = await asyncio.create_subprocess_exec(
            chromium(),
            *FLAGS,
            *asked,
            *flags,
            f"--user-data-dir={profile}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
            start_new_session=True,
        )
        try:
            address = await _endpoint(profile)
            async with connect(address, max_size=None, proxy=None) as connection:
                browser = cls(connection)
                reading = asyncio.create_task(browser._read())
                try:
                    yield browser
                finally:
                    reading.cancel()
                    await asyncio.wait({reading})
        finally:
            if program.returncode is None:
                os.killpg(program.pid, 9)
            await program.wait()

    async def call(self, method: str, session: str = "", **parameters: Any) -> Json:
        """Call a method of the DevTools protocol. Raises AssertionError if it fails."""
        self._count += 1
        answer = asyncio.get_running_loop().create_future()
        self._waiting[self._count] = answer
        message: Json = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        await self._connection.send(orjson.dumps(message), text=True)
        async with asyncio.timeout(WITHIN_S):
            return await answer

    async def tab(self) -> Tab:
        """Open an empty tab."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        tab = Tab(self, attached["sessionId"])
        self._tabs[attached["sessionId"]] = tab
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        return tab

    async def _read(self) -> None:
        async for text in self._connection:
            message: Json = orjson.loads(text)
            if answer := self._waiting.pop(message.get("id", 0), None):
                if answer.cancelled():
                    continue
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]))
                else:
                    answer.set_result(message["result"])
            elif tab := self._tabs.get(message.get("sessionId", "")):
                tab.take(message["method"], message["params"])


async def _endpoint(profile: Path) -> str:
    """Wait until the browser has written where it listens; return the address."""
    file = profile / "DevToolsActivePort"

    async def is_written() -> bool:
        return file.exists() and len(file.read_text().splitlines()) == 2

    await until(is_written, WITHIN_S)
    port, path = file.read_text().splitlines()
    return f"ws://127.0.0.1:{port}{path}"
