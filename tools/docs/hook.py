"""MkDocs calls this while it builds the site.

docs/ is written to be read in the repository, too: its pages link to files all over the repository. Here those files
become pages of the site, Markdown as such and everything else as its text, and the links lead to them.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"

# Markdown from outside docs/, and README.md, whose place in docs/ the first page of the site takes.
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(?=[)#])")
LANGUAGES = {".py": "python", ".cc": "cpp", ".h": "cpp", ".def": "cpp", ".json": "json", ".service": "ini"}
# Files of the site that are no pages, and where build.sh or the repository has them.
ASSETS = {
    "assets/site.css": "tools/docs/site.css",
    "assets/mermaid.min.js": "build/docs/mermaid@11/dist/mermaid.min.js",
    "assets/iframe-worker.js": "build/docs/iframe-worker@1/shim/index.js",
}


def on_config(config: MkDocsConfig) -> None:
    """Every page's foot says which version it describes."""
    version = re.search(r'^VERSION = "(.*)"', _text("python/poseidon/version.py"), re.MULTILINE)
    assert version is not None
    config.copyright = f"Poseidon {version[1]}, Apache-2.0"


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Adds the files that docs/ has not."""
    pages = [*PAGES, *(DOCS + file.src_uri for file in files.documentation_pages())]
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=_text(path)))
    for path in sorted({path for page in pages for path in _linked(page)} - set(pages)):
        if not path.startswith(DOCS):
            files.append(File.generated(config, _page_of(path), content=_listing(path)))
    for uri, path in ASSETS.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to the repository's files into links to the site's pages, and names of files into titles."""
    path = next((path for path, uri in PAGES.items() if uri == page.file.src_uri), DOCS + page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        text, target = link[1], _target(path, link[2])
        if target is None:
            return link[0]
        if text.endswith(".md"):
            text = _text(target).partition("\n")[0].lstrip("# ")
        return f"[{text}]({posixpath.relpath(_page_of(target), posixpath.dirname(page.file.src_uri))}"

    return LINK.sub(moved, markdown)


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _target(page: str, link: str) -> str | None:
    """The file of the repository to which a page links; None if there is none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return target if (ROOT / target).is_file() else None


def _linked(page: str) -> set[str]:
    """All files to which a page links."""
    return {target for _, link in LINK.findall(_text(page)) if (target := _target(page, link)) is not None}


def _page_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix(DOCS) if path.startswith(DOCS) else f"source/{path}.md"


def _listing(path: str) -> str:
    """A page that shows a file's text."""
    fence = "`" * 5
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    # A reader does not look for these by searching.
    front = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"
    return f"{front}# {path}\n\n{fence} {language}\n{_text(path)}\n{fence}\n"
