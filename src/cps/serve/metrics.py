"""Metrics of the server in the text format of Prometheus.

They are counted in the event loop, so no lock is needed. Labels have a fixed set of values: clients cannot add more.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from itertools import accumulate
from typing import Any

import cps
from cps.serve.middleware import App, Message, Receive, Send
from cps.serve.schemas import ImageReply
from cps.serve.served_model import ServedModel

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATHS = ("/", "/docs", "/openapi.json", "/predict", "/model", "/confusion.svg", "/health", "/metrics")
METHODS = ("GET", "HEAD", "POST")
OTHER = "other"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # upper bounds of the buckets


class ServerMetrics:
    """Count requests and images; `text` also describes the model in use."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()  # (method, path, status)
        self._images: Counter[str] = Counter()  # by task, from "1", or "unknown" or "unreadable"
        self._buckets = [0] * (len(SECONDS) + 1)
        self._seconds = 0.0

    def count_request(self, method: str, path: str, status: int | None, seconds: float) -> None:
        """Count a request; `status` is None if the client left before the reply."""
        method, path = (method if method in METHODS else OTHER), (path if path in PATHS else OTHER)
        self._requests[method, path, "none" if status is None else str(status)] += 1
        if path == "/predict":
            self._buckets[bisect_left(SECONDS, seconds)] += 1
            self._seconds += seconds

    def count_images(self, replies: Iterable[ImageReply]) -> None:
        """Count the images of a reply."""
        for reply in replies:
            self._images[
                "unreadable" if reply.error is not None else "unknown" if reply.unknown else str(reply.task)
            ] += 1

    def text(self, served: ServedModel, active_requests: int) -> str:
        """Return all metrics, each with its help and type."""
        model = served.model
        lines = [
            *_metric("cps_info", "gauge", "The version of cps.", {f'version="{cps.__version__}"': 1}),
            *_metric(
                "cps_requests_total",
                "counter",
                "Requests by method, path and HTTP status.",
                {
                    f'method="{method}",path="{path}",status="{status}"': count
                    for (method, path, status), count in sorted(self._requests.items())
                },
            ),
            *self._histogram(),
            *_metric("cps_requests_active", "gauge", "Requests with images in progress.", {"": active_requests}),
            *_metric(
                "cps_images_total",
                "counter",
                "Images by the task that was selected for them, or unknown or unreadable.",
                {f'task="{task}"': count for task, count in sorted(self._images.items())},
            ),
            *_metric("cps_model_tasks", "gauge", "Tasks of the model.", {"": len(model.learner.classes)}),
            *_metric("cps_model_classes", "gauge", "Classes of the model.", {"": sum(map(len, model.learner.classes))}),
            *_metric("cps_model_loaded_timestamp_seconds", "gauge", "When the model was loaded.",
                     {"": round(model.loaded_at.timestamp(), 3)}),
            *_metric("cps_model_is_old", "gauge", "1 if the model file changed and could not be loaded, else 0.",
                     {"": int(served.problem is not None)}),
        ]  # fmt: skip
        return "\n".join([*lines, ""])

    def _histogram(self) -> list[str]:
        """Return the metric of the time of predictions: how many took at most the seconds of each bucket."""
        name = "cps_predict_seconds"
        totals = list(accumulate(self._buckets))
        bounds = [*map(str, SECONDS), "+Inf"]
        return [
            *_head(name, "histogram", "Seconds of requests to /predict."),
            *(f'{name}_bucket{{le="{bound}"}} {total}' for bound, total in zip(bounds, totals, strict=True)),
            f"{name}_sum {self._seconds:.6f}",
            f"{name}_count {totals[-1]}",
        ]


class RequestCounter:
    """Wrap an ASGI application and count its requests when their reply starts."""

    def __init__(self, app: App, metrics: ServerMetrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request to the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, is_counted = time.monotonic(), False

        def count(status: int | None) -> None:
            self.metrics.count_request(scope["method"], scope["path"], status, time.monotonic() - start)

        async def count_and_send(message: Message) -> None:
            nonlocal is_counted
            if message["type"] == "http.response.start":
                is_counted = True
                count(message["status"])
            await send(message)

        await self.app(scope, receive, count_and_send)
        if not is_counted:
            count(None)


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _metric(name: str, kind: str, about: str, values: Mapping[str, float]) -> list[str]:
    """Return the lines of a metric; `values` are its numbers by their labels."""
    numbers = [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in values.items()]
    return [*_head(name, kind, about), *numbers]
