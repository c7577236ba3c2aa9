"""Serving: a model behind HTTP, with a page for people and JSON for programs."""

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
from cps.network.input_checks import check_task_number
from cps.network.shared import SharedNetwork
from cps.serve.middleware import Refused, RequestGuard
from cps.serve.schemas import ErrorReply, HealthReply, ImageReply, ModelReply, PredictReply, UnreadReply
from cps.serve.served_model import LoadedModel, ServedModel
from cps.serve.uploads import Upload, pixels_of

Result = TypeVar("Result")

DECODERS = 2  # images decoded at the same time, each of which may take memory
LOOK_AGAIN = 1.0  # seconds between two looks at the model file
FIELDS = {"images", "group", "task"}
WAITING = 256  # connections beyond which new ones are turned away
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": UnreadReply if status == 415 else ErrorReply, "description": text}
    for status, text in {
        400: "Not a form.",
        408: "The images did not arrive in time.",
        413: "Too many bytes or images.",
        415: "None of the images can be read; each has its own error in the reply.",
        422: "A field is missing, is not known or has a wrong form, or there is no such task.",
        503: "Too many requests at work; try again after as many seconds as Retry-After says.",
    }.items()
}


def make_app(host: ServedModel, *, hosts: Collection[str] | None = None) -> RequestGuard:
    """Return the server as an ASGI application; `hosts` are the names it answers to, None is any."""
    workers = ThreadPoolExecutor(DECODERS, "cps-serve")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(_keep_fresh(host))
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        workers.shutdown(cancel_futures=True)

    app = FastAPI(
        title="cps", version=cps.__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        description="Predicts the class of images with one network that learned task after task.",
    )  # fmt: skip
    gate = RequestGuard(app, host.limits, hosts)
    _add_errors(app)
    _add_page(app, "/", "page.html")
    _add_page(app, "/docs", "docs.html")

    @app.post("/predict", response_model=PredictReply, responses=ERRORS)
    async def predict(
        images: Annotated[list[UploadFile], File(description="One or more image files.")],
        request: Request,
        group: Annotated[bool, Form(description="Whether all images belong together, that is, share a task.")] = False,
        task: Annotated[
            int | None, Form(ge=1, description="The task of all images, from 1, where it is known.")
        ] = None,
    ) -> PredictReply | JSONResponse:
        """Return the class and task of each image and what every subnetwork says about it, or why it has no answer."""
        limits, model = host.limits, host.model
        _check_fields(set(await request.form()), task, model.learner.network)
        if len(images) > limits.images:
            raise Refused(413, f"{len(images)} images are more than the {limits.images} of one request; send fewer")
        uploads = [Upload(image.filename or "", await image.read()) for image in images]
        work = partial(_answer, host, model, uploads, group=group, task=None if task is None else task - 1)
        reply = await _in_time(workers, work, limits.seconds)
        errors = [image.error for image in reply.images if image.error is not None]
        if len(errors) < len(reply.images):
            return reply
        unread = UnreadReply(error=errors[0], **dict(reply))
        return JSONResponse(unread.model_dump(by_alias=True), 415)

    _add_information(app, host, gate)
    return gate


def make_server(app: RequestGuard) -> uvicorn.Server:
    """Return the server that runs the application; `run(sockets=[...])` starts it."""
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=5, ws="none",
        limit_concurrency=WAITING, timeout_graceful_shutdown=5,
    )  # fmt: skip
    return uvicorn.Server(settings)


def _check_fields(fields: set[str], task: int | None, network: SharedNetwork) -> None:
    """Refuse a field that nobody reads, and a task that there is not."""
    unknown = fields - FIELDS
    if unknown:
        raise Refused(422, f"there is no field '{min(unknown)[:40]}'; there are: {', '.join(sorted(FIELDS))}")
    if task is not None:
        try:
            check_task_number(task, network)
        except ValueError as error:
            raise Refused(422, str(error)) from None


def _answer(
    host: ServedModel, model: LoadedModel, uploads: list[Upload], *, group: bool, task: int | None
) -> PredictReply:
    """Look at the images that can be read, as a group if they are one; the others get an error each."""
    images, names, errors = [], [], {}
    for index, upload in enumerate(uploads):
        try:
            images.append(pixels_of(upload, model.size, host.limits))
            names.append(str(upload))
        except ImageError as error:
            errors[index] = ImageReply(file=str(upload), error=str(error))
    answers = iter(host.predict(model, torch.stack(images), names, group=group, task=task) if images else ())
    replies = [errors.get(index) or next(answers) for index in range(len(uploads))]
    return PredictReply(images=replies, group=group, selector=model.learner.selectors[0].name)


async def _in_time(workers: ThreadPoolExecutor, work: Callable[[], Result], seconds: float) -> Result:
    """Run work away from the event loop, and give up waiting for it after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().run_in_executor(workers, work)
    except TimeoutError:
        raise Refused(503, f"no answer within {seconds:g} seconds; send fewer images, or try again soon") from None


async def _keep_fresh(host: ServedModel) -> None:
    """Look at the model file now and then, for as long as the server runs."""
    while True:
        await asyncio.sleep(LOOK_AGAIN)
        await asyncio.to_thread(host.refresh)


def _add_information(app: FastAPI, host: ServedModel, gate: RequestGuard) -> None:
    @app.head("/model", include_in_schema=False)
    @app.get("/model", response_model=ModelReply)
    async def model() -> Response:
        """Return the tasks, classes, capacity, image size and fingerprints of the model."""
        return Response(host.model.about, media_type="application/json")

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> HealthReply:
        """Say whether the server answers with the model that is on the disk."""
        return HealthReply(
            status="ok" if host.problem is None else "old model",
            file=host.path.name,
            loaded=host.model.loaded.isoformat(timespec="milliseconds"),
            problem=host.problem,
            at_work=gate.at_work,
        )


def _add_page(app: FastAPI, path: str, file: str) -> None:
    """Serve a page for people, whose only script and style are those in it."""
    page = (files("cps.serve") / "static" / file).read_text(encoding="utf-8")
    hashes = {tag: _hash(re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)[0]) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src '{hashes['script']}'; style-src '{hashes['style']}'; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.head(path, include_in_schema=False)
    @app.get(path, include_in_schema=False)
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": policy})


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _add_errors(app: FastAPI) -> None:
    """Say every error in one sentence, in the same form."""

    @app.exception_handler(Refused)
    async def refuse(_: Request, error: Refused) -> JSONResponse:
        headers = {"retry-after": "1"} if error.status == 503 else {}
        return JSONResponse({"error": str(error)}, error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def explain(_: Request, error: RequestValidationError) -> JSONResponse:
        fields = {str(problem["loc"][-1]) for problem in error.errors()}
        images = "expected one or more image files as 'images' in a multipart form"
        known = {"group": "expected true or false as 'group'", "task": "expected a number from 1 as 'task'"}
        sentence = images if "images" in fields else next((known[name] for name in known if name in fields), images)
        return JSONResponse({"error": sentence}, 422)

    @app.exception_handler(HTTPException)
    async def tell(request: Request, error: HTTPException) -> JSONResponse:
        allowed = " or ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        known = {
            404: "there is nothing here; see /, /docs, /openapi.json, /predict, /model, /health",
            405: f"that is not how to ask here; use {allowed} {request.url.path}",
        }
        return JSONResponse({"error": known.get(error.status_code, error.detail)}, error.status_code, error.headers)
