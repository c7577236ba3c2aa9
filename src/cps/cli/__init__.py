"""The command line. Each command is a function in one of the modules of this package."""

from typing import Annotated

import typer

import cps
from cps.cli import bench as cli_bench
from cps.cli import compare as cli_compare
from cps.cli import export as cli_export
from cps.cli import model as cli_model
from cps.cli import predict as cli_predict
from cps.cli import serve as cli_serve
from cps.cli.terminal import console, report_errors

app = typer.Typer(
    no_args_is_help=True,
    help="Continual Prune-and-Select: one network learns task after task and never forgets.",
)


def _print_version(show: bool) -> None:
    if show:
        console.print(f"cps {cps.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Print the version.")] = False,
) -> None: ...


for command in (
    cli_model.learn,
    cli_predict.predict,
    cli_serve.serve,
    cli_model.inspect,
    cli_model.verify,
    cli_model.card,
    cli_export.export,
    cli_model.rename,
    cli_model.forget,
    cli_bench.bench,
    cli_compare.compare,
    cli_bench.report,
):
    app.command()(report_errors(command))


def main() -> None:
    """Run the command line."""
    app()
