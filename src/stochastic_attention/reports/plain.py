"""Results of any shape as tables: what is shown of a record that no renderer knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .markup import definitions, element, table

_MOST = 12  # items of a list inside a cell


def to_html(results: Mapping[str, Any], *, label: str) -> str:
    """All single values, then a table for each list or mapping of rows."""
    single = {name: value for name, value in results.items() if not (_is_rows(value) or _is_mapping_of_rows(value))}
    pieces = []
    if single:
        pieces.append(definitions({name: figure(value) for name, value in single.items()}))
    for name, value in results.items():
        if name in single or not value:
            continue
        rows = [{"": key, **row} for key, row in value.items()] if isinstance(value, dict) else value
        header = list(dict.fromkeys(column for row in rows for column in row))
        body = [[figure(row[column]) if column in row else "" for column in header] for row in rows]
        pieces += [element("h4", name), table(header, body, label=f"{label}: {name}")]
    return "\n".join(pieces)


def figure(value: Any) -> str:  # noqa: ANN401  # plain data
    """A value in a cell: four digits, or all before the point; an estimate with its error; a long list, cut."""
    if value is None:
        return ""
    if isinstance(value, int) and abs(value) >= 1e4:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, dict) and set(value) == {"value", "stderr", "n"}:
        error = "" if value["stderr"] is None else f" ± {figure(value['stderr'])}"
        return f"{figure(value['value'])}{error} (n = {figure(value['n'])})"
    if isinstance(value, dict):
        told = {name: f"({figure(item)})" if isinstance(item, dict) else figure(item) for name, item in value.items()}
        return ", ".join(f"{name}: {item}" for name, item in told.items())
    if isinstance(value, list):
        more = f", and {len(value) - _MOST:,} more" if len(value) > _MOST else ""
        return ", ".join(map(figure, value[:_MOST])) + more
    return value if isinstance(value, str) else json.dumps(value)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) and row for row in value)


def _is_mapping_of_rows(value: object) -> bool:
    return isinstance(value, dict) and len(value) > 0 and all(isinstance(row, dict) for row in value.values())
