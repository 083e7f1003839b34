"""A headless Chromium, spoken to through a pipe: what it loads, logs and shows."""

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import threading

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)


class Browser:
    """One page of it. `events` has what it said without being asked."""

    def __init__(self, process, to, answers):
        self._process, self._to, self._answers, self._number = process, to, answers, 0
        self.events, self._session = [], None

    def ask(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        return self._until(lambda m: m.get("id") == self._number)["result"]

    def _until(self, wanted):
        while True:
            message = self._answers.get(timeout=60)
            assert message is not None, "the browser ended"
            assert "error" not in message, message
            if wanted(message):
                return message
            self.events.append(message)

    def open(self, path, width, height=900, dark=False):
        """Load a file anew, in a page of its own."""
        self._session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Page.navigate", url=path.as_uri())
        if not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._until(lambda m: m.get("method") == "Page.loadEventFired"))

    def run(self, script):
        """The value of an expression in JavaScript."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def requests(self):
        sent = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [s["request"]["url"] for s in sent]

    def complaints(self):
        """Errors and warnings: of the page's code, of its policy, of what it could not load."""
        said = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [e for e in self.events if e.get("method") in said]

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def point(self, x, y):
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path, height=None):
        width = self.run("innerWidth")
        height = height or self.run("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def browser(folder):
    """It keeps what it has to keep in a new folder."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["bash", "-c", script, "bash", CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in), os.close(theirs_out)
    answers = queue.Queue()

    def listen():
        rest = b""
        with open(ours_in, "rb", buffering=0) as coming:
            while data := coming.read(1 << 16):
                *whole, rest = (rest + data).split(b"\0")
                for message in whole:
                    answers.put(json.loads(message))
        answers.put(None)

    thread = threading.Thread(target=listen, name="browser", daemon=True)
    thread.start()
    with open(ours_out, "wb") as to:
        one = Browser(process, to, answers)
        try:
            yield one
        finally:
            one._session = None
            with contextlib.suppress(Exception):
                one.ask("Browser.close")
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    thread.join(10)
