"""Rows from a streamed set, offline: local JSON lines read as a stream are what the hub's sets are."""

import copy
import json
import pickle

import pytest
import torch

from stochastic_attention.lm import stream as streams
from stochastic_attention.lm.data import DataConfig, DataExhausted, open_data

pytest.importorskip("datasets")

DOCUMENTS = [f"{index} " + "the wind blew " * (index % 5) for index in range(18)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name, documents in (("train", DOCUMENTS), ("held", ["a held out text", " ", "and one more"])):
        lines = [json.dumps({"id": index, "text": text}) for index, text in enumerate(documents)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def opened(files, bytes_tokenizer):
    def opened(length=16, *, dataset=(), seed=0, **settings):
        wanted = {"name": "json", "files": str(files / "train.jsonl"), **dict(dataset)}
        config = DataConfig(dataset=wanted, **settings)
        return open_data(
            config, tokenizer=bytes_tokenizer, sequence_length=length, seed=seed, cache_dir=files / "cache"
        )

    return opened


@pytest.fixture
def small_calls(monkeypatch):
    """Many places to resume from in a small set."""
    monkeypatch.setattr(streams, "_CALL", 3)
    monkeypatch.setattr(streams, "_EVERY", 2)


def ids(rows):
    return [row["input_ids"].tolist() for row in rows]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_stream_has_the_rows_of_the_text_in_order(opened, spell, epochs):
    train = opened(epochs=epochs).train
    expected = "".join(f"<{text}>" for text in DOCUMENTS)
    rows = list(train)
    one = rows[: len(rows) // epochs]
    found = "".join(spell(row["input_ids"]) for row in one)
    assert found.rstrip(">") == expected.rstrip(">")
    assert len(found) - len(expected) < 16
    assert ids(rows) == ids(one) * epochs
    assert ids(train) == ids(rows)  # a second iteration begins again


def test_rows_are_those_of_the_same_text_in_memory(opened):
    """Every tensor, positions and labels too."""
    stored = opened(dataset={"streaming": False}).train
    places = {stored._place(0, index): index for index in range(len(stored))}
    for place, row in enumerate(opened().train):
        for name, tensor in stored[places[place]].items():
            assert torch.equal(row[name], tensor)


@pytest.mark.usefixtures("small_calls")
def test_it_resumes_after_every_row(opened):
    whole = ids(opened(epochs=2).train)
    train = opened(epochs=2).train
    for given, _ in enumerate(train, start=1):
        state = pickle.loads(pickle.dumps(train.state_dict()))
        assert state["rows"] == given
        again = opened(epochs=2).train
        again.load_state_dict(state)
        assert again.state_dict()["rows"] == given
        assert ids(again) == whole[given:]
        assert ids(again) == whole


@pytest.mark.usefixtures("small_calls")
def test_a_loader_that_ran_ahead_resumes_where_it_is_asked_to(opened):
    whole = ids(opened().train)
    train = opened().train
    iterator = iter(train)
    for _ in range(9):
        next(iterator)
    for rows in range(10):
        again = opened().train
        again.load_state_dict(train.state_dict(rows))
        assert ids(again) == whole[rows:]
    with pytest.raises(ValueError, match=r"rows must be in \[0, 9\], .* got 10"):
        train.state_dict(10)


@pytest.mark.usefixtures("small_calls")
def test_a_resumed_stream_can_be_resumed(opened):
    whole = ids(opened().train)
    state, found = opened().train.state_dict(), []
    for _ in range(4):
        train = opened().train
        train.load_state_dict(copy.deepcopy(state))
        iterator = iter(train)
        found += ids([next(iterator) for _ in range(5)])
        state = train.state_dict()
    assert found == whole[:20]


def test_running_dry_is_an_error_only_where_more_was_asked_for(opened):
    train = opened().train
    rows = len(list(train))
    train.require(rows)
    assert len(list(train)) == rows
    train.require(rows + 1)
    with pytest.raises(DataExhausted, match=rf"holds {rows * 16} tokens in one pass, {rows * 16 + 16} were asked for"):
        list(train)


def test_worker_processes_are_refused(opened, monkeypatch):
    monkeypatch.setattr(streams, "get_worker_info", lambda: object())
    with pytest.raises(ValueError, match="dataloader_num_workers must be 0"):
        next(iter(opened().train))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("rows", "found"), [(None, ["<a hel", "d out ", "text><", "and on", "e more", ">>>>>>"]), (1, ["<a hel"])]
)
def test_a_split_is_held_out(opened, files, spell, streaming, rows, found):
    """Files of a format have one split here, so both splits read the same one."""
    settings = {"files": str(files / "held.jsonl"), "streaming": streaming}
    data = opened(6, dataset=settings, validation="held", validation_rows=rows)
    assert [spell(row["input_ids"]) for row in data.validation] == found
    assert data.facts["source"].startswith("json")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"column": "body"}, "data.dataset.column must be a column of json .*has id, text, got 'body'"),
        ({"files": "nowhere.jsonl"}, "data.dataset cannot be opened, json nowhere.jsonl, split 'train'"),
        ({"column": "id"}, "data.dataset.column must hold text, got 0 in column 'id'"),
    ],
)
def test_what_a_set_lacks_is_named(opened, streaming, dataset, message):
    with pytest.raises(ValueError, match=message):
        next(iter(opened(dataset={"streaming": streaming, **dataset}).train))


def test_an_unknown_set_and_one_out_of_reach_are_named(files, bytes_tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"data.dataset cannot be opened, nobody/no-such-set, split 'train'"):
        open_data(
            DataConfig(dataset={"name": "nobody/no-such-set"}),
            tokenizer=bytes_tokenizer,
            sequence_length=8,
            seed=0,
            cache_dir=files,
        )
