"""/docs: the reference of the API, from its OpenAPI description, without scripts.

The usual page of FastAPI loads its scripts from another site.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.monitoring.report.markup import Child, Markup, element


def reference_page(openapi: Mapping[str, Any]) -> str:
    """A page with each operation: what it does, what it takes, what it answers."""
    parts = [
        _operation(path, method, about, openapi)
        for path, methods in openapi["paths"].items()
        for method, about in methods.items()
    ]
    paragraphs = openapi["info"].get("description", "").strip().split("\n\n")
    document = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", "asyncrl: HTTP API"),
            Markup('<link rel="stylesheet" href="/page.css"/>'),
        ),
        element(
            "body",
            element(
                "main",
                element("h1", "HTTP API"),
                [element("p", _with_code(text), class_="about") for text in paragraphs],
                element(
                    "p",
                    "For programs: ",
                    element("a", "/openapi.json", href="/openapi.json"),
                    " (OpenAPI). Back to ",
                    element("a", "the run", href="/"),
                    ".",
                    class_="about",
                ),
                parts,
            ),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _with_code(text: str) -> list[Child]:
    """The text, with what is between backticks as code."""
    parts = text.split("`")
    return [element("code", part) if index % 2 else part for index, part in enumerate(parts)]


def _operation(
    path: str, method: str, about: Mapping[str, Any], openapi: Mapping[str, Any]
) -> Child:
    taken = [*_parameters(about), *_body(about, openapi)]
    answers = [
        element("tr", element("td", code), element("td", each.get("description", "")))
        for code, each in about["responses"].items()
    ]
    return element(
        "section",
        element("h3", element("code", f"{method.upper()} {path}")),
        element("p", _with_code(about.get("description", ""))),
        element("table", taken) if taken else None,
        element(
            "details", element("summary", "Answers"), element("table", answers), class_="answers"
        ),
        class_="card operation",
    )


def _parameters(about: Mapping[str, Any]) -> Iterator[Markup]:
    for one in about.get("parameters", ()):
        yield _row(one["name"], one["in"], one["schema"], required=one.get("required", False))


def _body(about: Mapping[str, Any], openapi: Mapping[str, Any]) -> Iterator[Markup]:
    try:
        reference = about["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    except KeyError:
        return
    schema = openapi["components"]["schemas"][reference.rpartition("/")[2]]
    for name, value in schema.get("properties", {}).items():
        yield _row(name, "body", value, required=name in schema.get("required", ()))


def _row(name: str, place: str, schema: Mapping[str, Any], *, required: bool) -> Markup:
    kinds = [one.get("type", "") for one in schema.get("anyOf", [schema])]
    details = [" or ".join(kinds)]
    if "enum" in schema:
        details.append("one of " + ", ".join(map(str, schema["enum"])))
    if required:
        details.append("required")
    elif "default" in schema:
        details.append(f"default {json.dumps(schema['default'])}")
    return element(
        "tr",
        element("td", element("code", name)),
        element("td", place),
        element("td", ", ".join(details)),
    )
