"""The long description of the package: the README, with links that work outside of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURE = re.compile(r"(?:\[)?!\[([^\]]*)\]\(([^)]+)\)(?:\]\([^)]+\))?")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)")


def for_index(readme: str, repository: str = "") -> str:
    """Return a README for package indexes, on which neither relative links, nor anchors, nor data URLs work.

    With the address of a repository (`Source` of [project.urls]) links and pictures become absolute, as GitHub and
    GitLab have them. Without one a link becomes its text and a picture its description.
    """

    def picture(found: re.Match[str]) -> str:
        text, target = found.groups()
        return f"![{text}]({repository}/raw/main/{target})" if repository else f"*{text}*"

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if "://" in target:
            return found[0]
        page = f"{repository}/blob/main/{target}" if not target.startswith("#") else f"{repository}{target}"
        return f"[{text}]({page})" if repository else text

    return LINK.sub(link, PICTURE.sub(picture, readme))


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    description = for_index((ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Source", ""))
    setup(long_description=description, long_description_content_type="text/markdown")
