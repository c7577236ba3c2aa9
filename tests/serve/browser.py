"""A browser for the tests: headless Chromium, spoken to over two pipes in its own protocol (CDP)."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
)  # fmt: skip
SECONDS = 60  # that anything may take
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""  # Chromium reads commands from 3 and writes replies to 4


class Tab:
    """One page of a browser."""

    def __init__(self, commands, replies):
        self.commands, self.replies = commands, replies
        self.numbers = itertools.count(1)
        self.session = None
        self.said = []  # what the page's console and its errors said
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Give the browser a command, and return what comes of it."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            said = json.loads(self._message())
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]
            if said.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                self.said.append(said["params"])

    def open(self, address, *, width=1200, height=900, dark=False):
        """Open a page in a window of that size."""
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[colours])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, script):
        """Run some JavaScript and return its value."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, script):
        """Wait until some JavaScript is true."""
        end = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < end, f"never became true: {script}"
            time.sleep(0.05)

    def upload(self, selector, *paths):
        """Choose files in an input, as a person would."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path) for path in paths], nodeId=node)

    def picture(self):
        """Return what the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])

    def _message(self):
        message = bytearray()
        while (letter := self.replies.read(1)) != b"\0":
            assert letter, "the browser has gone"
            message += letter
        return message


@contextmanager
def browser(folder):
    """Start Chromium with a profile in that folder, and end it."""
    hear, tell = os.pipe()
    listen, speak = os.pipe()
    command = [CHROMIUM, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(hear), str(speak), *command],
        pass_fds=(hear, speak), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(hear)
    os.close(speak)
    with os.fdopen(tell, "wb") as commands, os.fdopen(listen, "rb") as replies:
        try:
            yield Tab(commands, replies)
        finally:
            process.terminate()
            process.wait(SECONDS)
