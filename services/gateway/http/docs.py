"""The API's description as one page of HTML, without scripts or anything from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2433 }
code { font: 13px ui-monospace, monospace } h2 { margin-top: 2.5rem; border-top: 1px solid #ccd; padding-top: 1rem }
table { border-collapse: collapse; width: 100% } td { border-top: 1px solid #e4e6ee; padding: .2rem .6rem .2rem 0;
vertical-align: top } td:nth-child(2) { white-space: nowrap; color: #667 } a { color: #24c; text-decoration: none }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #dde } a { color: #8af } }
"""
_INTRODUCTION = """<p>A field that is not given, or null, has its default; one that is not listed is refused. Errors are
<code>{"error": {"message", "type", "param", "code"}}</code>. With <code>stream</code> the answer is a sequence of
events, <code>data: {…}</code>, which ends with <code>data: [DONE]</code>; an error in between is the last event.
The events of <code>/v1/responses</code> and <code>/v1/messages</code> have names and no <code>[DONE]</code>, and an
error is <code>response.failed</code> in the one; the other's errors are <code>{"type": "error", "error": {"type",
"message"}}</code>, in a stream as the event <code>error</code>.
For programs: <a href="/openapi.json">/openapi.json</a>.</p>"""


def render(document: dict[str, Any]) -> bytes:
    """`document`: an OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>',
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])}</p>{_INTRODUCTION}",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(method, path, operation)
    parts.append("<h2>Types</h2>")
    for name, schema in schemas.items():
        parts.append(f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>')
        if schema.get("description"):
            parts.append(f"<p>{escape(schema['description'])}</p>")
        parts += _fields(schema)
    return "".join(parts).encode()


def _operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    parts = [f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"]
    body = operation.get("requestBody")
    if body:
        parts.append(f"<p>Body: {_kind(body['content']['application/json']['schema'])}</p>")
    for status, response in operation["responses"].items():
        kinds = [f"{escape(media)}: {_kind(content['schema'])}" for media, content in response["content"].items()]
        parts.append(f"<p><code>{status}</code> {escape(response['description'])} {', '.join(kinds)}</p>")
    return parts


def _fields(schema: dict[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}<td>{_kind(field)}"
        f"<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    ]
    return ["<table>", *rows, "</table>"]


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(kind for option in schema["anyOf"] if (kind := _kind(option)) != "null")
    if "enum" in schema:
        return ", ".join(escape(str(value)) for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(kind if isinstance(kind, str) else " or ".join(kind))
