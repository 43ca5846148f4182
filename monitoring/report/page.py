"""The HTML document around the report's sections.

It contains no script, and its content security policy forbids loading anything. The style is that
of report.css.
"""

from __future__ import annotations

from importlib import resources

from asyncrl.monitoring.report.markup import Child, Markup, element

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, body: Child) -> str:
    """A complete document."""
    style = (
        resources.files("asyncrl.monitoring.report")
        .joinpath("report.css")
        .read_text(encoding="utf-8")
    )
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
