"""The page that describes the API, made from its OpenAPI schema.

FastAPI's own page loads its scripts from another site, and is blank where that cannot be reached.
"""

import re
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 66rem; padding: 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .2rem; } h2 code { font-size: 1.1rem; } p { margin: .3rem 0; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { padding: .2rem 1rem .2rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #8886; }
th { font-weight: 500; opacity: .7; } code { font-size: .95em; }
"""


def page(schema: dict[str, Any]) -> str:
    """What an OpenAPI schema says, as HTML without scripts and without anything from elsewhere."""
    about, parts = schema["info"], [*_endpoints(schema), *_models(schema)]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(about['title'])}: the API</title>"
    first = f"<h1>{escape(about['title'])} {escape(about['version'])}: the API</h1>{_text(about['description'])}"
    told = '<p>The same for machines: <a href="openapi.json">openapi.json</a></p>'
    return "\n".join([head, f"<style>{_STYLE}</style>", first, told, *parts])


def _endpoints(schema: dict[str, Any]) -> Iterator[str]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>{_text(operation.get('description', ''))}"
            for each in operation.get("parameters", []):
                yield f"<p><code>{escape(each['name'])}</code> in the path: {_type(each['schema'])}</p>"
            if "requestBody" in operation:
                yield f"<p>Send: {_content(operation['requestBody'])}</p>"
            answers = (
                (code, each.get("description", ""), _content(each)) for code, each in operation["responses"].items()
            )
            yield _table(("status", "meaning", "answer"), ((code, escape(said), body) for code, said, body in answers))


def _models(schema: dict[str, Any]) -> Iterator[str]:
    for name, model in schema["components"]["schemas"].items():
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2>{_text(model.get("description", ""))}'
        required = model.get("required", [])
        rows = (
            (
                f"<code>{escape(field)}</code>",
                _type(each) + ("" if field in required else ", optional"),
                escape(each.get("description", "")),
            )
            for field, each in model.get("properties", {}).items()
        )
        yield _table(("field", "type", "meaning"), rows)


def _content(body: dict[str, Any]) -> str:
    return " or ".join(_type(each.get("schema", {})) for each in body.get("content", {}).values())


def _type(schema: dict[str, Any]) -> str:
    """The type of a value in words; models are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"<code>{escape(str(each))}</code>" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    limits = [f"{word} {schema[key]:g}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return escape(" ".join([schema.get("type", "anything"), *limits]))


def _text(said: str) -> str:
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(said))
    return "".join(f"<p>{part}</p>" for part in marked.split("\n\n") if part)


def _table(names: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{each}" for each in row) for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}' for name in names)}{cells}</table>"
