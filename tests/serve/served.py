"""A model for the server tests, a server of it on the loopback interface, and images to upload."""

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
from cps.data.decode import decode_image
from cps.serve.middleware import Limits
from cps.serve.served_model import ServedModel
from cps.serve.server import make_app, make_server

CLIENT = httpx.Client(timeout=60)
SIZE = 8
NAMES = (["cat", "<b>dog</b>"], ["\ud800 half", 7], ["a", "b"])
LIMITS = Limits(images=6, megabytes=1, megapixels=1, concurrent_requests=4, seconds=20.0)


def noisy_colour(seed, side):
    """Return noise around one of four colours, one for each class of the first two tasks."""
    colour = ((220, 40, 40), (40, 220, 40), (40, 40, 220), (220, 220, 40))[seed % 4]
    noise = np.random.default_rng(seed).normal(0, 40, (side, side, 3))
    return (noise + colour).clip(0, 255).astype(np.uint8)


def learn_task(learner, index):
    seeds = [4 * number + 2 * index % 4 + number % 2 for number in range(32)]
    images = torch.from_numpy(np.stack([noisy_colour(seed, SIZE).transpose(2, 0, 1) for seed in seeds]))
    learner.learn(cps.Task(NAMES[index], train=(images, NAMES[index] * 16)))


def learn_two_tasks():
    """Return a learner of two tasks; one class name has HTML markup, one a lone surrogate."""
    quick = cps.Training(8, cps.Adam(1e-2), batch_size=8)
    learner = cps.Learner(
        cps.Architecture("small"), rounds=1, train=quick, retrain=quick, fabric=cps.make_fabric(accelerator="cpu")
    )
    for index in range(2):
        learn_task(learner, index)
    learner.annotate(0, day="2026-11-15")
    learner.annotate(
        1, **{"confusion": {"7": {"7": 3, "cat": 1}, "cat": {"cat": 2}}, "image digests": {"7": "AAAAAAAA"}}
    )
    return learner


@contextmanager
def serve(path, limits=LIMITS, hosts=None):
    """Serve a model file on the loopback interface in a thread; yield the address."""
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


def image_file(seed, *, side=24, kind="PNG"):
    """Return the bytes of an image file."""
    file = io.BytesIO()
    Image.fromarray(noisy_colour(seed, side)).save(file, kind)
    return file.getvalue()


def decode(contents):
    """Return image files as the pixels that the server predicts."""
    return torch.stack([torch.from_numpy(decode_image(io.BytesIO(content), SIZE)) for content in contents])


def post_images(address, *uploads, **fields):
    """Post images to /predict."""
    parts = [("images", (name, content)) for name, content in uploads]
    return CLIENT.post(f"{address}/predict", files=parts, data=fields)


def encodable(names):
    """Return class names as JSON can hold them."""
    return [name.encode("utf-8", "replace").decode() if isinstance(name, str) else name for name in names]


def wait_for_health(address, condition):
    """Request /health until the condition holds for it; return it."""
    end = time.monotonic() + 30
    while not condition(health := CLIENT.get(f"{address}/health").json()):
        assert time.monotonic() < end, health
        time.sleep(0.05)
    return health
