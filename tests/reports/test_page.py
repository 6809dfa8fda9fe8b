"""The page as text: what is on it, what cannot get onto it, and that it is the same twice."""

import json
import os
import re
import shutil
from base64 import b64decode
from html.parser import HTMLParser

import pytest

from stochastic_attention import cli
from stochastic_attention.reports.collect import KINDS
from stochastic_attention.reports.markdown import to_html
from stochastic_attention.tables import markdown

from .files import ENVIRONMENT, png, write_record


class Page(HTMLParser):
    """Elements, attributes and text of a page; every element must be closed where it should."""

    def __init__(self, html):
        super().__init__()
        self.html, self.elements, self.texts, self.open = html, [], {}, []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def report(folder, capsys, *, faults=0):
    output = folder.parent / "report.html"
    assert cli.main(["report", str(folder), "--output", str(output)]) == 0
    error = capsys.readouterr().err
    assert len(error.splitlines()) == faults, error
    return Page(output.read_text(encoding="utf-8")), error


def test_records_of_any_kind_are_shown_whole(results, capsys):
    page, _ = report(results, capsys)
    assert page.texts["h3"] == ["Speed: bench/cpu", "Files of bench", "Record: new"]
    assert page.texts["pre"] == [
        "sattn bench --lengths 2048",
        "2048 forward swa\n",
        "two cores\n",
        "sattn invent --much 3",
    ]
    cells = page.texts["td"]
    assert cells[:7] == ["2,048", "forward", "12.50", "50.00", "4.00x", "4.3x", "1.0"]
    assert "4.0" in cells  # full attention's memory, which has no time of its own
    assert {"over the budget", "0.5 ± 0.125 (n = 16)", "64"} <= set(cells)
    names = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert (names["seconds"], names["time"]) == ("1.25", "1,796,062,814")
    assert (names["much"], names["nested"], names["processor"]) == ("3", '{"a": [1.5, null]}', "AMD EPYC")
    assert (
        "AMD EPYC, cores 2, torch threads 1, python 3.11.7, torch 2.13.0, commit 0123456789ab-dirty" in page.texts["p"]
    )


def test_sections_are_grouped_by_kind_and_the_contents_lead_to_them(tmp_path, capsys):
    folder = tmp_path / "results"
    for kind, commands in KINDS.items():
        for command in commands:
            write_record(folder / command / "record.json", f"sattn {command}", config={"kind": kind})
    write_record(folder / "gpu.json", "python -m stochastic_attention bench", config={"device": "cuda:0"})
    write_record(folder / "x y%.json", "torchrun train.py")
    (folder / "notes.md").write_text("# Notes\n", encoding="utf-8")
    page, _ = report(folder, capsys, faults=13)  # records without data, which hardly any renderer takes
    shown = [text for tag, text in re.findall(r"<(h2|h3)>([^<]*)<", page.html)][2:]
    order = [name for name in shown if name in KINDS]
    assert order == list(KINDS)
    assert shown.index("Speed: gpu") > shown.index("GPU") > shown.index("Speed: bench")
    assert shown[shown.index("Other") + 1 :] == ["Record: x y%", "Files at the top"]
    targets = [href.removeprefix("#") for href in page.attributes("href")]
    assert sorted(targets) == sorted(page.attributes("id"))
    assert len(set(targets)) == len(targets)


def test_an_introduction_stands_before_what_it_tells_of_and_other_files_behind(tmp_path, capsys):
    folder = tmp_path / "results"
    for command in ("train", "reach"):
        write_record(folder / "books" / command / "record.json", f"sattn {command}")
    write_record(folder / "gpu" / "made.json", "sattn predict")
    for name in ("gpu/work.md", "books/README.md", "README.md"):
        (folder / name).write_text("[The table](train/table.md), `a[0](x)`\n\n    sattn train \\\n      --x\n")
    page, _ = report(folder, capsys, faults=2)
    shown = [text for tag, text in re.findall(r"<(h2|h3)>([^<]*)<", page.html)][2:]
    assert shown == [
        *("Training", "About these results", "About books", "Training: books/train"),
        *("GPU", "Predicted speed: gpu/made", "Files of gpu"),
        *("Theory", "Receptive fields: books/reach"),
    ]
    assert page.texts["p"].count("The table (train/table.md), a[0](x)") == 3
    assert page.texts["pre"].count("sattn train \\\n  --x") == 3
    assert page.texts["p"].count("These belong to no record.") == page.texts["p"].count("File: work.md") == 1


