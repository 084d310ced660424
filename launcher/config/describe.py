"""A JSON Schema node in words, for the line "accepted" of a message: schema and messages cannot drift apart."""

from collections.abc import Mapping
from typing import Any

_MOST_CHOICES = 12
_SIMPLE = {"string": "text", "boolean": "true or false", "object": "a mapping", "null": "null"}

_PATTERNS = {
    r"\S": "text (not blank)",
    r"^\S+$": "text without spaces",
    r"^[1-9]\d*(:[1-9]\d*)?$": "MIN:MAX as in 2:4",
}


def describe(node: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> str:
    """`{"type": "integer", "minimum": 1}` -> `a whole number of at least 1`. `definitions` resolves `$ref`."""
    definitions = definitions or {}
    if "$ref" in node:
        return describe(definitions[str(node["$ref"]).rsplit("/", 1)[-1]], definitions)
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(describe(item, definitions) for item in node["anyOf"]))
    if "enum" in node or "const" in node:
        return _choices([str(choice) for choice in node.get("enum", [node.get("const")])])
    return _describe_type(node, definitions)


def _describe_type(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    kind = node.get("type", "")
    if kind in ("integer", "number"):
        return _number(node)
    if kind == "array":
        at_least = ", at least one" if node.get("minItems") else ""
        return f"a list of {describe(node.get('items', {}), definitions)}{at_least}"
    if kind == "object" and "properties" in node:
        return f"a mapping with the keys {_choices(list(node['properties']))}"
    if kind == "string" and "pattern" in node:
        return _PATTERNS.get(node["pattern"], f"text that matches {node['pattern']}")
    return _SIMPLE.get(kind, "any value")


def _choices(choices: list[str]) -> str:
    if len(choices) <= _MOST_CHOICES:
        return ", ".join(choices)
    return f"{', '.join(choices[:_MOST_CHOICES])}, ... ({len(choices)} in all: ftlaunch schema)"


def _number(node: Mapping[str, Any]) -> str:
    name = "a whole number" if node["type"] == "integer" else "a number"
    bounds = []
    for keyword, words in (
        ("minimum", "of at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ):
        if keyword in node:
            bounds.append(f"{words} {node[keyword]:g}")
    return " ".join([name, " and ".join(bounds)]) if bounds else name
