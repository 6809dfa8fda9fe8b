import json

import pytest

from stochastic_attention import cli
from stochastic_attention.evaluation import compare as comparison


@pytest.fixture
def arguments(tmp_path, model_folder):
    (tmp_path / "text.txt").write_text("it was a dark night and the wind blew over the hills. " * 12, encoding="utf-8")
    return [
        "compare",
        *("--model", str(model_folder), "--methods", "full,swa,sa", "--budgets", "8", "--tasks", "recall"),
        *("--limit", "2", "--seeds", "2", "--length", "40", "--repeats", "1"),
        *("--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")),
    ]


def test_compare_writes_record_table_and_plot(arguments, tmp_path, capsys):
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert shown.startswith(table)
    assert table.count("\n| ") == 4
    record = json.loads((tmp_path / "out" / "record.json").read_text(encoding="utf-8"))
    assert record["command"].startswith("sattn compare --model ")
    assert len(record["results"]["cells"]) == 4
    assert record["config"]["length"] == 40
    assert {"python", "torch", "transformers"} <= set(record["environment"]["versions"])
    assert (tmp_path / "out" / "plot.png").exists()


def test_an_interrupt_keeps_what_is_finished_and_says_how_to_resume(arguments, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "prefill_times", interrupted)
        assert cli.main(arguments) == 130
    told = capsys.readouterr().err
    assert "to resume: sattn compare --model" in told
    lines = (tmp_path / "out" / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 4
    assert cli.main(arguments) == 0
    assert (tmp_path / "out" / "cells.jsonl").read_text(encoding="utf-8").splitlines()[:5] == lines
