"""The site of the guides: python -m tests.docs_site builds it into site/, and fails where a page
would load something from elsewhere.

Also the hook of mkdocs.yml: README becomes the front page, and what the pages link to outside docs/
comes into the site under repository/.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = ROOT / "site"
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md")
# What a browser fetches by itself: elements with src, styles and what is like them.
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|edit|next|prev))[^>]*?"
    r"\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|url\([\"']?((?:https?:)?//[^)\"']+)|@import\s+[\"']?((?:https?:)?//[^\"'\s;]+)"
)


def targets(page: Path) -> Iterator[tuple[str, Path]]:
    """Each relative link of a page, and the file that it means."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in link:
            yield link, (page.parent / link).resolve()


def outside() -> dict[Path, str]:
    """Files outside docs/ that belong to the site -> their addresses there."""
    found = {ROOT / "README.md": "index.md"}
    found |= {ROOT / name: f"repository/{name}" for name in ALWAYS}
    waiting = [*found, *DOCS.glob("*.md")]
    while waiting:
        for _, target in targets(waiting.pop()):
            if target.is_file() and DOCS not in target.parents and target not in found:
                name = target.relative_to(ROOT).as_posix().replace("/.", "/").lstrip(".")
                found[target] = f"repository/{name}"
                waiting += [target] if target.suffix == ".md" else []
    return found


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: adds what is outside docs/."""
    from mkdocs.structure.files import File

    for path, address in outside().items():
        files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs: a page's links as addresses in the site."""
    addresses = outside()
    path = Path(page.file.abs_src_path).resolve()

    def moved(match: re.Match[str]) -> str:
        link = match[0]
        target = (path.parent / link).resolve()
        if "://" in link or not target.is_file():
            return link
        inside = DOCS in target.parents
        address = target.relative_to(DOCS).as_posix() if inside else addresses[target]
        return posixpath.relpath(address, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)


def loaded_from_elsewhere() -> list[str]:
    """page: address, of all that a browser would fetch from another host."""
    pages = (path for path in SITE.rglob("*") if path.suffix in (".html", ".css"))
    return [
        f"{path.relative_to(SITE)}: {next(filter(None, match.groups()))}"
        for path in sorted(pages)
        for match in LOADED.finditer(path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--quiet"]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    if code := subprocess.run(command, cwd=ROOT, env=variables).returncode:
        return code
    elsewhere = loaded_from_elsewhere()
    print("\n".join(elsewhere) or f"site/index.html, {len(list(SITE.rglob('*.html')))} pages")
    return 1 if elsewhere else 0


if __name__ == "__main__":
    sys.exit(main())
