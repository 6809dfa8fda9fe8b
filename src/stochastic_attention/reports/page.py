"""The page: contents, then a section a record, grouped by kind. The same files give the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import markdown, plain
from .collect import KINDS, Entry, Findings
from .from_data import PARTS, RENDERERS
from .markup import command_line, definitions, element, folded, image, preformatted, wrap

_LABELS = {
    "compare": "Quality at equal budget",
    "recommend": "A recommended pattern",
    "eval": "Zero-shot tasks",
    "perplexity": "Perplexity",
    "generate": "Generation",
    "train": "Training",
    "probe": "Probes",
    "bench": "Speed",
    "predict": "Predicted speed",
    "reach": "Receptive fields",
    "mixing": "Mixing",
    "estimator": "Bias and variance",
    "graph": "A graph",
    "compare-graphs": "Graphs side by side",
}
# By command and file: what a picture shows, for those who do not see it.
_PICTURES = {
    ("perplexity", "plot.png"): "Perplexity by position, and of repeats by distance, a curve a kind of model",
    ("compare", "plot.png"): "Quality against mean keys a query, a panel a task, a curve a method",
    ("eval", "plot.png"): "Mean over the tasks against mean keys a query, a panel a measure of keys, a curve a method",
    ("reach", "plot.png"): "Share of the past that is reached against the number of layers, a curve a pattern",
    ("reach", "position.png"): "Share of the past that is reached against the query's position, a panel a depth",
    ("mixing", "plot.png"): "Distance from the mixed state against the number of layers, a curve a pattern",
    ("estimator", "plot.png"): "Bias and variance against the window, a curve an estimate",
    ("compare-graphs", "plot.png"): "Clustering over path length, a point a graph",
    ("probe", "plot.png"): "Accuracy against distance, a curve a kind of attention",
    ("train", "loss.png"): "Loss against training tokens",
    ("bench", "plot.png"): "Speedup over full attention against tokens, a curve a pattern",
}
_COUNTS = ("cores", "torch_threads")
_MADE_FROM_DATA = ("table.md", "report.md")
# Nothing is ever loaded: neither by this page, nor through what is written in a record.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render(findings: Findings) -> str:
    """The page as HTML. What could not be shown is added to `findings.faults`, and is on the page."""
    groups = {kind: [entry for entry in findings.entries if findings.kind(entry) == kind] for kind in KINDS}
    groups = {kind: entries for kind, entries in groups.items() if entries}
    # First, because it finds the faults that stand above.
    body = "\n".join(_group(findings, kind, entries) for kind, entries in groups.items())
    title = f"Results in {findings.folder.resolve().name}"
    count = sum(entry.record is not None for entry in findings.entries)
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    html = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
{element("title", title)}
<style>
{style}</style>
</head>
<body>
<header>
{element("h1", title)}
<p>{count} record{"" if count == 1 else "s"}, each with the command that makes it again.</p>
</header>
{_contents(groups)}
<main>
{_faults(findings)}{body}
{_rest(findings)}</main>
<a class="back" href="#contents">Contents</a>
</body>
</html>
"""
    # JSON and file names may hold halves of characters, which UTF-8 cannot write.
    return html.encode("utf-8", "backslashreplace").decode("utf-8")


def _contents(groups: Mapping[str, list[Entry]]) -> str:
    items = [
        f"<li>{kind}\n<ul>\n"
        + "".join(f"<li>{element('a', _title(entry), href=f'#{_anchor(entry)}')}</li>\n" for entry in entries)
        + "</ul></li>"
        for kind, entries in groups.items()
    ]
    return '<nav aria-label="Contents" id="contents">\n<h2>Contents</h2>\n<ul>\n' + "\n".join(items) + "\n</ul>\n</nav>"


def _group(findings: Findings, kind: str, entries: list[Entry]) -> str:
    pieces = [element("h2", kind)]
    for entry in entries:
        try:
            html = "\n".join(_section(findings, entry))
        except RecursionError:
            findings.faults[entry.path] = html = "is nested too deeply to be shown"
        pieces.append(wrap("section", f"{element('h3', _title(entry))}\n{html}\n", id=_anchor(entry)))
    return "\n".join(pieces)


def _title(entry: Entry) -> str:
    if entry.record is None:
        words = ("About these results", "About") if entry.is_introduction else ("Files at the top", "Files of")
        return words[0] if entry.name == "." else f"{words[1]} {entry.name}"
    return f"{_LABELS.get(entry.command or '', 'Record')}: {entry.name}"


