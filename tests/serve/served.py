"""A model to serve in the tests, a server of it on loopback, and images to send."""

import io
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np
import torch
from PIL import Image

import cps
from cps.serve.middleware import Limits
from cps.serve.served_model import ServedModel
from cps.serve.server import make_app, make_server

CLIENT = httpx.Client(timeout=60)
SIZE = 8
NAMES = (["cat", "<b>dog</b>"], ["\ud800 half", 7], ["a", "b"])
LIMITS = Limits(images=6, megabytes=1, megapixels=1, at_once=4, seconds=20.0)


def colours(seed, side):
    """Return noise around a colour: there are four, one for each class of the first two tasks."""
    colour = ((220, 40, 40), (40, 220, 40), (40, 40, 220), (220, 220, 40))[seed % 4]
    noise = np.random.default_rng(seed).normal(0, 40, (side, side, 3))
    return (noise + colour).clip(0, 255).astype(np.uint8)


def learn(learner, index):
    seeds = [4 * number + 2 * index % 4 + number % 2 for number in range(32)]
    images = torch.from_numpy(np.stack([colours(seed, SIZE).transpose(2, 0, 1) for seed in seeds]))
    learner.learn(cps.Task(NAMES[index], train=(images, NAMES[index] * 16)))


def learned():
    """Return a learner of two tasks; a name of a class may hold markup, or half a character."""
    quick = cps.Training(8, cps.Adam(1e-2), batch_size=8)
    learner = cps.Learner(
        cps.Builtin("small"), rounds=1, train=quick, retrain=quick, fabric=cps.make_fabric(accelerator="cpu")
    )
    for index in range(2):
        learn(learner, index)
    learner.network.subnetworks[0].notes["day"] = "2026-11-15"
    return learner


@contextmanager
def serving_at(path, limits=LIMITS, hosts=None):
    """Serve a model on loopback in a thread, and return its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = make_server(make_app(ServedModel(path, limits), hosts=hosts))
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def picture(seed, *, side=24, kind="PNG"):
    """Return an image file."""
    file = io.BytesIO()
    Image.fromarray(colours(seed, side)).save(file, kind)
    return file.getvalue()


def post(address, *uploads, **fields):
    """Send images to be predicted."""
    parts = [("images", (name, content)) for name, content in uploads]
    return CLIENT.post(f"{address}/predict", files=parts, data=fields)


def eventually(address, is_so):
    """Ask for the server's health until it is so."""
    end = time.monotonic() + 30
    while not is_so(health := CLIENT.get(f"{address}/health").json()):
        assert time.monotonic() < end, health
        time.sleep(0.05)
    return health