def test_files_named_after_their_record_are_its_table_and_plot(results, capsys):
    (results / "bench" / "cpu.png").write_bytes(png())
    (results / "bench" / "cpu.md").write_text("as it was kept\n", encoding="utf-8")
    page, _ = report(results, capsys)
    assert "Speedup over full attention against tokens, a curve a pattern." in page.texts["figcaption"]
    assert "as it was kept" not in page.html


EVIL = """<script>alert(1)</script><img src="http://example.org/a.png">'">&amp;"""


def test_nothing_written_in_a_record_becomes_markup(tmp_path, capsys):
    folder = tmp_path / "results"
    name = "<b> &amp; 'x'"
    row = {EVIL: EVIL, "list": [EVIL], "half": "\ud800"}
    write_record(
        folder / name / "record.json",
        f"sattn invent {EVIL}",
        config={EVIL: EVIL, "nested": [row]},
        environment={**ENVIRONMENT, "versions": {"torch": EVIL}, "processor": EVIL, EVIL: 1},
        results={EVIL: [row], "one": EVIL, "more": {EVIL: row}},
    )
    (folder / name / "plot.png").write_bytes(png())
    (folder / name / "printed.txt").write_text(EVIL, encoding="utf-8")
    (folder / "kept").mkdir()
    (folder / "kept" / "notes.md").write_text(
        f"# {EVIL}\n\n- {EVIL}\n\n{EVIL}\n\n| {EVIL} | b |\n| - | -: |\n| {EVIL} | `{EVIL}` |\n\n```\n{EVIL}\n```\n",
        encoding="utf-8",
    )
    (folder / f"{EVIL.replace('/', '')}.json").write_text("{", encoding="utf-8")
    page, _ = report(folder, capsys, faults=1)
    assert page.html.count("<script") == 0
    assert {tag for tag, _ in page.elements if tag in ("script", "b", "link", "iframe", "object")} == set()
    assert [tag for tag, _ in page.elements].count("img") == 1
    assert EVIL in page.texts["pre"]
    assert EVIL in page.texts["td"]


def test_nothing_is_loaded(results, capsys):
    page, _ = report(results, capsys)
    assert all(source.startswith("data:image/png;base64,") for source in page.attributes("src"))
    assert all(href.startswith("#") for href in page.attributes("href"))
    (style,) = page.texts["style"]
    assert not re.search(r"url\(|@import|http", style)
    assert "default-src 'none'; img-src data:" in page.html


def test_pictures_are_on_the_page_with_their_size_and_what_they_show(results, capsys):
    write_record(results / "mixing" / "record.json", "sattn mixing")
    (results / "mixing" / "plot.png").write_bytes(png(8, 4))
    page, _ = report(results, capsys, faults=1)
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert [b64decode(one["src"].partition(",")[2]) for one in images] == [png(8, 4), png()]
    assert [(one["width"], one["height"]) for one in images] == [("8", "4"), ("40", "20")]
    assert images[0]["alt"].startswith("Distance from the mixed state")
    assert images[1]["alt"] == "Picture plot.png. Record: new."


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"{", "is not JSON"),
        ("a.json", b"", "is not JSON"),
        ("a.json", b"\xff\xfe", "is not JSON"),
        ("a.json", b"[" * 100_000, "is not JSON"),
        (
            "deep.json",
            b'{"command": "", "config": {}, "environment": {}, "results": ' + b'{"a": ' * 700 + b"1" + b"}" * 701,
            "is nested too deeply",
        ),
        ("a.json", b"[1]", "is JSON but no record"),
        ("a.json", b'{"loss": 1}', "is JSON but no record"),
        ("a.json", b'{"config": {}, "results": {}}', "is JSON but no record"),
        ("a.json", b'{"preset": "", "patterns": [], "decode": null, "record": {"command": ""}}', "is no whole record"),
        ("a.json", b'{"command": "sattn x", "config": {}}', "is no whole record: environment, results missing"),
        ("record.json", b'{"command": 1, "config": {}, "environment": {}, "results": []}', "command, results missing"),
        ("plot.png", b"", "is not a PNG image"),
        ("plot.png", b"GIF89a" + bytes(40), "is not a PNG image"),
        ("table.md", b"\xff", "cannot be read"),
        ("out.txt", b"\xff", "cannot be read"),
    ],
)
def test_what_is_broken_is_named_and_the_rest_is_shown(results, capsys, name, content, reason):
    (results / "bad").mkdir()
    (results / "bad" / name).write_bytes(content)
    page, error = report(results, capsys, faults=1)
    assert error.startswith(f"sattn report: bad/{name}: ")
    assert reason in error
    if "no record" in reason:
        assert page.texts["summary"][-1] == "JSON files that are no record: 1"
        assert f"bad/{name}" in page.texts["details"][-1]
    else:
        assert f"bad/{name}" in page.texts["section"][0]
        assert reason in page.texts["section"][0]
    assert "Record: new" in page.texts["h3"]


