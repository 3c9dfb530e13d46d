"""A real browser, driven over its own protocol: no driver to install beside it, no port opened.

Pages are opened from disk, with the network switched off; whatever they say in the console is kept.
Other tools' pages come from a server on this machine.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60  # seconds for a page to be drawn
# drawn, when no plot has changed for three frames
_SETTLED = """new Promise(async done => {
  if (typeof explorer === "object") await explorer?.drawing;
  if (typeof trainingMaps === "object") await Promise.all(trainingMaps.values());
  let before = -1, same = 0;
  const look = () => {
    const now = document.querySelectorAll("svg *").length;
    same = now === before ? same + 1 : 0;
    before = now;
    same > 3 ? done(now) : requestAnimationFrame(look);
  };
  look();
})"""


NONE_FOUND = (
    "no browser: install Debian's `chromium`, or name a Chromium's program in BROWSER_FOR_TESTS"
)


def find() -> str | None:
    """Return the browser's program: what BROWSER_FOR_TESTS names, else a Chromium on the path."""
    return os.environ.get("BROWSER_FOR_TESTS") or next(
        (path for name in NAMES if (path := shutil.which(name))), None
    )


def find_or_exit() -> str:
    """Return the browser's program, for a script; end it with status 2 if there is none."""
    program = find()
    if program is None:
        print(NONE_FOUND, file=sys.stderr)
        sys.exit(2)
    return program


class Page:
    """An open page. errors: what it said in the console that is no mere information, and
    exceptions, in order.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(1280, 900)

    def open(self, place: Path | str) -> None:
        """Open a file or an address, and wait until all that it draws at once is drawn."""
        url = place if isinstance(place, str) else place.resolve().as_uri()
        self._call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")
        self.settle()

    def settle(self) -> None:
        """Wait until all is drawn that was asked for."""
        self.evaluate(_SETTLED)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise what it comes to. An
        exception is an AssertionError.
        """
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def choose(self, id: str, value: str) -> None:
        """Choose an option as a person does, and wait until all is drawn anew."""
        element = f"document.getElementById({json.dumps(id)})"
        self.evaluate(
            f"{element}.value = {json.dumps(value)}; {element}.dispatchEvent(new Event('change'))"
        )
        self.settle()

    def point_at(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Move the pointer to a place in an element, by shares of its width and height. Returns the
        place in the window.
        """
        left, top = self.evaluate(
            f"""(element => {{
                element.scrollIntoView({{block: 'center'}});
                const box = element.getBoundingClientRect();
                return [box.x + box.width * {x}, box.y + box.height * {y}];
            }})(document.querySelector({json.dumps(selector)}))"""
        )
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)
        return left, top

    def click(self, selector: str, x: float = 0.5, y: float = 0.5, *, count: int = 1) -> None:
        """Click a place in an element."""
        self.drag(selector, (x, y), (x, y))
        if count == 2:
            self._mouse("Pressed", self.point_at(selector, x, y), 2)
            self._mouse("Released", self.point_at(selector, x, y), 2)

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the button at one place in an element, and release it at another."""
        self._mouse("Pressed", self.point_at(selector, *start), 1)
        self._mouse("Released", self.point_at(selector, *end), 1)

    def _mouse(self, what: str, place: tuple[float, float], count: int) -> None:
        x, y = place
        self._call(
            "Input.dispatchMouseEvent",
            type=f"mouse{what}",
            x=x,
            y=y,
            button="left",
            clickCount=count,
        )

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, such as `ArrowDown` or `+`."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def text(self) -> str:
        """What a person reads, the texts of plots too."""
        return str(
            self.evaluate(
                "document.body.innerText + [...document.querySelectorAll('svg text')].map(t => t.textContent)"
            )
        )

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window, in pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(
        self, path: Path, selector: str | None = None, *, before: int = 0, height: int | None = None
    ) -> None:
        """A PNG of the window, or of an element with `before` pixels above it, no matter how long
        the page is.
        """
        given: dict[str, Any] = {"format": "png", "captureBeyondViewport": selector is not None}
        if selector is not None:
            box = self.evaluate(
                f"(({{x, y, width, height}}) => [x + scrollX, y + scrollY, width, height])"
                f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
            )
            clip = {
                "x": box[0] - 8,
                "y": box[1] - before,
                "width": box[2] + 16,
                "height": (height or box[3]) + before,
            }
            given["clip"] = {**clip, "scale": 1}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **given)["data"]))

    def _call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": given}
        if self._session is not None:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._write, text) :]
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _wait_for(self, event: str) -> None:
        while self._receive().get("method") != event:
            pass

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(
                    str(given["exceptionDetails"].get("exception", given["exceptionDetails"]))
                )
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.errors.append(
                    " ".join(
                        str(argument.get("value", argument.get("description")))
                        for argument in given["args"]
                    )
                )
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.errors.append(given["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
        return message


@contextmanager
def browser(program: str, reach: str = "~NOTFOUND") -> Iterator[Page]:
    """A browser without a window, that can reach nothing, or only this machine with
    `reach="127.0.0.1"`, with an empty page. It is gone at the end, and all that it kept.
    """
    ours, theirs = os.pipe(), os.pipe()  # what it reads, what it writes

    def hand_over() -> None:  # its protocol is spoken at descriptors 3 and 4
        reading, writing = os.dup(ours[0]), os.dup(theirs[1])
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "--disable-gpu",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--host-resolver-rules=MAP * {reach}", "--hide-scrollbars", "--font-render-hinting=none",
            *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=hand_over, close_fds=False,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        try:
            yield Page(ours[1], theirs[0])
        finally:
            process.terminate()
            process.wait(TIMEOUT)
            os.close(ours[1])
            os.close(theirs[0])
