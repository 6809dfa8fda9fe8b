"""Configuration files: YAML, settings on the command line, and dataclasses that say which keys there are.

A key is checked against the annotation of its field: a wrong file is refused before any work, by the key's name.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
_UNFIT = object()


class _Loader(yaml.SafeLoader):
    """YAML whose floats are those of YAML 1.2 (PyYAML takes 3e-4 for text), and which refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice{node.start_mark}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; ValueError where it cannot be read or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config must be a YAML file that can be read, got {str(path)!r}: {error}") from None
    found = _parse(text, f"config {path}")
    if not isinstance(found, dict):
        raise ValueError(f"config must hold a mapping of sections, got {type(found).__name__} in {path}")
    return found


def apply_settings(config: dict[str, Any], settings: Sequence[str]) -> None:
    """Put settings "section.key=value" into a configuration; the value is YAML. A key set to `null` is None.

    Raises:
        ValueError: a setting has not this form, or its path leads through something that is no mapping.
    """
    for setting in settings:
        path, equals, text = setting.partition("=")
        *sections, key = path.split(".")
        if not equals or not all((*sections, key)):
            raise ValueError(f"set must be SECTION.KEY=VALUE, got {setting!r}")
        place: Any = config
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"set must lead through mappings, but {section} in {setting!r} is {place!r}")
        place[key] = _parse(text, f"the value of {path}")


def read_section(kind: type[T], name: str, given: object) -> T:
    """A dataclass from the mapping of the same keys.

    Args:
        kind: the dataclass. Its `__post_init__` checks ranges.
        name: of the section, as errors call it; "" for the whole file.
        given: what the file holds there.

    Raises:
        ValueError: naming the key, what was expected and what came.
    """
    where = name or "config"
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a mapping, got {given!r}")
    hints = get_type_hints(kind)
    prefix = f"{name}." if name else ""
    for key in given:
        if key not in hints:
            raise ValueError(f"{prefix}{key} is no setting; {where} has {', '.join(hints)}")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{field.name} must be {_told(hints[field.name])}, got nothing")
    return kind(**{key: _converted(f"{prefix}{key}", hints[key], value) for key, value in given.items()})


def _parse(text: str, what: str) -> object:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from None


def _converted(name: str, hint: Any, value: Any) -> Any:  # noqa: ANN401  # what a file holds
    """`value` as its annotation wants it: 1e9 for an integer, 1 for a float, text for a path, a list for a tuple."""
    for kind in _alternatives(hint):
        converted = _as(kind, name, value)
        if converted is not _UNFIT:
            return converted
    raise ValueError(f"{name} must be {_told(hint)}, got {value!r}")


def _as(kind: Any, name: str, value: Any) -> Any:  # noqa: ANN401
    origin = get_origin(kind) or kind
    if kind is Any:
        return value
    if isinstance(value, bool):
        return value if kind is bool else _UNFIT
    if origin is Literal:
        return value if value in get_args(kind) else _UNFIT
    if kind is int:
        return int(value) if isinstance(value, int | float) and value % 1 == 0 else _UNFIT
    if kind is float:
        return float(value) if isinstance(value, int | float) else _UNFIT
    if kind is Path:
        return Path(value) if isinstance(value, str) else _UNFIT
    if origin in (list, tuple):
        inner = get_args(kind)[0]
        items = value if isinstance(value, list) else None
        return _UNFIT if items is None else origin(_converted(f"{name}[{i}]", inner, x) for i, x in enumerate(items))
    if is_dataclass(kind):
        return read_section(kind, name, value) if isinstance(value, Mapping) else _UNFIT  # type: ignore[arg-type]
    return value if isinstance(value, origin) else _UNFIT


def _alternatives(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _told(hint: Any) -> str:  # noqa: ANN401
    """An annotation in words."""
    origin = get_origin(hint)
    if len(_alternatives(hint)) > 1:
        return " or ".join(map(_told, _alternatives(hint)))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if origin in (list, tuple):
        return f"a list of {_told(get_args(hint)[0])}"
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
        type(None): "null",
    }
    return words.get(origin or hint, "a mapping")