@pytest.mark.parametrize("value", [[{}], {"a": {}}, [[]], [{"": {}}, {}], {"": [{}]}, 10**40, "x\0y"], ids=str)
def test_results_of_any_shape_are_shown_and_cost_no_other_record(results, capsys, value):
    write_record(results / "odd" / "record.json", "sattn other", results={"odd": value, "shown": 3})
    page, _ = report(results, capsys)
    assert "shown" in page.texts["dt"]
    assert "Record: new" in page.texts["h3"]


@pytest.mark.parametrize(
    ("speed", "faults", "shown"),
    [
        ([], 0, "No case was finished."),
        ([{"pattern": "swa", "length": 8, "backward": False, "seconds": 1.0}] * 2, 1, "a case was measured twice"),
    ],
    ids=["none", "twice"],
)
def test_cases_of_a_benchmark_are_never_dropped(tmp_path, capsys, speed, faults, shown):
    record = {"speed": speed, "decode": [], "memory": []}
    write_record(tmp_path / "results" / "record.json", "sattn bench", results=record)
    page, _ = report(tmp_path / "results", capsys, faults=faults)
    assert shown in "".join(page.texts["main"])
    assert page.texts.get("td", []).count("8") == len(speed)


@pytest.mark.parametrize("kept", [True, False])
def test_data_that_its_renderer_cannot_take_are_shown_as_kept_or_bare(results, capsys, kept):
    write_record(results / "old" / "record.json", "sattn compare", results={"cells": [{"score": 7}], "prefill": []})
    if kept:
        (results / "old" / "table.md").write_text(
            "| method | score |\n| :-- | --: |\n| swa | 7.0 |\n", encoding="utf-8"
        )
    page, error = report(results, capsys, faults=1)
    assert "old/record.json: no table can be made from its data (TypeError: CellResult with other fields: " in error
    assert ("7.0" in page.texts["td"]) == kept


@pytest.mark.parametrize(
    "arguments",
    [
        ["reach", "--n", "64", "--window", "4", "--layers", "2", "--patterns", "swa,sa"],
        ["mixing", "--n", "64", "--window", "4", "--patterns", "swa,sa", "--starts", "2", "--seeds", "2"],
        ["estimator", "--n", "256", "--windows", "8,16,32", "--local", "16", "--queries", "8", "--draws", "32"],
        ["graph", "--pattern", "sa", "--n", "64", "--window", "4"],
        [
            *("probe", "--task", "copy", "--attention", "swa,gated", "--length", "8", "--window", "2", "--layers", "1"),
            *("--steps", "2", "--batch", "2", "--rows", "4", "--routing-steps", "1", "--hidden", "8", "--heads", "1"),
        ],
        [
            *("predict", "--patterns", "swa,sliding", "--lengths", "256", "--decode-lengths", "256"),
            *("--tokens", "256", "--head-dim", "64", "--window", "16"),
        ],
    ],
    ids=lambda arguments: arguments[0],
)
def test_tables_made_from_data_are_those_that_the_command_wrote(tmp_path, capsys, arguments):
    pytest.importorskip("scipy")
    folder = tmp_path / "results" / "one"
    output = folder / "predictions.json" if arguments[0] == "predict" else folder
    assert cli.main([*arguments, "--output", str(output)]) == 0
    (kept,) = folder.glob("*.md")
    capsys.readouterr()
    page, _ = report(folder.parent, capsys)
    wanted = to_html(kept.read_text(encoding="utf-8").partition("\n\n## As")[2] or kept.read_text(), label="")
    cells = re.compile(r"<(?:th|td|li)[^>]*>([^<]*)<")
    assert [text for text in cells.findall(wanted) if text] != []
    assert set(cells.findall(wanted)) <= set(cells.findall(page.html))
    kept.write_text("| what | was |\n| --- | --- |\n| changed | since |\n", encoding="utf-8")
    assert report(folder.parent, capsys)[0].html == page.html


