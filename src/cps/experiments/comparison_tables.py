"""Tables of a comparison of methods: as text, as CSV with all digits, and as LaTeX."""

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cps.evaluation.metrics import Metrics, history
from cps.experiments.aggregate import Table, describe_group_size, format_mean
from cps.experiments.comparison import Comparison, MethodResult

PAPER_SELECTORS = ("MaxOutput", "ImportanceSignature", "ImportanceSignature-L1")  # of the paper on cps
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Row:
    """A method, predicting in one way, on all its class orders: a value for each order.

    `label` is its name in tables. `one` and `group` are the accuracy on single images and in groups, `known` that with
    the task given. `aia` is a mean over tasks, `aia_images` one over images. They and `bwt` are empty for joint
    training, which is measured once.
    """

    label: str
    method: str
    way: str
    results: Sequence[MethodResult]
    one: list[float]
    group: list[float]
    known: list[float]
    aia: list[float]
    aia_images: list[float]
    bwt: list[float]

    @property
    def kept(self) -> float:
        """The mean number of bytes kept after the last task."""
        return statistics.fmean(sum(each.kept.values()) for each in self.results)

    @property
    def kept_while_learning(self) -> float:
        """The mean number of bytes kept while the last task is learned."""
        return statistics.fmean(sum(each.kept_while_learning.values()) for each in self.results)

    @property
    def image_passes(self) -> float:
        """The mean number of images in all training steps."""
        return statistics.fmean(each.image_passes for each in self.results)

    @property
    def seconds(self) -> float:
        """The mean number of seconds that learning took."""
        return statistics.fmean(each.seconds for each in self.results)

    @property
    def assumes(self) -> list[str]:
        """What the method needs."""
        return [name.replace("_", " ") for name, holds in self.results[0].assumes.items() if holds]


def shown_group_size(comparison: Comparison) -> int:
    """Return the group size of tables: 20, or the largest that was measured if 20 was not."""
    sizes = comparison.group_sizes
    return 20 if 20 in sizes else sizes[-1]


def rows_of(comparison: Comparison, *, every_way: bool = False) -> list[Row]:
    """Return a row for each method and each way in which it predicts.

    Unless `every_way` is asked for, methods other than cps have two at most: their own, and the one by which cps
    predicts.
    """
    size, methods = shown_group_size(comparison), comparison.methods
    default = next(iter(methods["cps"][0].ways)) if "cps" in methods else None
    return [
        _row(same, way, size)
        for name, same in methods.items()
        for number, way in enumerate(same[0].ways)
        if every_way or name == "cps" or number == 0 or way == default
    ]


def accuracy_table(comparison: Comparison) -> Table:
    """Return the table of accuracy and forgetting, in percent: mean and standard deviation over class orders.

    The AIA over images has a column if tasks have different numbers of classes; otherwise it is the AIA over tasks.
    """
    size = shown_group_size(comparison)
    head = {"one": "one image", "group": describe_group_size(size), "known": "task known", "aia": "AIA"}
    if any(len(set(each.classes_per_task)) > 1 for each in comparison.results):
        head["aia_images"] = "AIA over images"
    head["bwt"] = "BWT"
    rows = []
    for row in rows_of(comparison):
        accuracies = _accuracies(row)
        cells = [format_mean(accuracies[name]) if accuracies[name] else "" for name in head]
        rows.append([row.label, *cells, str(len(row.results))])
    return ["method", *head.values(), "orders"], rows


def cost_table(comparison: Comparison) -> Table:
    """Return the table of what each method keeps, costs and assumes."""
    head = ["method", "kept (MiB)", "while learning (MiB)", "image passes", "seconds", "assumes"]
    rows = [
        [
            row.results[0].name,
            f"{row.kept / MEBIBYTE:.2f}",
            f"{row.kept_while_learning / MEBIBYTE:.2f}",
            f"{row.image_passes:,.0f}",
            f"{row.seconds:,.0f}",
            ", ".join(row.assumes),
        ]
        for row in _one_row_each(comparison)
    ]
    return head, rows


