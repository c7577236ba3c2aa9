"""The report: one HTML page with tables and pictures that needs nothing else."""

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cps.experiments import aggregate as comparison
from cps.experiments import plots as pictures
from cps.storage.container import write_text

Results = dict[str, Any]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
.sub { color: #666; margin-top: .2rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0; padding: 0; list-style: none; }
.cards li { flex: 1 1 9rem; border: 1px solid #ddd; border-radius: .5rem; padding: .7rem .9rem; }
.cards b { display: block; font-size: 1.7rem; color: #0b5cad; } .cards .low b { color: #b8322f; }
.cards .ceiling b { color: #3d8650; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; font-size: .9rem; }
th, td { padding: .3rem .55rem; text-align: right; } td { white-space: nowrap; }
th:first-child, td:first-child, .words { text-align: left; } thead th { border-bottom: 2px solid #bbb; }
tbody tr:nth-child(even) { background: #f6f8fa; }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: .92rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { color: #666; } dd { margin: 0; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


def write_report(path: Path, runs: Sequence[Results]) -> None:
    """Write the page about one or more runs."""
    title = ", ".join(dict.fromkeys(run["recipe"] for run in runs))
    body = "\n".join([*([_overview(runs)] if len(runs) > 1 else []), *(_section(run) for run in runs)])
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>cps: {html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
    write_text(path, page)


def _overview(runs: Sequence[Results]) -> str:
    """Return the section about all runs together: mean and standard deviation over those of the same recipe."""
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        '<p class="sub">mean ± standard deviation over runs that were trained alike and differ in order or seed</p>',
        "<h2>Accuracy after the last task, by group size</h2>",
        _html_table(*comparison.accuracy_table(runs)),
        "<h2>Metrics</h2>",
        _html_table(*comparison.metrics_table(runs)),
        "<h2>Each task after the last one</h2>",
        _html_table(*comparison.row_table(runs, "20")),
    ]
    for name, same in comparison.by_recipe(runs).items():
        sizes = list(next(iter(same[0]["class_il"].values())))
        large = pictures.large_size(sizes)
        orders = ", ".join(f"order {run['order']} seed {run['seed']}" for run in same)
        band = "; the band is one standard deviation" if len(same) > 1 else ""
        parts += [
            f"<h2>{html.escape(name)}</h2>",
            f'<p class="sub">{html.escape(orders)}</p>',
            _picture(pictures.histories(same, large), f"Accuracy after each task{band}."),
            _picture(pictures.group_sizes(same), f"Accuracy by group size{band}."),
        ]
    return "\n".join(parts)


def group_table(run: Results) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of accuracy by group size, as text."""
    sizes = list(next(iter(run["class_il"].values())))
    rows = []
    for measured, how in ((run, ""), (run.get("flips"), ", flips")):
        if measured:
            rows.append([f"task known{how}", *[_percent(measured["task_il"]["ACC"])] * len(sizes)])
            for selector, by_size in measured["class_il"].items():
                rows.append([f"cps {selector}{how}", *(_percent(by_size[size]["ACC"]) for size in sizes)])
    bounds = run.get("bounds", {})
    for name, label in (("finetuning", "finetuning"), ("joint", "joint training")):
        if name in bounds:
            rows.append([label, _percent(bounds[name]["ACC"]), *[""] * (len(sizes) - 1)])
    return ["accuracy (%) by group size", *sizes], rows


def subnetwork_table(run: Results) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of subnetworks, beside the dense network, as text."""
    times = run["milliseconds_per_image"]
    rows = [["dense network", "100.0", "", *_cost(run["dense"], times["dense"])]]
    for entry, milliseconds in zip(run["subnetworks"], times["tasks"], strict=True):
        shares = [_percent(entry["density"]), _percent(entry["taken"])]
        rows.append([f"task {entry['task'] + 1}", *shares, *_cost(entry, milliseconds)])
    return ["", "weights used, %", "taken so far, %", "parameters", "million operations", "ms per image"], rows


def _cost(entry: Results, milliseconds: float) -> list[str]:
    return [f"{entry['parameters']:,}", f"{entry['operations'] / 1e6:.2f}", f"{milliseconds:.2f}"]


def _section(run: Results) -> str:
    sizes = list(next(iter(run["class_il"].values())))
    large = pictures.large_size(sizes)
    tasks = run["classes_per_task"]
    several, has_layers = large != sizes[0], "layers" in run
    figures: list[tuple[bool, str, Callable[[], Figure]]] = [
        (True, "Accuracy after each task. A method that forgets falls; the gap between the blue lines and the green "
         "one is the price of not being told the task.", lambda: pictures.accuracy_history(run)),
        (True, "Accuracy by group size, after the last task. A group is a number of images that are known to share a "
         "task; one image assumes nothing.", lambda: pictures.group_sizes([run])),
        (True, f"By {comparison.in_words(sizes[0])}: accuracy of the class, and of the selected subnetwork.",
         lambda: pictures.matrices(run, sizes[0])),
        (several, f"The same for groups of {large}.", lambda: pictures.matrices(run, large)),
        (True, f"How often each selector finds the subnetwork by {comparison.in_words(sizes[0])}.",
         lambda: pictures.selections(run, sizes[0])),
        (several, f"The same for groups of {large}.", lambda: pictures.selections(run, large)),
        (True, "Accuracy on each task after the last.", lambda: pictures.accuracy_on_each_task(run)),
        (True, "Points forgotten so far. With the task known nothing is forgotten; without, more tasks to choose among "
         "cost some accuracy on all.", lambda: pictures.forgetting_history(run)),
        (has_layers, "Weights of each layer used by any and by every task, and how many tasks share a weight.",
         lambda: pictures.weights_per_layer(run)),
        (True, "Weights used by each subnetwork, and taken by all so far.", lambda: pictures.taken_by_task(run)),
    ]  # fmt: skip
    return "\n".join(
        [
            f"<h1>{html.escape(run['recipe'])}</h1>",
            f'<p class="sub">{len(tasks)} tasks, {sum(tasks)} classes ({_sizes(tasks)}), order '
            f"{html.escape(str(run['order']))}, seed {run['seed']}, {comparison.training_of(run)}, one run</p>",
            _cards(run, large),
            "<h2>Accuracy after the last task, by group size</h2>",
            _html_table(*group_table(run)),
            "<h2>Pictures</h2>",
            *(_picture(draw(), caption) for is_there, caption, draw in figures if is_there),
            *(["<h2>The subnetworks</h2>", _html_table(*subnetwork_table(run))] if "dense" in run else []),
            "<h2>The run</h2>",
            _facts(run),
        ]
    )


def _cards(run: Results, large: str) -> str:
    ours = run["class_il"][run["default_selector"]]
    first = next(iter(ours))
    cards = [
        *(
            ("", _percent(ours[size]["ACC"]), f"class-IL accuracy, {comparison.in_words(size)}")
            for size in dict.fromkeys((first, large))
        ),
        ("ceiling", _percent(run["task_il"]["ACC"]), "task-IL accuracy: the task is known"),
        ("ceiling", _percent(run["task_il"]["BWT"]), "forgotten (BWT, task-IL)"),
    ]
    if "finetuning" in run.get("bounds", {}):
        cards.append(("low", _percent(run["bounds"]["finetuning"]["ACC"]), "finetuning: forgets"))
    items = "".join(f'<li class="{kind}"><b>{value}%</b>{html.escape(text)}</li>' for kind, value, text in cards)
    return f'<ul class="cards">{items}</ul>'


def _facts(run: Results) -> str:
    has_cascade = "Cascade" in run["class_il"] and run["recipe"].startswith("cifar100")
    except_for = " but for the cascade's default settings (docs/one-image-measured.md)" if has_cascade else ""
    facts = {
        "device": run["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "seconds": ", ".join(f"{name} {value:.1f}" for name, value in run["seconds"].items()),
        "shared weights": f"{run.get('weights', 0):,}",
        "training": comparison.training_of(run),
        "selector": run["default_selector"],
        "protocol": f"last epoch, no choice made on test images{except_for}; groups drawn at random within a task; a "
        "group whose task is mistaken counts as wrong whole; mirror images only where 'flips' says so",
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{html.escape(str(v))}</dd>" for name, v in facts.items()) + "</dl>"


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, columns of words to the left and those of numbers to the right."""
    are_words = [any(cell[:1].isalpha() for cell in column) for column in zip(*rows, strict=True)] or [True] * len(head)

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="words"' if is_words else "" for is_words in are_words]
        return "".join(f"<{tag}{kind}>{html.escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _picture(figure: Figure, caption: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _percent(value: float) -> str:
    return f"{value:.1f}"


def _sizes(tasks: Sequence[int]) -> str:
    return f"{tasks[0]} each" if len(set(tasks)) == 1 else " + ".join(map(str, tasks))