def _anchor(entry: Entry) -> str:
    return f"record/{quote(os.fsencode(entry.path))}"


def _section(findings: Findings, entry: Entry) -> Iterator[str]:
    record = entry.record
    if record is None:
        if not entry.is_introduction:
            yield "<p>These belong to no record.</p>"
    else:
        yield command_line(record["command"])
        yield element("p", _machine(record["environment"]), class_="machine")
    yield from _tables(findings, entry)
    for path in entry.files:
        if path.suffix == ".png":
            yield _picture(findings, entry, path)
        elif path.suffix == ".txt" and (text := _text(findings, path)) is not None:
            yield folded(f"As printed: {path.name}", preformatted(text, label=path.name))
    if record is not None:
        yield folded("Configuration", definitions(record["config"]))
        facts = element("p", f"Record: {entry.path}") + definitions(record["environment"])
        yield folded("Versions and hardware", facts)


def _machine(environment: Mapping[str, Any]) -> str:
    """The hardware and the versions that decide a figure, on a line."""
    facts = [str(environment[name]) for name in ("accelerator", "processor") if environment.get(name)]
    facts += [f"{name.replace('_', ' ')} {environment[name]}" for name in _COUNTS if name in environment]
    versions = environment.get("versions")
    if isinstance(versions, dict):
        facts += [f"{name} {versions[name]}" for name in ("python", "torch", "transformers") if name in versions]
    if environment.get("commit"):
        digest, dash, state = str(environment["commit"]).partition("-")
        facts.append(f"commit {digest[:12]}{dash}{state}")
    return ", ".join(facts) or "The record names no hardware."


def _tables(findings: Findings, entry: Entry) -> Iterator[str]:
    """From the data where that is known how, else those that were kept, else the bare results."""
    title, record, left = _title(entry), entry.record, {}
    kept = [path for path in entry.files if path.suffix == ".md"]
    if record is not None:
        left = record["results"]
        renderer = RENDERERS.get(entry.command or "")
        try:
            text = renderer(record["config"], left) if renderer else None
        except Exception as error:  # another version's record, an extra that is missing: of any kind, and told
            findings.faults[entry.path] = (
                f"no table can be made from its data ({type(error).__name__}: {' '.join(str(error).split())}); "
                f"shown {'as it was kept' if kept else 'bare'}"
            )
            text = None
        if text is not None:
            yield markdown.to_html(text, label=title)
            shown = PARTS.get(entry.command or "", left)
            left = {name: value for name, value in left.items() if name not in shown}
            kept = [path for path in kept if _role(entry, path) not in _MADE_FROM_DATA]
        elif kept:
            left = {}
    for path in kept:
        if (text := _text(findings, path)) is not None:
            if path.name != "README.md" and _role(entry, path) not in _MADE_FROM_DATA:
                yield element("p", f"File: {path.name}", class_="machine")
            yield markdown.to_html(text, label=f"{title}, {path.name}")
    yield plain.to_html(left, label=title)


def _role(entry: Entry, path: Path) -> str:
    """A file's name as it is beside a record.json; some commands name a table or a plot after their record."""
    named_after = path.stem == Path(entry.path).stem
    return {".md": "table.md", ".png": "plot.png"}.get(path.suffix, path.name) if named_after else path.name


def _picture(findings: Findings, entry: Entry, path: Path) -> str:
    shown = _PICTURES.get((entry.command or "", _role(entry, path)), f"Picture {path.name}")
    try:
        picture = image(path.read_bytes(), alt=f"{shown}. {_title(entry)}.")
    except (OSError, ValueError) as error:
        findings.blame(path, str(error))
        return ""
    return wrap("figure", picture + element("figcaption", f"{shown}."))


def _text(findings: Findings, path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        findings.blame(path, f"cannot be read: {error}")
        return None


def _faults(findings: Findings) -> str:
    if not findings.faults:
        return ""
    items = "".join(
        wrap("li", f"{element('code', name)} {element('span', reason)}") + "\n"
        for name, reason in sorted(findings.faults.items())
    )
    return f'<section class="faults">\n<h2>Not understood</h2>\n<ul>\n{items}</ul>\n</section>\n'


def _rest(findings: Findings) -> str:
    return "".join(
        folded(f"{words}: {len(names)}", wrap("ul", "\n".join(wrap("li", element("code", name)) for name in names)))
        + "\n"
        for words, names in (("JSON files that are no record", findings.foreign), ("Files not shown", findings.rest))
        if names
    )