def assumption_table(comparison: Comparison) -> Table:
    """Return the table of what each method needs beyond the images of one task at a time."""
    rows = _one_row_each(comparison)
    names = list(rows[0].results[0].assumes) if rows else []
    head = ["method", *(name.replace("_", " ") for name in names)]
    return head, [
        [row.results[0].name, *("yes" if row.results[0].assumes.get(name) else "" for name in names)] for row in rows
    ]


def to_csv(comparison: Comparison) -> str:
    """Return the whole table as CSV: numbers with all digits, mean and standard deviation in columns of their own."""
    size, file = shown_group_size(comparison), io.StringIO()
    names = ["one image", describe_group_size(size), "task known", "AIA", "AIA over images", "BWT"]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["method", "label", *(column for name in names for column in (name, f"{name} (std)")), "orders", "bytes kept",
         "bytes while learning", "image passes", "seconds", "assumes"]
    )  # fmt: skip
    for row in rows_of(comparison, every_way=True):
        accuracies = [column for values in _accuracies(row).values() for column in _mean_and_deviation(values)]
        costs = (row.kept, row.kept_while_learning, row.image_passes, row.seconds)
        writer.writerow([row.method, row.label, *accuracies, len(row.results), *costs, " ".join(row.assumes)])
    return file.getvalue()


def to_latex(comparison: Comparison) -> str:
    """Return the whole table as LaTeX, for the package booktabs."""
    size = shown_group_size(comparison)
    head = ["method", "one image", describe_group_size(size), "task known", "AIA", "AIA (images)", "BWT", "MiB kept",
            "passes", "assumes"]  # fmt: skip
    lines = [r"\begin{tabular}{l" + "r" * (len(head) - 2) + "l}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
    for row in rows_of(comparison):
        accuracies = [format_mean(values) if values else "" for values in _accuracies(row).values()]
        cells = [_escape(row.label), *(f"${cell}$" if cell else "" for cell in accuracies)]
        cells += [f"{row.kept / MEBIBYTE:.2f}", f"{row.image_passes:,.0f}", _escape(", ".join(row.assumes))]
        lines.append(" & ".join(cells).replace("±", r"\pm") + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _row(results: Sequence[MethodResult], way: str, size: int) -> Row:
    one, group = ([each.metrics(number, way) for each in results] for number in (1, size))
    single = [] if None in one else [metrics for metrics in one if metrics is not None]
    curves = [] if results[0].is_joint else [*zip(results, single, strict=False)]
    selector = f"{way} (the paper's)" if way in PAPER_SELECTORS and results[0].method == "cps" else way
    return Row(
        label=f"{results[0].name}, {selector}" if way else results[0].name,
        method=results[0].method,
        way=way,
        results=results,
        one=_accs(one),
        group=_accs(group),
        known=[each.task_il.ACC for each in results],
        aia=[metrics.AIA for _, metrics in curves],
        aia_images=[statistics.fmean(history(metrics.accuracy, each.classes_per_task)) for each, metrics in curves],
        bwt=[metrics.BWT for _, metrics in curves],
    )


def _accs(metrics: Sequence[Metrics | None]) -> list[float]:
    """Return the accuracies after the last task, or nothing if some of them were not measured."""
    present = [each.ACC for each in metrics if each is not None]
    return present if len(present) == len(metrics) else []


def _accuracies(row: Row) -> dict[str, list[float]]:
    return {name: getattr(row, name) for name in ("one", "group", "known", "aia", "aia_images", "bwt")}


def _one_row_each(comparison: Comparison) -> list[Row]:
    """Return the first row of each method."""
    rows: dict[str, Row] = {}
    for row in rows_of(comparison):
        rows.setdefault(row.method, row)
    return list(rows.values())


def _mean_and_deviation(values: Sequence[float]) -> tuple[float | str, float | str]:
    if not values:
        return "", ""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else ""


def _escape(text: str) -> str:
    """Return text as LaTeX prints it."""
    return "".join(f"\\{char}" if char in "&%$#_{}" else char for char in text)
