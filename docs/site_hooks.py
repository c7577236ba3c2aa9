"""Hooks of mkdocs: pages that are made from other files, and links that lead out of docs/.

The README is the first page, and the reference is made from the public names in `cps/__init__.pyi`. A link to another
file of the repository leads to a copy of it in the site. Examples in docstrings become blocks of code.
"""

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changes.md": "CHANGELOG.md",
}
COPIES = "repository"  # folder of the site with files of the repository
LINK = re.compile(r"\[([^]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)
NAME = re.compile(r"(\w+) as \1\b")
ROOMS = {
    "learner": "The learner", "data": "Data", "training": "Training", "pruning": "Pruning", "selection": "Selecting",
    "closed_form": "Closed forms", "network": "Networks", "evaluation": "Evaluation", "methods": "Other methods",
    "loading": "Files", "storage": "Files", "app": "Sharing", "export": "Export", "config": "Settings",
    "testing": "Checks of your own parts", "runtime": "Devices",
}  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and a copy of each file of the repository that a page links to."""
    made = {page: _moved((ROOT / source).read_text(encoding="utf-8"), ".") for page, source in PAGES.items()}
    made["reference.md"] = _reference()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    texts = [*made.values(), *(_moved(page.content_string, "docs") for page in files.documentation_pages())]
    for path in {found for text in texts for found in re.findall(rf"\]\({COPIES}/([^)#]+)", text)}:
        files.append(File.generated(config, f"{COPIES}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links that lead out of docs/ lead to the pages and copies in the site."""
    return markdown if page.file.src_uri in {*PAGES, "reference.md"} else _moved(markdown, "docs")


def _moved(markdown: str, folder: str) -> str:
    """Return the text of a page in a folder of the repository with the links that it has in the site."""
    pages = {source: page for page, source in PAGES.items()}

    def move(found: re.Match[str]) -> str:
        text, target, anchor = found.groups("")
        path = normpath(f"{folder}/{target}")
        if not (ROOT / path).exists():
            return found[0]
        if (ROOT / path).is_dir():  # the site has no copy of it
            return text
        moved = path.removeprefix("docs/") if path.startswith("docs/") else pages.get(path, f"{COPIES}/{path}")
        return f"[{text}]({moved}{anchor})"

    return LINK.sub(move, markdown)


def _reference() -> str:
    """Return the page of all public names, by room."""
    stub = (ROOT / "src" / "cps" / "__init__.pyi").read_text(encoding="utf-8")
    sections: dict[str, list[str]] = {title: [] for title in ROOMS.values()}
    for module, names in re.findall(r"^from \.([\w.]+) import (\([^)]*\)|.*)$", stub, re.M):
        if module.partition(".")[2] or module in ROOMS:
            title = ROOMS[module.partition(".")[0]]
            sections[title] += [f"::: cps.{module}.{name}" for name in NAME.findall(names) if name != "metrics"]
    text = "\n\n".join(f"## {title}\n\n" + "\n\n".join(names) for title, names in sections.items() if names)
    return f"# Reference\n\nEverything here is a name of `cps`, such as `cps.Learner`.\n\n{text}\n"


class Examples(griffe.Extension):
    """Mark the examples of docstrings as code, which Markdown would show as quotations."""

    def on_object(self, *, obj: Any, **settings: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
