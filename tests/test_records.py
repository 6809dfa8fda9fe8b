import pytest

from stochastic_attention.records import Environment, Record, write_text


def test_a_record_survives_its_file(tmp_path):
    record = Record("sattn compare", {"seeds": 3}, Environment.current(), {"cells": [1.5, None]})
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_a_record_holds_no_nan(tmp_path):
    record = Record("sattn compare", {}, Environment.current(), {"value": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        record.save(tmp_path / "record.json")
    assert not (tmp_path / "record.json").exists()


def test_the_environment_names_versions_and_hardware():
    environment = Environment.current()
    assert {"python", "torch", "stochastic-attention"} <= set(environment.versions)
    assert environment.processor
    assert environment.cores >= 1


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_a_file_is_written_where_a_link_leads(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    write_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "file").read_text(encoding="utf-8") == "text"
