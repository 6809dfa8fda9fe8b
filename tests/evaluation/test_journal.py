import pytest

from stochastic_attention.evaluation.journal import Journal

CONFIG = {"seeds": 2, "text": None, "limits": (1, 2)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "cells.jsonl"


def test_what_is_added_is_there_when_opened_again(path):
    journal = Journal(path, CONFIG)
    journal.add("one", {"x": [1, None]})
    journal.add("two", 2.5)
    assert Journal(path, CONFIG).done == {"one": {"x": [1, None]}, "two": 2.5} == journal.done


@pytest.mark.parametrize("kept", [1, 10])
def test_a_torn_last_line_is_dropped_and_written_over(path, kept):
    Journal(path, CONFIG).add("one", 1)
    whole = path.read_text()
    Journal(path, CONFIG).add("two", 2)
    path.write_text(path.read_text()[: len(whole) + kept])
    journal = Journal(path, CONFIG)
    assert journal.done == {"one": 1}
    journal.add("two", 3)
    assert Journal(path, CONFIG).done == {"one": 1, "two": 3}


def test_opening_a_whole_journal_leaves_its_file_to_others_that_add_to_it(path):
    Journal(path, CONFIG).add("one", 1)
    with path.open("a") as other:
        Journal(path, CONFIG)
        other.write('{"key": "two", "value": 2}\n')
    assert Journal(path, CONFIG).done == {"one": 1, "two": 2}


def test_a_torn_first_line_begins_anew(path):
    path.parent.mkdir()
    path.write_text('{"config": {"see')
    assert Journal(path, CONFIG).done == {}


def test_a_changed_configuration_is_an_error_that_says_what_changed_and_whether_anything_is_finished(path):
    journal, changed = Journal(path, CONFIG), {**CONFIG, "seeds": 3, "fresh": 1}
    told = r"seeds was 2, now 3; fresh was None, now 1\); "
    with pytest.raises(ValueError, match=rf"{told}nothing of it is finished: delete .*cells.jsonl, or choose another"):
        Journal(path, changed)
    journal.add("one", 1)
    with pytest.raises(ValueError, match=f"{told}choose another output"):
        Journal(path, changed)


def test_a_figure_that_json_cannot_hold_is_named_and_nothing_is_written(path):
    journal = Journal(path, CONFIG)
    with pytest.raises(ValueError, match="lambada full: a figure is infinite or NaN"):
        journal.add("lambada full", {"perplexity": float("inf")})
    assert Journal(path, CONFIG).done == {}


@pytest.mark.parametrize("line", ["not json", '{"key": "x"}', "3"])
def test_damage_before_the_last_line_is_an_error(path, line):
    Journal(path, CONFIG)
    with path.open("a") as file:
        file.write(f'{line}\n{{"key": "a", "value": 1}}\n')
    with pytest.raises(ValueError, match="line 2"):
        Journal(path, CONFIG)
