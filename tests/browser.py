"""A headless Chromium over its debugging pipe: pages at any width, keys, what the console said, what was fetched."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

import pytest

SILENCE_S = 120.0
"""After which a browser has hung, also on a busy machine."""

WIDTHS = (390, 1280)
"""A telephone and a desk, in CSS pixels."""


LOW_CONTRAST = """
(() => {
  const numbers = text => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4)
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1)
  const part = value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4
  const luminance = colour => 0.2126 * part(colour[0]) + 0.7152 * part(colour[1]) + 0.0722 * part(colour[2])
  const found = {}
  for (const element of document.querySelectorAll("body *")) {
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    if (element instanceof SVGElement || element.getBoundingClientRect().width < 2) continue
    const style = getComputedStyle(element)
    let ground = [255, 255, 255, 1], opacity = 1
    const parents = []
    for (let one = element; one; one = one.parentElement) parents.unshift(getComputedStyle(one))
    for (const one of parents) { ground = over(numbers(one.backgroundColor), ground); opacity *= +one.opacity }
    const ink = numbers(style.color)
    ink[3] *= opacity
    const [light, dark] = [luminance(over(ink, ground)), luminance(ground)].sort((a, b) => b - a)
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700)
    const contrast = (light + 0.05) / (dark + 0.05)
    if (contrast < (large ? 3 : 4.5)) found[element.textContent.trim().slice(0, 40)] = +contrast.toFixed(2)
  }
  return JSON.stringify(found)
})()
"""


@dataclass(kw_only=True)
class Page:
    """One tab.

    Attributes:
        complaints: errors and warnings of the console, of scripts and of refused requests.
        fetched: addresses of all requests.
    """

    _commands: int
    _answers: int
    _session: str = ""
    _number: int = 0
    _rest: bytes = b""
    _told: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the debugging protocol, and its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == number:
                assert "error" not in told, told
                return dict(told["result"])

    def wait(self, event: str) -> None:
        """Until the browser has told of an event since the page was opened: it may come before the answer to a call."""
        while event not in self._told:
            self._next()

    def open(self, address: str, *, width: int = 1280, dark: bool = False) -> None:
        """Load a page at a width."""
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=phone)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)
        # By way of an empty page: another fragment of the same address would load nothing.
        for one in ("about:blank", address):
            for seen in (self._told, self.complaints, self.fetched):
                seen.clear()
            self.send("Page.navigate", url=one)
            self.wait("Page.loadEventFired")

    def value(self, script: str) -> Any:
        """What a JavaScript expression comes to; promises are awaited."""
        told = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def low_contrast(self) -> dict[str, float]:
        """Texts that are seen and have less contrast than WCAG's level AA asks for: 4.5, or 3 where they are large."""
        return dict(json.loads(self.value(LOW_CONTRAST)))

    def press(self, key: str) -> None:
        """A key, such as ``Tab``."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        told = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select([self._answers], [], [], SILENCE_S)[0], "the browser says nothing"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has gone"
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        told: dict[str, Any] = json.loads(line)
        self._told.add(told.get("method", ""))
        params = told.get("params", {})
        match told.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"].get("text")))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.complaints.append(str(params["args"]))
            case "Network.requestWillBeSent":
                self.fetched.append(params["request"]["url"])
        return told


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a browser of its own, whose profile is in ``folder``; the test is passed over where there is none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium")
    (commands_in, commands), (answers, answers_out) = os.pipe(), os.pipe()

    # The shell (dash knows no descriptor above 9) puts the pipes where Chromium expects them.
    moved = f'exec "$@" 3<&{commands_in} 4>&{answers_out}'
    process = subprocess.Popen(
        [
            *("bash", "-c", moved, "bash", chromium, "--headless", "--no-sandbox", "--disable-gpu"),
            *("--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"),
            "about:blank",
        ],
        pass_fds=(commands_in, answers_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_in)
    os.close(answers_out)
    page = Page(_commands=commands, _answers=answers)
    try:
        targets = page.send("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in targets if one["type"] == "page")
        page._session = page.send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{part}.enable")
        yield page
    finally:
        os.close(commands)
        process.terminate()
        process.wait(timeout=SILENCE_S)
        os.close(answers)
