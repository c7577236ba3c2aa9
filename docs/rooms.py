"""Draw docs/rooms.svg: the rooms of src/cps in the order of the import contract, and which room imports which.

Run `python docs/rooms.py` after a change of rooms; a test compares the picture with the contract and the code.
"""

import tomllib
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "rooms.svg"
PURPOSE = {
    "cli": "commands",
    "serve": "HTTP server",
    "app": "image folders, a growing model file",
    "experiments": "recipes, runs, reports",
    "methods": "other methods",
    "export": "ONNX, state dicts",
    "evaluation": "accuracy, metrics",
    "sklearn": "scikit-learn's interface",
    "learner": "Algorithms 1 and 2: start here",
    "pruning": "which connections stay",
    "selection": "which task",
    "training": "loop, step, losses",
    "network": "shared weights, subnetworks",
    "data": "images, tasks, augmentation",
    "storage": "files",
    "runtime": "devices, seeds, locks",
}
WIDTH, HEIGHT, GAP, ROW = 210, 44, 30, 84


def contract() -> list[list[str]]:
    """Return the rows of rooms, the highest first, as pyproject.toml lists them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def imports(rooms: list[str]) -> set[tuple[str, str]]:
    """Return (importer, imported) for all rooms, without what follows from other imports."""
    graph = grimp.build_graph("cps", exclude_type_checking_imports=True)

    def room_of(module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    edges = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = room_of(importer), room_of(imported)
            if pair[0] != pair[1] and set(pair) <= set(rooms):
                edges.add(pair)
    below = {room: {b for a, b in edges if a == room} for room in rooms}

    def reached(room: str) -> set[str]:
        return below[room] | {further for each in below[room] for further in reached(each)}

    return {(a, b) for a, b in edges if not any(b in reached(other) for other in below[a] - {b})}


def draw() -> str:
    """Return the picture as SVG."""
    rows = [row for row in contract() if row != ["__main__"]]
    edges = imports([room for row in rows for room in row])
    width = max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    place = {}
    for depth, row in enumerate(rows):
        left = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        for index, room in enumerate(row):
            place[room] = left + index * (WIDTH + GAP), GAP + depth * ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {len(rows) * ROW + GAP}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for importer, imported in sorted(edges):
        (x1, y1), (x2, y2) = place[importer], place[imported]
        x1, x2, y1 = x1 + WIDTH / 2, x2 + WIDTH / 2, y1 + HEIGHT
        middle = (y1 + y2) / 2
        curve = f"M {x1:g} {y1:g} C {x1:g} {middle:g}, {x2:g} {middle:g}, {x2:g} {y2:g}"
        lines.append(f'<path d="{curve}" fill="none" stroke="#7d8ca3" stroke-width="1.4"/>')
        lines.append(f'<path d="M {x2 - 4:g} {y2 - 7:g} L {x2:g} {y2:g} L {x2 + 4:g} {y2 - 7:g} Z" fill="#7d8ca3"/>')
    for room, (x, y) in place.items():
        is_file = (ROOT / "src" / "cps" / f"{room}.py").exists()
        fill = "#fff3d6" if is_file else "#e8f0fb"
        name = f"{room}.py" if is_file else f"{room}/"
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#44546a"/>'
        )
        down = 18 if room in PURPOSE else 27
        lines.append(
            f'<text x="{x + WIDTH / 2:g}" y="{y + down:g}" text-anchor="middle" font-weight="600">{name}</text>'
        )
        if room in PURPOSE:
            lines.append(
                f'<text x="{x + WIDTH / 2:g}" y="{y + 35:g}" text-anchor="middle" font-size="10.5" fill="#44546a">'
                f"{escape(PURPOSE[room])}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8", newline="\n")
