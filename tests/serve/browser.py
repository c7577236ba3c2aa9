"""Headless Chromium for tests, controlled through the Chrome DevTools Protocol (CDP) over two pipes."""

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
TIMEOUT = 60  # seconds
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""  # Chromium reads commands from file descriptor 3 and writes replies to 4


class Tab:
    """A tab of the browser."""

    def __init__(self, commands, replies):
        self.commands, self.replies = commands, replies
        self.numbers = itertools.count(1)
        self.session = None
        self.messages = []  # console messages, uncaught exceptions and dialogs of the page
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a CDP command and return its result."""
        number = next(self.numbers)
        command = {"id": number, "method": method, "params": parameters}
        command |= {"sessionId": self.session} if self.session else {}
        self.commands.write(json.dumps(command).encode() + b"\0")
        self.commands.flush()
        while True:
            reply = json.loads(self._read_reply())
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                self.messages.append(reply["params"])

    def open(self, address, *, width=1200, height=900, dark=False):
        """Open a page in a window of this size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, script):
        """Run JavaScript and return its value."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, script):
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + TIMEOUT
        while not self.run(script):
            assert time.monotonic() < end, f"never became true: {script}"
            time.sleep(0.05)

    def upload(self, selector, *paths):
        """Choose files in the input element of a CSS selector."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path) for path in paths], nodeId=node)

    def screenshot(self):
        """Return a screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])

    def _read_reply(self):
        reply = bytearray()
        while (byte := self.replies.read(1)) != b"\0":
            assert byte, "the browser has exited"
            reply += byte
        return reply


@contextmanager
def browser(folder):
    """Start Chromium with a profile in `folder`; yield a tab."""
    command_in, command_out = os.pipe()
    reply_in, reply_out = os.pipe()
    command = [CHROMIUM, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(command_in), str(reply_out), *command],
        pass_fds=(command_in, reply_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(command_in)
    os.close(reply_out)
    with os.fdopen(command_out, "wb") as commands, os.fdopen(reply_in, "rb") as replies:
        try:
            yield Tab(commands, replies)
        finally:
            process.terminate()
            process.wait(TIMEOUT)
