"""What pages are put together from: the document, figures, pictures, legends and rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files

from poseidon.report.svg import Canvas

PAGE_WIDTH, HALF_WIDTH, PHONE_WIDTH = 952, 460, 360


def document(title: str, sections: Iterable[str]) -> str:
    """The whole page. It needs no other file, and follows the reader's light or dark preference."""
    style = (files("poseidon.report") / "style.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def head(title: str, subtitle: str) -> str:
    """The title, and a paragraph below it."""
    return f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>"


def figures(entries: Iterable[tuple[str, str, str]]) -> str:
    """The figures at the top: name, value, and a value to compare it with."""
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(against)}</small></dd></div>"
        for name, value, against in entries
    )
    return f'<dl class="figures">{shown}</dl>'


def section(title: str, words: str, content: str) -> str:
    """A section: its title, a paragraph, and what it shows."""
    return f"<section><h2>{escape(title)}</h2>{paragraphs([words])}{content}</section>"


def paragraphs(texts: Iterable[str]) -> str:
    """A paragraph for each text."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def figure(draw: Callable[[float], Canvas], wide: float) -> str:
    """One picture in two widths. The style sheet shows the one that fits."""
    return f"<figure>{draw(wide).render('wide')}{draw(PHONE_WIDTH).render('narrow')}</figure>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What the colours of a picture mean: a style class and words each."""
    items = "".join(f'<li><i class="{style}"></i>{escape(text)}</li>' for style, text in entries)
    return f'<ul class="legend">{items}</ul>'


def cells(texts: Iterable[str], tag: str) -> str:
    """The cells of a table's row."""
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells(heads, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
