"""Text to rows: small examples written out by hand, and what must hold for any text."""

import errno
import gzip
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stochastic_attention.lm import token_file as token_files
from stochastic_attention.lm.data import DataConfig, DataExhausted, open_data
from stochastic_attention.lm.rows import IGNORED
from stochastic_attention.lm.text import documents, pieces, text_path
from stochastic_attention.lm.token_file import Encoder, token_file

SENTENCE = "the old house stood by the river and nobody knew who had built it"


@pytest.fixture
def opened(tmp_path, bytes_tokenizer):
    def opened(text, length=8, *, seed=0, cache="cache", **settings):
        config = DataConfig(text=text, **settings)
        return open_data(
            config, tokenizer=bytes_tokenizer, sequence_length=length, seed=seed, cache_dir=tmp_path / cache
        )

    return opened


def in_order(rows):
    """The rows of one pass, in the order of the text."""
    order = {rows._place(0, index): rows[index] for index in range(rows.rows)}
    return [order[place] for place in sorted(order)]


def labels(row):
    return [int(label) for label in row["labels"]]


X = IGNORED


@pytest.mark.parametrize(
    ("documents", "tokens", "positions", "predicted"),
    [
        # "ab\n", "cde\n", "f": eos after each, a document cut where the row ends, filled up with > at the end
        (
            ("ab", "cde", "f"),
            ["<ab\n><cd", "e\n><f>>>"],
            [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 1, 2, 0, 1]],
            [".ab\n>.cd", ".\n>.f>.."],
        ),
        # a row that ends exactly where a document does
        (
            ("abcde", "gh"),
            ["<abcde\n>", "<gh>>>>>"],
            [[*range(8)], [0, 1, 2, 3, 0, 1, 2, 3]],
            [".abcde\n>", ".gh>...."],
        ),
        # a document over three rows
        (
            ("abcdefghijklmnopq",),
            ["<abcdefg", "hijklmno", "pq>>>>>>"],
            [[*range(8)], [*range(8)], [0, 1, 2, 0, 1, 2, 3, 4]],
            [".abcdefg", ".ijklmno", ".q>....."],
        ),
        # less text than a row; and text that fills it to the last token
        (("a",), ["<a>>>>>>"], [[0, 1, 2, 0, 1, 2, 3, 4]], [".a>....."]),
        (("abcdef",), ["<abcdef>"], [[*range(8)]], [".abcdef>"]),
        # documents of white space are none
        (("", "ab", " \n", ""), ["<ab\n>>>>"], [[0, 1, 2, 3, 4, 0, 1, 2]], [".ab\n>..."]),
    ],
    ids=["short", "exact", "long", "tiny", "full", "blank"],
)
def test_rows_written_out(opened, write, spell, documents, tokens, positions, predicted):
    rows = in_order(opened(write(*documents)).train)
    assert [spell(row["input_ids"]) for row in rows] == tokens
    assert [row["position_ids"].tolist() for row in rows] == positions
    for row, text in zip(rows, predicted, strict=True):
        shown = [
            spell([token]) if label != X else "." for token, label in zip(row["input_ids"], labels(row), strict=True)
        ]
        assert "".join(shown) == text
        assert all(label in (X, token) for token, label in zip(row["input_ids"].tolist(), labels(row), strict=True))
        assert {tensor.dtype for tensor in row.values()} == {torch.int64}


def test_joined_documents_share_positions_and_predict_across(opened, write, spell):
    rows = in_order(opened(write("ab", "cde", "f"), documents="joined").train)
    assert [row["position_ids"].tolist() for row in rows] == [[*range(8)]] * 2
    assert spell(rows[0]["input_ids"]) == "<ab\n><cd"
    assert labels(rows[0]) == [X, *rows[0]["input_ids"].tolist()[1:]]
    assert labels(rows[1]) == [X, *rows[1]["input_ids"].tolist()[1:6], X, X]


def random_documents(draw, count):
    words = [*SENTENCE.split(), "naïve", "漢字", "\u2028", "🙂", "<|end|>", "\t", "a\rb"]
    return ["so " + " ".join(draw.choices(words, k=draw.choice([1, 2, 5, 40]))) for _ in range(count)]


