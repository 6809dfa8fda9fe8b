"""A tokenizer of one token a byte, with tokens that begin and end texts."""

import pytest

from stochastic_attention.lm.tokenizer import LearnedTokenizer, learn


@pytest.fixture(scope="session")
def bytes_tokenizer():
    return learn(iter(["ab"]), LearnedTokenizer(vocab_size=259))


@pytest.fixture(scope="session")
def spell(bytes_tokenizer):
    """Token by token, in words: a letter each, < begins a document, > ends it."""

    def spell(ids):
        marks = {bytes_tokenizer.bos_token_id: "<", bytes_tokenizer.eos_token_id: ">"}
        return "".join(marks.get(int(token)) or bytes_tokenizer.decode([int(token)]) for token in ids)

    return spell


@pytest.fixture
def write(tmp_path):
    def write(*documents, name="text.txt"):
        path = tmp_path / name
        path.write_text("\n\x1e\n".join(documents), encoding="utf-8")
        return str(path)

    return write
