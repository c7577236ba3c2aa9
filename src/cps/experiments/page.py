"""Tables and plots as the templates of reports take them, and the page that they make."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from cps.experiments.aggregate import Table
from cps.storage.atomic import write_text


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


def html_figure(figure: Figure, caption: str) -> HtmlFigure:
    """Return a plot for the template."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    return HtmlFigure(svg[svg.index("<svg") :], caption)


def write_page(path: Path, template: str, **content: Any) -> None:
    """Fill a template, and write the page."""
    environment = Environment(
        loader=PackageLoader("cps.experiments"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    write_text(path, environment.get_template(template).render(content).lstrip())