def test_the_same_files_give_the_same_bytes(results, tmp_path):
    pages = []
    for copy in ("one", "two"):
        folder = tmp_path / copy / "results"
        shutil.copytree(results, folder)
        for path in folder.rglob("*.json"):
            os.utime(path, (0, len(pages)))
        for _ in range(2):  # the second time with a page in the folder
            assert cli.main(["report", str(folder), "--output", str(folder / "report.html")]) == 0
            pages.append((folder / "report.html").read_bytes())
    assert len(set(pages)) == 1


def test_files_of_other_kinds_are_listed(results, capsys):
    (results / "new" / "cells.jsonl").write_text("{}\n", encoding="utf-8")
    (results / "new" / ".record.json.123").write_text("{", encoding="utf-8")
    (results / "linked").symlink_to(results)
    (results / "loop.json").symlink_to(results / "loop.json")
    page, error = report(results, capsys, faults=1)
    assert "loop.json: cannot be read" in error
    assert page.texts["summary"][-1] == "Files not shown: 2"
    assert {"new/cells.jsonl", "linked"} <= set(page.texts["code"])


@pytest.mark.parametrize("create", [False, True])
def test_a_folder_without_results_is_refused(tmp_path, capsys, create):
    folder = tmp_path / "none"
    if create:
        folder.mkdir()
        (folder / "model.pt").write_bytes(b"")
    assert cli.main(["report", str(folder), "--output", str(tmp_path / "report.html")]) == 2
    assert capsys.readouterr().err.startswith("sattn report: folder must ")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# a\n## b", "<h4>a</h4>\n<h5>b</h5>"),
        ("## b", "<h4>b</h4>"),
        ("- a\n  more\n- `b` **c**", "<ul><li>a\n  more</li>\n<li><code>b</code> <strong>c</strong></li></ul>"),
        ("*a **b** c* `d *e`*", "<p>*a <strong>b</strong> c* <code>d *e</code>*</p>"),
        ("a *b c*: 2 * 3 *d", "<p>a <em>b c</em>: 2 * 3 *d</p>"),
        ("a\nb\n\nc", "<p>a\nb</p>\n<p>c</p>"),
        ("a | b", "<p>a | b</p>"),
        ("```\n| <\n```", '<pre tabindex="0" role="region" aria-label="x">| &lt;</pre>'),
        ("````\n```\n````\nx", '<pre tabindex="0" role="region" aria-label="x">```</pre>\n<p>x</p>'),
        ("    a\n     b\nc", '<pre tabindex="0" role="region" aria-label="x">a\n b</pre>\n<p>c</p>'),
        ("![a `b`](c/d.png) (e)", "<p>a <code>b</code> (c/d.png) (e)</p>"),
        ("", ""),
    ],
)
def test_markdown(text, html):
    assert to_html(text, label="x") == html


def test_a_table_keeps_its_alignment_and_every_cell():
    html = to_html("| a | b |\n|:--|--:|\n| x \\| y | 1 |\n| only |\n| p | q | r |\n", label="x")
    rows = re.findall(r"<tr>(.*)</tr>", html)
    assert rows[0] == '<th scope="col">a</th><th scope="col" class="n">b</th><th scope="col"></th>'
    assert rows[1] == '<th scope="row">x | y</th><td class="n">1</td><td></td>'
    assert rows[3] == '<th scope="row">p</th><td class="n">q</td><td>r</td>'


def test_what_divides_cells_may_stand_in_one():
    assert '<th scope="row">preset:a|b.json</th><td class="n">1</td>' in to_html(
        markdown([["method", "keys"], ["preset:a|b.json", "1"]]), label="x"
    )


def test_a_long_table_is_folded():
    rows = "".join(f"| {i} | {i} |\n" for i in range(41))
    assert to_html(f"| a | b |\n| - | - |\n{rows}", label="x").startswith(
        "<details><summary>Table of 41 rows</summary>"
    )


def test_numbers_of_a_record_are_exact(results, capsys):
    facts = json.loads((results / "new" / "record.json").read_text())
    facts["config"] = {"rate": 0.30000000000000004, "none": None, "yes": True, "list": ["a", 1]}
    (results / "new" / "record.json").write_text(json.dumps(facts))
    page, _ = report(results, capsys)
    assert {"0.30000000000000004", "none", "yes", "a, 1"} <= set(page.texts["dd"])
