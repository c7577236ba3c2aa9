"""The README as an index page shows it, where paths of the repository lead nowhere; pyproject.toml cannot express it.

When the project has a public address, set REPOSITORY to that of its files, with a slash at the end: pictures and links
then lead there. Without one, a picture becomes its caption, and a link its text.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = ""
PATH = re.compile(r"(!?)\[([^]]*)\]\((?!https?:)([^)]*)\)")


def index_page(readme: str, repository: str) -> str:
    """Return the README with absolute addresses of the repository, or without pictures and links to its files."""

    def replace(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if repository:
            return f"{picture}[{text}]({repository}{path})"
        return f"*{text}*" if picture else text

    return PATH.sub(replace, readme)


if __name__ == "__main__":
    setup(
        long_description=index_page((Path(__file__).parent / "README.md").read_text(encoding="utf-8"), REPOSITORY),
        long_description_content_type="text/markdown",
    )
