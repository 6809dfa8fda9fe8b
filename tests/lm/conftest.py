"""A tokenizer of one token a byte, with tokens that begin and end texts."""

import random
from functools import partial

import pytest
import yaml

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


@pytest.fixture(scope="session")
def config_in():
    """config_in(folder, training={...}, model={...}, ...): a YAML file of a run of 6 steps on 2 layers, changed so."""

    def make(folder, **sections):
        generator = random.Random(0)
        text = folder / "corpus.txt"
        text.write_text("\n\x1e\n".join("".join(generator.choices("abcd \n", k=90)) for _ in range(40)), "utf-8")
        config = {
            "model": {
                "model_type": "stochastic_llama",
                "layer_attention": "gated",
                "swa": {"window": 4},
                "sa": {"window": 4},
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "tokenizer": {"train": {"vocab_size": 259}},
            "data": {"text": str(text), "validation": 0.1, "epochs": 3},
            "training": {
                "sequence_length": 24,
                "steps": 6,
                "global_batch_sequences": 4,
                "learning_rate": 0.01,
                "warmup_steps": 2,
                "save_every": 2,
                "eval_every": 2,
                "device": "cpu",
                "peak_flops": 1e9,
            },
        }
        for section, changes in sections.items():
            config[section] = {k: v for k, v in (config[section] | changes).items() if v != "absent"}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config), "utf-8")
        return path

    return make


@pytest.fixture
def config_file(tmp_path, config_in):
    """The same, in the test's own folder."""
    return partial(config_in, tmp_path)
