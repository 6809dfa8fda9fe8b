"""A tiny random Llama and a byte tokenizer, in memory and as a saved folder."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stochastic_attention.models import LanguageModel

SENTENCE = "the old house stood by river and nobody knew who had built it or why its door was never shut"


@pytest.fixture(scope="session")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only)


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def language(model, tokenizer):
    return LanguageModel(model, tokenizer)


@pytest.fixture(scope="session")
def model_folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path):
    """Two documents of about 500 and 300 characters, told apart by case."""
    words = SENTENCE.split()
    first = " ".join(words[index * 7 % len(words)] for index in range(100))
    second = " ".join(words[index * 5 % len(words)] for index in range(60)).upper()
    path = tmp_path / "text.txt"
    path.write_text(f"{first}\n\x1e\n{second}\n", encoding="utf-8")
    return path
