"""Tables and plots as the templates of reports take them, and the page that they make."""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from cps.experiments.aggregate import Table
from cps.runtime.extras import install_command, is_installed
from cps.storage.atomic import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_PLOTS = f"Plots need matplotlib: {install_command('bench')}, then write this page again with cps report."


class HtmlTable(NamedTuple):
    """A table for the template; columns of text are aligned left, columns of numbers right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: Sequence[bool]


class HtmlFigure(NamedTuple):
    """A plot as SVG, with a caption."""

    svg: str
    caption: str


def html_table(table: Table) -> HtmlTable:
    """Return a table for the template."""
    head, rows = table
    is_text = [any(cell[:1].isalpha() for cell in column) for column in zip(*rows, strict=True)]
    return HtmlTable(head, rows, is_text or [True] * len(head))


def html_figures(draw: Callable[[], Iterable[tuple["Figure", str]]]) -> list[HtmlFigure]:
    """Return plots with captions for the template, or nothing if matplotlib, which draws them, is not installed."""
    return [HtmlFigure(_svg(figure), caption) for figure, caption in draw()] if is_installed("matplotlib") else []


def _svg(figure: "Figure") -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def write_page(path: Path, template: str, **content: Any) -> None:
    """Fill a template, and write the page."""
    environment = Environment(
        loader=PackageLoader("cps.experiments"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals["no_plots"] = NO_PLOTS
    write_text(path, environment.get_template(template).render(content).lstrip())