@pytest.mark.parametrize("length", [2, 3, 16, 61, 1000])
def test_a_pass_holds_every_token_once_and_in_order_inside_documents(opened, write, bytes_tokenizer, length):
    documents = random_documents(random.Random(length), 12)
    train = opened(write(*documents), length).train
    expected = [
        token
        for index, document in enumerate(documents)
        for token in [
            bytes_tokenizer.bos_token_id,
            # one token a byte; "<|end|>" in a text is text
            *bytes_tokenizer(document + "\n" * (index < 11), add_special_tokens=False, split_special_tokens=True)[
                "input_ids"
            ],
            bytes_tokenizer.eos_token_id,
        ]
    ]
    found = torch.cat([row["input_ids"] for row in in_order(train)]).tolist()
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {bytes_tokenizer.eos_token_id}
    assert len(found) - len(expected) < length
    assert train.tokens == len(expected)
    decoded = bytes_tokenizer.decode(expected, skip_special_tokens=True)
    assert decoded == "\n".join(documents)


class TestOrder:
    def test_it_is_the_seed_s_and_another_one_every_pass(self, opened, write):
        text = write(*random_documents(random.Random(0), 30))
        one, same, other = (opened(text, 16, seed=seed, epochs=3).train for seed in (5, 5, 6))
        orders = [[one._place(epoch, index) for index in range(one.rows)] for epoch in range(3)]
        assert [sorted(order) for order in orders] == [list(range(one.rows))] * 3
        assert len({tuple(order) for order in orders}) == 3
        assert [other._place(0, index) for index in range(one.rows)] != orders[0]
        assert one.rows > 20
        for index in reversed(range(len(one))):  # asked in any order, and through a pickle
            assert torch.equal(pickle.loads(pickle.dumps(same))[index]["input_ids"], one[index]["input_ids"])
        with pytest.raises(IndexError):
            one[len(one)]

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_ranks_together_see_the_global_batches(self, opened, write, world):
        train = opened(write(*random_documents(random.Random(1), 30)), 16).train
        sampler = torch.utils.data.BatchSampler(range(16), 8 // world, drop_last=True)
        ranks = [list(batches) for batches in zip(*[iter(sampler)] * world, strict=True)]
        found = [torch.cat([train[i]["input_ids"] for batch in step for i in batch]) for step in ranks]
        expected = [torch.cat([train[i]["input_ids"] for i in range(start, start + 8)]) for start in (0, 8)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    def test_more_rows_than_there_are_is_an_error_with_both_numbers(self, opened, write):
        train = opened(write("abcdefghijk"), epochs=2).train  # 13 tokens, 2 rows
        train.require(4)
        with pytest.raises(DataExhausted, match="holds 26 tokens in 2 passes, 40 were asked for"):
            train.require(5)


class TestValidation:
    def test_a_share_is_the_end_of_the_text_and_nothing_is_lost(self, opened, write, spell):
        data = opened(write("abcdefghijklmnopqrstuvw", "xyz"), 5, validation=0.4)
        whole = "<abcdefghijklmnopqrstuvw\n><xyz>"
        train, held = (
            "".join(spell(row["input_ids"]) for row in in_order(part)) for part in (data.train, data.validation)
        )
        assert train[: data.train.tokens] + held[: data.validation.tokens] == whole
        assert data.validation.tokens == 13  # of 31
        facts = {"source": "text.txt", "sha256": data.train.digest}
        assert data.facts == {**facts, "tokens": 18, "validation": {**facts, "tokens": 13}}

    def test_a_file_stays_in_order_and_may_be_thinned(self, opened, write, spell):
        held = write("abcdefghijklmnop", name="held.txt")
        data = opened(write("zzz"), 4, validation=held)
        assert [spell(row["input_ids"]) for row in data.validation] == ["<abc", "defg", "hijk", "lmno", "p>>>"]
        few = opened(write("zzz"), 4, validation=held, validation_rows=2).validation
        assert [spell(row["input_ids"]) for row in few] == ["<abc", "hijk"]
        assert len(opened(write("zzz"), 4, validation=held, validation_rows=20).validation) == 5

    def test_too_small_a_share_is_refused(self, opened, write):
        with pytest.raises(ValueError, match=r"data.validation must leave a row of 8 .*got 0.1 of 8 tokens"):
            opened(write("abcdef"), validation=0.1)


class TestTokenFile:
    def test_it_is_made_once_for_a_text_and_a_tokenizer(self, opened, write, tmp_path, monkeypatch):
        text = write("abc")
        opened(text)
        (made,) = (tmp_path / "cache").glob("tokens-*")
        with monkeypatch.context() as patch:
            patch.setattr(token_files, "_write", None)
            opened(text)
        write("abd")
        opened(text)
        assert len(list((tmp_path / "cache").glob("tokens-*"))) == 2
        assert made.is_dir()

    def test_what_a_kill_leaves_behind_is_cleared_away(self, opened, write, tmp_path, spell):
        text = write("abc")
        opened(text)
        (made,) = (tmp_path / "cache").glob("tokens-*")
        torn = made.rename(made.with_name(f".{made.name}"))
        (torn / "meta.json").unlink()
        (torn / "tokens.bin").write_bytes(b"half")
        assert spell(opened(text).train[0]["input_ids"]) == "<abc>>>>"
        assert not torn.exists()

    @pytest.mark.parametrize("name", ["tokens.bin", "ends.npy", "meta.json"])
    @pytest.mark.parametrize("kept", [None, 0, 9])
    def test_what_has_lost_a_part_is_refused(self, opened, write, tmp_path, name, kept):
        text = write("abcabc")
        opened(text)
        (made,) = (tmp_path / "cache").glob("tokens-*")
        content = (made / name).read_bytes()
        (made / name).unlink()
        if kept is not None:
            (made / name).write_bytes(content[:kept])
        with pytest.raises(ValueError, match=f"tokens in {made} are not whole: remove the folder"):
            opened(text)

    def test_a_full_disk_says_what_is_needed_and_leaves_nothing(self, write, tmp_path, bytes_tokenizer, monkeypatch):
        def full():
            raise OSError(errno.ENOSPC, "No space left on device")

        def append(file, raw, source, needed):
            real(
                SimpleNamespace(name=file.name, write=file.write, flush=full if file.tell() else file.flush),
                raw,
                source,
                needed,
            )

        real = token_files._append
        monkeypatch.setattr(token_files, "_append", append)
        path = text_path(write("a" * 9, "b" * 9, "c" * 9))
        with pytest.raises(
            OSError, match=r"no room for the tokens of T: about \d+ bytes more are needed, \d+ are free"
        ) as told:
            token_file(
                pieces(path), Encoder(bytes_tokenizer), key="k", source="T", size=33, cache_dir=tmp_path / "cache"
            )
        assert told.value.errno == errno.ENOSPC
        # 10 of 33 bytes are written, and the next 10 became 12 tokens of two bytes
        assert f"about {24 * 23 // 10} bytes" in str(told.value)
        assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []

    @pytest.mark.parametrize(("size", "dtype"), [(259, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
    def test_tokens_take_the_bytes_they_need(self, bytes_tokenizer, monkeypatch, size, dtype):
        """By the largest of them: there may be gaps."""
        vocabulary = bytes_tokenizer.get_vocab() | {"last": size - 1}
        monkeypatch.setattr(type(bytes_tokenizer), "get_vocab", lambda _: vocabulary)
        assert np.dtype(Encoder(bytes_tokenizer).dtype) == dtype

    def test_a_call_with_padding_leaves_the_key_as_it_was(self, bytes_tokenizer):
        before = Encoder(bytes_tokenizer).digest
        bytes_tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
        assert Encoder(bytes_tokenizer).digest == before

    def test_a_tokenizer_without_an_end_is_refused(self, bytes_tokenizer, monkeypatch):
        monkeypatch.setattr(type(bytes_tokenizer), "eos_token_id", None, raising=False)
        with pytest.raises(ValueError, match="tokenizer must have an end-of-sequence token"):
            Encoder(bytes_tokenizer)


class TestText:
    def test_long_documents_come_in_pieces_cut_at_line_ends(self, write):
        path = text_path(write("aa\nbb\ncc\n", "d", "ee\nff\ngg"))
        whole = list(pieces(path))
        assert whole == [("aa\nbb\ncc\n\n", True), ("d\n", True), ("ee\nff\ngg", True)]
        assert list(pieces(path, 4)) == [
            ("aa\nbb\n", False),
            ("cc\n\n", True),
            ("d\n", True),
            ("ee\nff\n", False),
            ("gg", True),
        ]

    def test_pieces_of_a_document_are_one_document(self, tmp_path, write, bytes_tokenizer, spell):
        path = text_path(write("aa\nbb\ncc\n", "d"))
        file = token_file(
            pieces(path, 3), Encoder(bytes_tokenizer), key="k", source="s", size=None, cache_dir=tmp_path / "c"
        )
        assert spell(file.tokens) == "<aa\nbb\ncc\n\n><d>"
        assert file.ends.tolist() == [12, 15]

    def test_line_ends_of_windows_and_gzip_read_alike(self, tmp_path, opened):
        (tmp_path / "dos.txt").write_bytes(b"ab\r\n\x1e\r\ncd\r\n")
        with gzip.open(tmp_path / "unix.txt.gz", "wb") as file:
            file.write(b"ab\n\x1e\ncd\n")
        dos, unix = (opened(str(tmp_path / name)).train for name in ("dos.txt", "unix.txt.gz"))
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(dos, unix, strict=True))

    def test_a_mark_at_the_beginning_is_no_text(self, tmp_path):
        (tmp_path / "marked").write_text("ab\ufeff", encoding="utf-8-sig")
        assert list(documents(tmp_path / "marked")) == ["ab\ufeff"]

    @pytest.mark.parametrize(
        "content", [gzip.compress(b"abc" * 99, mtime=0)[:-9], gzip.compress(b"abc", mtime=0)[:-1] + b"a", b"abc"]
    )
    def test_a_damaged_gzip_file_is_refused(self, tmp_path, opened, content):
        (tmp_path / "text.gz").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"text must be a whole gzip file where its name ends in .gz, got .*text.gz"
        ):
            opened(str(tmp_path / "text.gz"))

    def test_broken_utf8_names_the_line(self, tmp_path, opened):
        (tmp_path / "bad.txt").write_bytes(b"fine\nfine too\nna\xefve\n")
        with pytest.raises(ValueError, match=r"text must be UTF-8, got byte 0xef in line 3 of .*bad.txt"):
            opened(str(tmp_path / "bad.txt"))
        assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]

    @pytest.mark.parametrize("documents", [("",), (" \n", "\n")])
    def test_no_text_is_an_error(self, opened, write, documents):
        with pytest.raises(ValueError, match=r"data.text must hold text, got none in text.txt"):
            opened(write(*documents))

    def test_the_embedded_text_is_two_novels(self):
        first, second = documents(text_path("embedded"))
        assert "MR. SHERLOCK HOLMES" in first
        assert "The Time Traveller (for so it will be convenient to speak of him)" in second
        assert 400_000 < len(first) + len(second) < 450_000

    def test_several_files_are_read_in_turn(self, opened, write, spell):
        rows = in_order(opened([write("ab", name="b"), write("c", name="a")]).train)
        assert spell(rows[0]["input_ids"]) == "<ab><c>>"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either text or dataset, got neither"),
        ({"text": "embedded", "dataset": {"name": "x"}}, "either text or dataset, got both"),
        ({"text": "nowhere.txt"}, r"data.text must be a file, got 'nowhere.txt'"),
        ({"text": 3}, "data.text must be a path"),
        ({"text": "embedded", "documents": "mixed"}, "data.documents must be one of 'isolated', 'joined', got 'mixed'"),
        ({"text": "embedded", "epochs": 0}, "data.epochs must be an integer >= 1, got 0"),
        ({"text": "embedded", "epochs": 1.5}, "data.epochs must be"),
        ({"text": "embedded", "validation": 1.0}, r"data.validation must be a path or a share in \(0, 1\), got 1.0"),
        ({"text": "embedded", "validation": True}, "data.validation must be"),
        ({"text": "embedded", "validation": "nowhere"}, "data.validation must be a file, got 'nowhere'"),
        ({"text": "embedded", "validation_rows": 0}, "data.validation_rows must be"),
        ({"dataset": {"name": "x"}, "validation": 0.1}, "data.validation must be the name of a split, got 0.1"),
        ({"dataset": {"subset": "x"}}, "data.dataset must have a name .*got no name"),
        ({"dataset": {"name": "x", "colum": "t"}}, "data.dataset .*may have subset, split, column, .*got colum"),
        ({"dataset": {"name": 3}}, "data.dataset.name must be text, got 3"),
        ({"dataset": {"name": "json", "files": 3}}, "data.dataset.files must be a path or a list of paths, got 3"),
        ({"dataset": {"name": "x", "streaming": "yes"}}, "data.dataset.streaming must be True or False, got 'yes'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


@pytest.mark.parametrize(("name", "value"), [("sequence_length", 1), ("sequence_length", 2.0), ("seed", -1)])
def test_bad_arguments_are_named(bytes_tokenizer, tmp_path, name, value):
    arguments = {"sequence_length": 8, "seed": 0} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        open_data(DataConfig(text="embedded"), tokenizer=bytes_tokenizer, cache_dir=tmp_path, **arguments)
