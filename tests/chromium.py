"""A page in headless Chromium, driven over its debugging pipe: no driver, no port, no network."""

import json
import os
import select
import shutil
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: install Debian's chromium for the browser checks"
)
KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Space": 32,
    "Home": 36,
    "End": 35,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A browser, with one page that the tests of a file share."""
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


class Browser:
    """One page. `profile`: an empty folder; `seconds`: the longest that one answer may take."""

    def __init__(self, profile, seconds=60):
        self.seconds, self.said, self.count, self.events = seconds, b"", 0, []
        there, self.write = os.pipe()
        self.read, back = os.pipe()
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{there} 4>&{back}',
                "bash",
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--remote-debugging-pipe",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                "--allow-file-access-from-files",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        os.close(self.write)
        os.close(self.read)

    def message(self):
        "The next message of the browser."
        until = time.monotonic() + self.seconds
        while b"\0" not in self.said:
            ready, *_ = select.select([self.read], [], [], until - time.monotonic())
            more = os.read(self.read, 2**16) if ready else b""
            assert more, "the browser has gone or does not answer"
            self.said += more
        first, self.said = self.said.split(b"\0", 1)
        return json.loads(first)

    def send(self, method, **params):
        "The result of a command; events on the way are kept."
        self.count += 1
        call = {"id": self.count, "method": method, "params": params}
        if self.session:
            call["sessionId"] = self.session
        os.write(self.write, json.dumps(call).encode() + b"\0")
        while (answer := self.message()).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def screen(self, width, height=800, theme="light"):
        "The size of the screen, a phone's where it is narrow, and the theme that its owner likes."
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    def open(self, address):
        "Go to a page and wait until it has loaded."
        self.events.clear()
        self.send("Page.navigate", url=address)
        while all(event.get("method") != "Page.loadEventFired" for event in self.events):
            self.events.append(self.message())

    def run(self, script):
        "The value of a JavaScript expression, a promise's when it is kept."
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key, times=1):
        "A key goes down and up, as from a keyboard."
        at = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": KEYS[key],
        }
        text = {"Enter": {"text": "\r"}, "Space": {"text": " "}}.get(key, {})
        for _ in range(times):
            self.send("Input.dispatchKeyEvent", type="keyDown", **at, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **at)

    def fetched(self):
        "The addresses that were asked for since the page was opened."
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def faults(self):
        "Exceptions, errors written to the console and failed requests since the page was opened."
        return [
            event
            for event in self.events
            if event.get("method") in ("Runtime.exceptionThrown", "Network.loadingFailed")
            or event.get("method") == "Runtime.consoleAPICalled"
            and event["params"]["type"] == "error"
        ]
