"""The HTTP server: a web page for people and a JSON API for programs."""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import torch
import uvicorn
from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

import cps
from cps.data.decode import ImageError
from cps.serve.metrics import CONTENT_TYPE, RequestCounter, ServerMetrics
from cps.serve.middleware import App, RequestError, RequestGuard
from cps.serve.schemas import ErrorReply, HealthReply, ImageReply, ModelReply, PredictReply, UnreadableReply
from cps.serve.served_model import LoadedModel, ServedModel
from cps.serve.uploads import Upload, decode_upload

Result = TypeVar("Result")

WORKERS = 2  # threads; each decodes one image at a time, which may take much memory
RELOAD_SECONDS = 1.0  # between two checks whether the model file has changed
MAX_CONNECTIONS = 256
FIELDS = {"images", "group", "task"}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": UnreadableReply if status == 415 else ErrorReply, "description": text}
    for status, text in {
        400: "The body is not a valid form.",
        408: "The images did not arrive in time.",
        413: "The request has too many bytes or images.",
        415: "No image can be read; the reply has an error for each.",
        422: "A field is missing, unknown or invalid, or the task does not exist.",
        503: "The server is busy; try again after the seconds in Retry-After.",
    }.items()
}


def make_app(served: ServedModel, *, hosts: Collection[str] | None = None) -> App:
    """Return the server as an ASGI application; `hosts` are the accepted host names, None accepts any."""
    workers = ThreadPoolExecutor(WORKERS, "cps-serve")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reloading = asyncio.create_task(_reload_on_change(served))
        yield
        reloading.cancel()
        with suppress(asyncio.CancelledError):
            await reloading
        workers.shutdown(cancel_futures=True)

    app = FastAPI(
        title="cps", version=cps.__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        description="Classify images with one network that has learned several tasks.",
    )  # fmt: skip
    guard, metrics = RequestGuard(app, served.limits, hosts), ServerMetrics()
    _add_error_handlers(app)
    _add_page(app, "/", "page.html")
    _add_page(app, "/docs", "docs.html")

    @app.post("/predict", response_model=PredictReply, responses=ERRORS)
    async def predict(
        images: Annotated[list[UploadFile], File(description="One or more image files.")],
        request: Request,
        group: Annotated[bool, Form(description="True if all images share a task.")] = False,
        task: Annotated[int | None, Form(ge=1, description="The task of all images, from 1, if it is known.")] = None,
    ) -> PredictReply | JSONResponse:
        """Predict each image: its class, its task and the prediction of every subnetwork, or an error."""
        limits, model = served.limits, served.model
        _check_fields(set(await request.form()), task, len(model.learner.classes))
        if len(images) > limits.images:
            raise RequestError(413, f"At most {limits.images} images are allowed, got {len(images)}: send fewer.")
        uploads = [Upload(image.filename or "", await image.read()) for image in images]
        work = partial(_predict_uploads, served, model, uploads, group=group, task=None if task is None else task - 1)
        reply = await _run_with_timeout(workers, work, limits.seconds)
        metrics.count_images(reply.images)
        errors = [image.error for image in reply.images if image.error is not None]
        if len(errors) < len(reply.images):
            return reply
        unreadable = UnreadableReply(error=errors[0], **dict(reply))
        return JSONResponse(unreadable.model_dump(by_alias=True), 415)

    _add_model_and_health(app, served, guard)

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", include_in_schema=False)
    async def get_metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(metrics.text(served, guard.active_requests), headers={"content-type": CONTENT_TYPE})

    return RequestCounter(guard, metrics)


