import pytest
from transformers import AutoTokenizer

from stochastic_attention.lm import tokenizer as tokenizers_module
from stochastic_attention.lm.data import DataConfig
from stochastic_attention.lm.text import pieces, text_path
from stochastic_attention.lm.tokenizer import LearnedTokenizer, TokenizerConfig, learn, make_tokenizer

SENTENCES = ["the old house stood by the river and nobody knew who had built it. " * 3, "naïve 漢字 🙂 " * 5]


@pytest.fixture
def learned(tmp_path):
    def learned(**how):
        config = TokenizerConfig(train={"vocab_size": 300, **how})
        return make_tokenizer(config, DataConfig(text=str(tmp_path / "text.txt")), cache_dir=tmp_path / "cache")

    (tmp_path / "text.txt").write_text("\n\x1e\n".join(SENTENCES), encoding="utf-8")
    return learned


@pytest.mark.parametrize(
    "text",
    [
        *SENTENCES,
        "",
        " ",
        "  a\n\n\tb  ",
        "\x00\x1f\x7f",
        "e\u0301 \u2028 \ufeff",
        "<|end|> <|begin|>",
        "A.B ,c 's\r\n",
    ],
)
def test_any_text_comes_back(learned, text):
    tokenizer = learned()
    tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} & set(tokens)


def test_special_tokens_are_three_and_a_text_begins_with_one(learned):
    tokenizer = learned()
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert len(tokenizer) == 300
    assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer("the")["input_ids"], skip_special_tokens=True) == "the"
    assert len(tokenizer("the house", add_special_tokens=False)["input_ids"]) < len("the house")


def test_it_is_kept_and_survives_saving(learned, tmp_path, monkeypatch):
    first = learned()
    monkeypatch.setattr(tokenizers_module, "learn", None)
    second = learned()
    first.save_pretrained(tmp_path / "saved")
    third = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for other in (second, third):
        assert other.get_vocab() == first.get_vocab()
        assert other(SENTENCES[0])["input_ids"] == first(SENTENCES[0])["input_ids"]
        assert other.eos_token == first.eos_token


def test_the_same_text_gives_the_same_tokenizer():
    def text():
        return (piece[:50_000] for piece, _ in pieces(text_path("embedded")))

    one, two = (learn(text(), LearnedTokenizer(vocab_size=2000)) for _ in range(2))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()


def test_only_the_beginning_is_read_where_so_asked():
    read = learn(iter(["ab " * 9, "xy " * 9]), LearnedTokenizer(vocab_size=270, characters=1)).get_vocab()
    assert "ab" in "".join(read)
    assert "xy" not in read


def test_no_text_is_an_error():
    with pytest.raises(ValueError, match="data must hold text for a tokenizer to learn from"):
        learn(iter([]), LearnedTokenizer())


def test_a_folder_is_loaded(learned, tmp_path):
    learned().save_pretrained(tmp_path / "saved")
    data = DataConfig(text="embedded")
    found = make_tokenizer(TokenizerConfig(name=str(tmp_path / "saved")), data, cache_dir=tmp_path)
    assert found("the")["input_ids"] == learned()("the")["input_ids"]
    with pytest.raises(ValueError, match=r"tokenizer.name must be .* got .*cache"):
        make_tokenizer(TokenizerConfig(name=str(tmp_path / "cache")), data, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either name or train, got neither"),
        ({"name": "x", "train": {}}, "either name or train, got both"),
        ({"name": 3}, "tokenizer.name must be a hub name or a folder, got 3"),
        ({"train": 3}, "tokenizer.train must be a mapping, got 3"),
        ({"train": {"vocab_size": 258}}, "tokenizer.train.vocab_size must be an integer >= 259, got 258"),
        ({"train": {"vocab": 300}}, "tokenizer.train may have vocab_size, .*got vocab"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenizerConfig(**settings)
