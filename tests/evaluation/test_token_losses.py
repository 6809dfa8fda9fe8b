"""Losses by position and by distance: hand-made windows, and tiny models against their own logits."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stochastic_attention import cli
from stochastic_attention.evaluation import loss_comparison as comparison
from stochastic_attention.evaluation.loss_comparison import Named, Settings, measure, panels, render
from stochastic_attention.evaluation.token_losses import buckets, cut, token_losses
from stochastic_attention.lm import StochasticLlamaConfig, StochasticLlamaForCausalLM
from stochastic_attention.lm.token_file import Encoder
from stochastic_attention.lm.tokenizer import LearnedTokenizer, learn

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def alphabet():
    return learn(iter(["ab"]), LearnedTokenizer(vocab_size=259))


@pytest.fixture(scope="module")
def models(alphabet, tmp_path_factory):
    """Two plain models that differ by their seed, and one of stochastic layers."""
    folder = tmp_path_factory.mktemp("models")
    stochastic = {"layer_attention": "sa", "sa": {"window": 4}}
    for name, seed, kind, config in (
        ("full-0", 0, LlamaForCausalLM, LlamaConfig(vocab_size=259, **SIZES)),
        ("full-1", 1, LlamaForCausalLM, LlamaConfig(vocab_size=259, **SIZES)),
        ("sa", 0, StochasticLlamaForCausalLM, StochasticLlamaConfig(vocab_size=259, **SIZES, **stochastic)),
    ):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder / name)
        alphabet.save_pretrained(folder / name)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat and the cat sat again\n" * 3 + "\x1e\n" + "short\n\x1e\n" + "xyz " * 20)
    return str(path)


def test_windows_stay_in_one_document_and_follow_each_other(alphabet, text):
    windows = cut(Encoder(alphabet), text, 16, None)
    whole = [alphabet.decode(window) for window in windows]
    documents = Path(text).read_text(encoding="utf-8").split("\x1e\n")
    first = [part for part in whole if "x" not in part]
    assert "".join(first).removeprefix("<|begin|>") == documents[0][: 16 * len(first) - 1]
    assert len(first) == (len(documents[0]) + 2) // 16
    assert len(whole) - len(first) == (len(documents[2]) + 2) // 16
    assert cut(Encoder(alphabet), text, 16, 3) == [
        windows[0],
        windows[len(windows) // 3],
        windows[2 * len(windows) // 3],
    ]
    with pytest.raises(ValueError, match=r"length must leave a window of one document in .*, got 1000"):
        cut(Encoder(alphabet), text, 1000, None)
    with pytest.raises(ValueError, match="limit asks for 1000 windows of 16 tokens"):
        cut(Encoder(alphabet), text, 16, 1000)


def test_every_token_is_in_one_bucket_of_each_kind():
    windows = [[1, 2, 3, 1, 2, 3, 1, 2, 4], [5, 5, 5, 5, 6, 7, 8, 9, 5]]
    losses = torch.arange(16.0).view(2, 8) / 10
    found = {(bucket.kind, bucket.first): bucket for bucket in buckets(windows, losses)}
    assert {key: bucket.tokens for key, bucket in found.items()} == {
        ("all", 0): 16,
        ("position", 1): 2,
        ("position", 2): 4,
        ("position", 4): 8,
        ("position", 8): 2,
        ("repeat", 1): 1,
        ("repeat", 2): 3,
        ("changed", 0): 2,
        ("new", 0): 10,
    }
    assert found["repeat", 2].perplexity.value == pytest.approx(math.exp((0.4 + 0.5 + 0.6) / 3))
    assert found["repeat", 1].perplexity.value == pytest.approx(math.exp(1.0))
    assert found["changed", 0].perplexity.value == pytest.approx(math.exp((0.7 + 1.1) / 2))
    assert found["position", 2].perplexity.value == pytest.approx(math.exp((0.1 + 0.2 + 0.9 + 1.0) / 4))
    assert found["position", 8].last == 8
    assert found["all", 0].perplexity.n == 2
    assert found["repeat", 2].perplexity.n == 1


@pytest.mark.parametrize("batch_tokens", [1, 40, 1000])
def test_losses_are_those_of_the_model(model, batch_tokens):
    windows = torch.randint(256, (5, 20), generator=torch.Generator().manual_seed(0)).tolist()
    seen = []
    losses = token_losses(model, windows, batch_tokens=batch_tokens, on_batch=seen.append)
    assert sum(seen) == 5
    assert max(seen) == min(5, max(1, batch_tokens // 20))
    for window, row in zip(windows, losses, strict=True):
        with torch.no_grad():
            found = model(torch.tensor([window]), labels=torch.tensor([window])).loss
        assert float(row.mean()) == pytest.approx(float(found), rel=1e-5)
    with pytest.raises(ValueError, match="an embedding of every token of the windows, has 256, got token 5000"):
        token_losses(model, [[1, 2, 3], [4, 5000, 6]], batch_tokens=batch_tokens, on_batch=seen.append)


class TestComparison:
    def test_kinds_are_means_over_their_models(self, models, text, tmp_path):
        names = [Named.parse(f"full={models / name}") for name in ("full-0", "full-1")]
        names.append(Named.parse(str(models / "sa")))
        outcome = measure(Settings(text, length=32), names, tmp_path / "out")
        one, two, _ = (found[0].perplexity.value for _, found in outcome.models)
        table = render(outcome)
        mean, deviation = (one + two) / 2, abs(one - two) / math.sqrt(2)
        assert f" {mean:.2f} ± {deviation:.2f} |" in table
        assert "full (2)" in table.splitlines()[0]
        position, repeat = panels(outcome)
        assert [curve.label for curve in position.curves] == ["full", str(models / "sa")]
        assert [point.x for point in position.curves[0].points] == [
            math.sqrt(first * last) for first, last in [(1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
        ]
        assert position.curves[0].points[0].error > 0
        assert len(repeat.curves[0].points) > 1

    def test_draws_are_averaged_where_there_is_chance(self, models, text, tmp_path):
        def found(name, draws):
            named = Named.parse(str(models / name))
            outcome = measure(Settings(text, length=32, draws=draws), [named], tmp_path / f"{name}{draws}")
            return outcome.models[0][1][0].perplexity.value

        assert found("sa", 1) != found("sa", 2)
        assert found("full-0", 1) == found("full-0", 2)

    def test_no_figure_moves_with_the_batch(self, models, text, tmp_path):
        named = [Named.parse(str(models / "sa"))]
        one, many = (
            measure(Settings(text, length=32), named, tmp_path / str(size), batch_tokens=size) for size in (1, 500)
        )
        values = [[bucket.perplexity.value for bucket in outcome.models[0][1]] for outcome in (one, many)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)

    def test_it_resumes_and_takes_more_models(self, models, text, tmp_path, monkeypatch):
        full, other = (Named.parse(str(models / name)) for name in ("full-0", "full-1"))
        before = measure(Settings(text, length=32), [full], tmp_path)
        real, loaded = comparison.load_model, []
        monkeypatch.setattr(comparison, "load_model", lambda name, **o: loaded.append(name) or real(name, **o))
        after = measure(Settings(text, length=32), [other, full], tmp_path)
        assert loaded == [other.model]
        assert after.models[1][1] == before.models[0][1]
        with pytest.raises(ValueError, match="length was 32, now 31"):
            measure(Settings(text, length=31), [full], tmp_path)

    def test_other_tokens_are_refused_before_they_are_scored(self, models, text, tmp_path, monkeypatch):
        other = tmp_path / "other"
        AutoTokenizer.from_pretrained(models / "full-0")
        LlamaForCausalLM(LlamaConfig(vocab_size=300, **SIZES)).save_pretrained(other)
        learn(iter(["the cat sat " * 9]), LearnedTokenizer(vocab_size=300)).save_pretrained(other)
        first = Named.parse(str(models / "full-0"))
        measure(Settings(text, length=32), [first], tmp_path / "out")
        monkeypatch.setattr(comparison, "token_losses", None)
        with pytest.raises(ValueError, match=r"models must share a tokenizer, got other tokens from .*other than from"):
            measure(Settings(text, length=32), [first, Named.parse(str(other))], tmp_path / "out")

    def test_windows_longer_than_the_model_are_refused(self, models, text, tmp_path):
        with pytest.raises(ValueError, match=r"length must fit the 64 positions of .*full-0, got 66"):
            measure(Settings(text, length=66), [Named.parse(str(models / "full-0"))], tmp_path)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"text": "nowhere"}, "text must be a file, got 'nowhere'"),
            ({"text": "embedded", "length": 2}, "length must be an integer >= 3, got 2"),
            ({"text": "embedded", "draws": 0}, "draws must be"),
            ({"text": "embedded", "windows": 0}, "windows must be"),
            ({"text": "embedded", "dtype": "int8"}, "dtype must be one of"),
        ],
    )
    def test_bad_settings_are_named(self, settings, message):
        with pytest.raises(ValueError, match=message):
            Settings(**settings)

    @pytest.mark.parametrize("name", ["=x", "x=", "=", "./nowhere", "full=./nowhere"])
    def test_bad_models_are_named(self, name):
        with pytest.raises(ValueError, match=r"models? must be"):
            Named.parse(name)

    def test_the_same_model_twice_is_refused(self, models, text, tmp_path):
        named = Named.parse(str(models / "sa"))
        with pytest.raises(ValueError, match="models must be distinct and at least one, got"):
            measure(Settings(text, length=32), [named, named], tmp_path)


def test_the_command_writes_record_table_and_plot(models, text, tmp_path, capsys):
    output = tmp_path / "out"
    names = [f"full={models / 'full-0'}", f"full={models / 'full-1'}", f"sa={models / 'sa'}"]
    assert cli.main(["perplexity", *names, "--text", text, "--length", "32", "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith((output / "table.md").read_text(encoding="utf-8"))
    record = json.loads((output / "record.json").read_text(encoding="utf-8"))
    assert [model["kind"] for model in record["results"]["models"]] == ["full", "full", "sa"]
    assert (output / "plot.png").stat().st_size > 1000
