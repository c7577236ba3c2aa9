"""The command that serves a model over HTTP: `cps serve`."""

import logging
import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from cps.cli.arguments import Loader, get_loader
from cps.cli.terminal import console, sanitize, warn
from cps.runtime.extras import install_command


def serve(
    model: Annotated[Path, typer.Argument(help="The model file. It is reloaded when it changes.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 chooses a free one.")] = 8000,
    max_images: Annotated[int, typer.Option(min=1, help="Maximum number of images in a request.")] = 64,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Maximum size of a request, in MiB.")] = 32,
    max_megapixels: Annotated[
        int, typer.Option(min=1, max=40, help="Maximum size of an image, in millions of pixels.")
    ] = 24,
    at_once: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent requests; further ones get status 503.")
    ] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="Maximum duration of a request, in seconds.")] = 30.0,
    reject: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of known images that may be called unknown; 0 disables rejection."),
    ] = 0.01,
    accelerator: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "cpu",
    loader: Loader = None,
) -> None:
    """Serve predictions over HTTP: a web page for people, and a JSON API for programs."""
    try:
        import python_multipart  # noqa: F401  starlette reads forms with it, at the first request

        from cps.serve.server import make_app, make_server
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"cps serve needs {error.name}, which is not installed; run: {install_command('serve')}"
        ) from None
    from cps.serve.middleware import Limits
    from cps.serve.served_model import ServedModel

    for name in ("python_multipart", "PIL"):  # they warn about the content of requests, so clients could fill the log
        logging.getLogger(name).setLevel(logging.CRITICAL)
    limits = Limits(max_images, max_megabytes, max_megapixels, at_once, seconds)
    names = _local_names(host)
    served = ServedModel(model, limits, reject=reject, accelerator=accelerator, load=get_loader(loader))
    app = make_app(served, hosts=names)
    listening = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    if names is None:
        warn(
            f"{host} can be reached from other machines, and anyone who reaches it can use the model: there is no "
            "password and no encryption. Put a proxy that has both in front."
        )
    url = f"http://{address}:{listening.getsockname()[1]}"
    with suppress(KeyboardInterrupt):  # uvicorn may or may not raise it, depending on the moment
        console.print(f"Serving [bold]{sanitize(model.name)}[/bold] at {url} (press Ctrl-C to stop)", soft_wrap=True)
        make_server(app).run(sockets=[listening])
    console.print("Stopped.")


def _local_names(host: str) -> set[str] | None:
    """Return the host names of a server that only this machine can reach; None if others can reach it."""
    try:
        is_local = ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    return {host, "localhost", "127.0.0.1", "::1"} if is_local else None


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Opening it here reports a bad address before the server starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":  # on Windows, it would let two servers listen on one port
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # connections queue until the server accepts them
    except OSError as error:
        listening.close()
        reason = error.strerror or error
        raise OSError(f"cannot listen on {host} port {port} ({reason}); choose another --port or --host") from None
    return listening
