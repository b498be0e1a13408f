"""Objects of Kubernetes against an OpenAPI schema of a CRD, as strictly as ``kubectl --validate=strict``."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["problems"]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def problems(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """What the schema refuses, each with its place. A field that the schema lacks is a problem, too."""
    if schema.get("x-kubernetes-int-or-string"):
        fits = isinstance(value, (int, str)) and not isinstance(value, bool)
        if not fits:
            return [f"{at}: {value!r} is no integer or string"]
    elif "type" in schema:
        kind = schema["type"]
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
            return [f"{at}: {value!r} is no {kind}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: {value!r} is none of {schema['enum']}")
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        found.append(f"{at}: {value!r} does not match {schema['pattern']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{at}: {value!r} is less than {schema['minimum']}")
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        found.append(f"{at}: more than {schema['maxItems']} items")
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += problems(item, schema["items"], f"{at}[{number}]")
    if isinstance(value, dict):
        found += _fields(value, schema, at)
    return found


def _fields(value: dict[str, Any], schema: dict[str, Any], at: str) -> list[str]:
    known, other = schema.get("properties", {}), schema.get("additionalProperties")
    found = [f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value]
    for name, item in value.items():
        if name in known or other is not None:
            found += problems(item, known.get(name, other), f"{at}.{name}")
        elif known:
            found.append(f"{at}.{name}: no such field")
    return found
