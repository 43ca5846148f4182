"""Writes HTML and SVG so that text cannot become markup: all children but `Markup` are escaped.

>>> element("p", "1 < 2 ", element("b", "& true"), class_="note")
'<p class="note">1 &lt; 2 <b>&amp; true</b></p>'
"""

import html
from collections.abc import Iterable
from importlib import resources
from typing import TypeAlias

_VOID = frozenset({"meta", "br", "hr", "rect", "line", "path", "circle", "polyline", "polygon"})
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Markup(str):
    """Text that already is HTML."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"


_FORBIDDEN = [*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF]
_SYMBOLS = {code: 0x2400 + code for code in range(0x20) if code not in b"\t\n"} | {0x7F: 0x2421}
_ESCAPED = (
    {ord(one): html.escape(one) for one in "&<>\"'"} | _SYMBOLS | dict.fromkeys(_FORBIDDEN, 0xFFFD)
)


def escape(text: str) -> Markup:
    """Escape text as HTML. Characters that XML forbids become visible symbols."""
    return Markup(text.translate(_ESCAPED))


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Build an element. `class_` means `class`, `stroke_width` `stroke-width`; None is left out."""
    opening = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID and not children:
        return Markup(f"<{tag}{opening}/>")
    return Markup(f"<{tag}{opening}>{join(children)}</{tag}>")


def legend(items: Iterable[tuple[str, str]], *more: Child) -> Markup:
    """Explain colours, given names and their CSS classes."""
    entries = [element("span", element("i", class_=f"swatch {css}"), name) for name, css in items]
    return element("div", entries, *more, class_="legend")


def join(children: Iterable[Child]) -> Markup:
    """Concatenate the children."""
    return Markup("".join(_rendered(child) for child in children))


def _rendered(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child)
    if isinstance(child, int | float):
        return _number(child)
    return join(child)


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}".rstrip("0").rstrip(".")


def page(title: str, body: Child) -> str:
    """Build a complete document."""
    style = resources.files("asyncrl.monitoring.report").joinpath("report.css").read_text("utf-8")
    document = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="referrer", content="no-referrer"),
            element("title", title),
            element("style", Markup(style)),
        ),
        element("body", element("main", body)),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"