def make_server(app: App) -> uvicorn.Server:
    """Return a uvicorn server of the application; `run(sockets=[...])` starts it."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=5, ws="none",
        limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=5,
    )  # fmt: skip
    return uvicorn.Server(config)


def _check_fields(fields: set[str], task: int | None, num_tasks: int) -> None:
    """Raise `RequestError` for an unknown form field or task."""
    unknown = fields - FIELDS
    if unknown:
        raise RequestError(422, f"Unknown field '{min(unknown)[:40]}': choose from {', '.join(sorted(FIELDS))}.")
    if task is not None and task > num_tasks:
        raise RequestError(422, f"Unknown task {task}: choose from 1 to {num_tasks}.")


def _predict_uploads(
    served: ServedModel, model: LoadedModel, uploads: list[Upload], *, group: bool, task: int | None
) -> PredictReply:
    """Predict the images that can be read; each of the others gets an error."""
    images, names, errors = [], [], {}
    for index, upload in enumerate(uploads):
        try:
            images.append(decode_upload(upload, model.image_format, served.limits))
            names.append(str(upload))
        except ImageError as error:
            errors[index] = ImageReply(file=str(upload), error=str(error))
    predicted = iter(served.predict(model, torch.stack(images), names, group=group, task=task) if images else ())
    replies = [errors.get(index) or next(predicted) for index in range(len(uploads))]
    return PredictReply(images=replies, group=group, selector=model.learner.config.selectors[0].name)


async def _run_with_timeout(workers: ThreadPoolExecutor, work: Callable[[], Result], seconds: float) -> Result:
    """Run work in a thread, and stop waiting for it after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().run_in_executor(workers, work)
    except TimeoutError:
        raise RequestError(503, f"No result within {seconds:g} seconds: send fewer images or try again soon.") from None


async def _reload_on_change(served: ServedModel) -> None:
    """Check the model file regularly until cancelled."""
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        await asyncio.to_thread(served.refresh)


def _add_model_and_health(app: FastAPI, served: ServedModel, guard: RequestGuard) -> None:
    @app.head("/model", include_in_schema=False)
    @app.get("/model", response_model=ModelReply)
    async def model() -> Response:
        """Return the tasks, classes, capacity, image size and fingerprints of the model."""
        return Response(served.model.description, media_type="application/json")

    @app.head("/confusion.svg", include_in_schema=False)
    @app.get("/confusion.svg", include_in_schema=False)
    async def confusion() -> Response:
        """Return the confusion matrix of the held-out images as an SVG picture."""
        policy = {"content-security-policy": "default-src 'none'; sandbox"}
        return Response(served.model.confusion, media_type="image/svg+xml", headers=policy)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> HealthReply:
        """Return whether the model in use is the one on disk, and how many requests are being processed."""
        return HealthReply(
            status="ok" if served.problem is None else "old model",
            file=served.path.name,
            loaded=served.model.loaded_at.isoformat(timespec="milliseconds"),
            problem=served.problem,
            at_work=guard.active_requests,
        )


def _add_page(app: FastAPI, path: str, file: str) -> None:
    """Serve an HTML page; its content security policy allows only the script and the style inside it."""
    page = (files("cps.serve") / "static" / file).read_text(encoding="utf-8")
    hashes = {tag: _csp_hash(re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)[0]) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src '{hashes['script']}'; style-src '{hashes['style']}'; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.head(path, include_in_schema=False)
    @app.get(path, include_in_schema=False)
    async def get_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": policy})


def _csp_hash(text: str) -> str:
    """Return the hash of an inline script or style as a content security policy spells it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _add_error_handlers(app: FastAPI) -> None:
    """Return every error as JSON with one sentence in `error`."""

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> JSONResponse:
        headers = {"retry-after": "1"} if error.status == 503 else {}
        return JSONResponse({"error": str(error)}, error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        fields = {str(problem["loc"][-1]) for problem in error.errors()}
        images = "Field 'images' must have one or more image files in a multipart form."
        known = {"group": "Field 'group' must be true or false.", "task": "Field 'task' must be an integer, 1 or more."}
        message = images if "images" in fields else next((known[name] for name in known if name in fields), images)
        return JSONResponse({"error": message}, 422)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        allowed = " or ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        known = {
            404: "Not found: choose from /, /docs, /openapi.json, /predict, /model, /confusion.svg, /health, /metrics.",
            405: f"Method not allowed: use {allowed} {request.url.path}.",
        }
        return JSONResponse({"error": known.get(error.status_code, error.detail)}, error.status_code, error.headers)
