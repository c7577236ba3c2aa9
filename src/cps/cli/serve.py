"""The command of whoever puts a model to work: `cps serve` answers over HTTP."""

import logging
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from cps.cli.loaders import Loader, loader_of
from cps.cli.terminal import console, shown, warn


def serve(
    model: Annotated[Path, typer.Argument(help="The model file. When it changes, the new model is taken.")],
    host: Annotated[str, typer.Option(help="The address to answer at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes one that is free.")] = 8000,
    max_images: Annotated[int, typer.Option(min=1, help="Images in one request.")] = 64,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Size of one request.")] = 32,
    max_megapixels: Annotated[int, typer.Option(min=1, max=40, help="Millions of pixels of an image.")] = 24,
    at_once: Annotated[int, typer.Option(min=1, help="Requests at work; more are told to try again.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long a request may take.")] = 30.0,
    reject: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of known images that may be called unknown; 0: never unknown.")
    ] = 0.01,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "cpu",
    loader: Loader = None,
) -> None:
    """Answer over HTTP: a page to drop images on, and JSON for programs."""
    try:
        from cps.serve.server import make_app, make_server
    except ModuleNotFoundError as error:
        needs = 'pip install "continual-prune-and-select[serve]"'
        raise RuntimeError(f"to serve, install what it needs ({error.name} is missing): {needs}") from None
    from cps.serve.middleware import Limits
    from cps.serve.served_model import ServedModel

    for name in ("python_multipart", "PIL"):  # their warnings are about what others send, who could fill the log
        logging.getLogger(name).setLevel(logging.CRITICAL)
    limits = Limits(max_images, max_megabytes, max_megapixels, at_once, seconds)
    names = _names(host)
    host_of_model = ServedModel(model, limits, reject=reject, accelerator=accelerator, load=loader_of(loader))
    app = make_app(host_of_model, hosts=names)
    listening = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    if names is None:
        warn(
            f"{host} can be reached from other machines, and whoever reaches it can use the model: there is no "
            "password and no encryption. Put a proxy that has both in front."
        )
    where = f"http://{address}:{listening.getsockname()[1]}"
    with suppress(KeyboardInterrupt):  # which comes or not, depending on the moment
        console.print(f"Serving [bold]{shown(model.name)}[/bold] at {where} (Ctrl-C stops it)", soft_wrap=True)
        make_server(app).run(sockets=[listening])
    console.print("Stopped.")


def _names(host: str) -> set[str] | None:
    """Return the names that a server on this machine alone answers to; None where others can reach it."""
    try:
        is_here = ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return {host, "localhost", "127.0.0.1", "::1"} if is_here else None


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; an address that cannot be had is said before anything starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # from now on connections wait, until the server is ready for them
    except OSError as error:
        listening.close()
        reason = error.strerror or error
        raise OSError(f"cannot answer at {host} port {port} ({reason}); choose another with --port or --host") from None
    return listening
