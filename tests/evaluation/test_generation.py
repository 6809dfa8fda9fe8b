import io
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

from stochastic_attention import Pattern, cli
from stochastic_attention.commands.generate import agreement
from stochastic_attention.evaluation import generation
from stochastic_attention.evaluation.budget import expected_keys
from stochastic_attention.evaluation.generation import (
    Attention,
    Sampling,
    agreeing_tokens,
    continue_prompt,
    encode_prompt,
    render,
)
from stochastic_attention.evaluation.methods import METHODS
from stochastic_attention.hf import Preset, restore, save_preset, swap
from stochastic_attention.lm import StochasticLlamaConfig, StochasticLlamaForCausalLM
from stochastic_attention.models import LanguageModel, load_model

from .conftest import SENTENCE

SWAPPED = [name for name in METHODS if name != "full"]
SHORT = Sampling(max_new_tokens=9)
# Every way in which layers and new tokens may differ.
ATTENTIONS = [
    Attention(),
    Attention("swa+sinks", 12),
    Attention("sa", 12),
    Attention("sa", 12, decode="full"),
    Attention("union", 12, routing_seed=3),
    Attention("union", 12, layers=(1,)),
    Attention("union-prefix", 12, layers="every 2nd", decode="full"),
    Attention("moba", 20),
]
attentions = pytest.mark.parametrize("attention", ATTENTIONS, ids=str)


@pytest.fixture(scope="module")
def prompt(language):
    return encode_prompt(language, SENTENCE[:70])


@pytest.fixture(scope="module")
def windowed(tokenizer):
    """A model whose first layer has a sliding window of its own."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LanguageModel(MistralForCausalLM(config).eval(), tokenizer)


def run(language, prompt, attention=ATTENTIONS[0], sampling=SHORT, write=lambda _: None):
    return continue_prompt(language, prompt, attention, sampling, write)


@attentions
def test_the_text_is_what_the_swapped_model_generates(language, prompt, attention):
    written = []
    found = run(language, prompt, attention, write=written.append)
    pattern = attention.fit(len(prompt), SHORT.max_new_tokens)
    model, ids = language.model, torch.tensor([prompt])
    if pattern is not None:
        swap(model, pattern, attention.layers, decode=attention.decode)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    if pattern is not None:
        restore(model)
    assert found.tokens == expected[0, len(prompt) :].tolist()
    assert found.text == "".join(written) == language.tokenizer.decode(found.tokens)
    assert (found.prompt_tokens, found.new_tokens, found.interrupted) == (70, 9, False)


def test_attention_changes_the_text(language, prompt):
    texts = {run(language, prompt, attention).text for attention in ATTENTIONS}
    assert len(texts) > len(ATTENTIONS) / 2


@attentions
def test_keys_are_those_of_the_masks(language, prompt, attention):
    found = run(language, prompt, attention)
    pattern = attention.fit(len(prompt), SHORT.max_new_tokens)
    swapped = {"all": (0, 1), "every 2nd": (1,)}.get(attention.layers, attention.layers)
    of_prompt, of_new = [], []
    for layer in (0, 1):
        mine = pattern if pattern and layer in swapped else Pattern.full()
        of_prompt.append(rows(mine, 70, layer))
        of_new.append(rows(Pattern.full() if attention.decode == "full" else mine, 79, layer, newest=True)[70:])
    assert found.keys_of_prompt == pytest.approx(float(torch.cat(of_prompt).mean()))
    assert found.keys_of_new == pytest.approx(float(torch.cat(of_new).mean()))


def rows(pattern, n, layer, newest=False):
    """Keys of each query, from the masks; `newest`: of each as the last of its document."""
    if pattern.kind == "moba":
        return expected_keys(pattern, torch.arange(n), torch.full((n,), n))
    if newest:
        return torch.stack([rows(pattern, i + 1, layer)[-1] for i in range(n)])
    return pattern.dense_mask(n, layer=layer)[0].sum(-1).double()


@pytest.mark.parametrize("attention", [Attention(), Attention("sa", 5, layers=(1,))], ids=str)
def test_the_models_own_windows_are_counted(windowed, prompt, attention):
    found = run(windowed, prompt, attention)
    other = 16 if attention.budget is None else float(rows(attention.fit(70, 9), 79, 1, newest=True)[70:].mean())
    assert found.keys_of_new == pytest.approx((16 + other) / 2)
    assert found.pattern.startswith("local(window=16)")


@pytest.mark.parametrize("decode", ["stochastic", "full"])
def test_the_layers_of_a_trained_model_are_counted(tokenizer, prompt, decode):
    """Both paths of its gated layer, and what its config says of decoding."""
    sa, window = Pattern.stochastic(4), Pattern.local(3)
    config = StochasticLlamaConfig(
        layer_attention=["gated", "swa"], sa={"window": 4}, swa={"window": 3}, decode=decode, vocab_size=256,
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    found = run(LanguageModel(StochasticLlamaForCausalLM(config).eval(), tokenizer), prompt, Attention())
    new = Pattern.full() if decode == "full" else sa
    local = rows(window, 79, 0)
    of_prompt = (rows(sa, 70, 0) + 2 * local[:70]).mean() / 2
    of_new = (rows(new, 79, 0, newest=True)[70:] + 2 * local[70:]).mean() / 2
    assert found.keys_of_prompt == pytest.approx(float(of_prompt))
    assert found.keys_of_new == pytest.approx(float(of_new))
    assert found.pattern == "stochastic(window=4) gated with local(window=3), local(window=3)"


@pytest.mark.parametrize("decode", ["stochastic", "full"])
@pytest.mark.parametrize("method", SWAPPED)
def test_no_other_scale_meets_the_budget_better(method, decode):
    """Measured over twelve layers, for those whom the budget is of. Scales step by two keys or more, chance by less."""
    prompt, end = 120, 140
    chosen = Attention(method, 30, decode=decode).fit(prompt, end - prompt)
    candidates = list(METHODS[method].candidates(prompt if decode == "full" else end))
    at = candidates.index(chosen)
    n, first = (prompt, None) if decode == "full" else (end, prompt)
    off = [abs(generation._mean_keys([(p,)] * 12, n, first) - 30) for p in candidates[max(at - 2, 0) : at + 3]]
    assert off[min(at, 2)] <= min(off) + 1
    assert off[min(at, 2)] < 6


def test_a_budget_above_every_key_is_full_attention(language, prompt):
    whole = run(language, prompt)
    found = run(language, prompt, Attention("union", 1000))
    assert found.tokens == whole.tokens
    assert found.keys_of_new == whole.keys_of_new == 70 + 10 / 2


@pytest.mark.parametrize("attention", [Attention(), Attention("union", 12)], ids=str)
def test_the_model_is_left_as_it_was_found(language, prompt, attention):
    model, ids = language.model, torch.tensor([prompt])
    config, before = model.generation_config, model(ids).logits
    state = torch.get_rng_state()
    run(language, prompt, attention, Sampling(max_new_tokens=3, temperature=1.0))
    assert model.generation_config is config
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_settings_of_the_checkpoint_are_not_used(language, prompt, monkeypatch):
    plain = run(language, prompt)
    own = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=9.0, min_new_tokens=20, top_k=3)
    monkeypatch.setattr(language.model, "generation_config", own)
    assert run(language, prompt).tokens == plain.tokens


def test_the_end_of_text_stops_it_unless_told_otherwise(language, prompt, monkeypatch):
    plain = run(language, prompt).tokens
    end = plain[4]
    monkeypatch.setattr(language.model, "generation_config", GenerationConfig(eos_token_id=[end, 255]))
    assert run(language, prompt).tokens == plain[: plain.index(end) + 1]
    assert run(language, prompt, sampling=replace(SHORT, eos=False)).tokens == plain


def test_draws_repeat_under_their_seed(language, prompt):
    drawn = [run(language, prompt, sampling=replace(SHORT, temperature=2.0, seed=seed)).tokens for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]


def test_draws_among_the_likeliest_alone_are_greedy(language, prompt):
    drawn = run(language, prompt, sampling=replace(SHORT, temperature=0.7, top_p=1e-6))
    assert drawn.tokens == run(language, prompt).tokens


def test_draws_are_among_all_tokens(language, prompt):
    """Nothing is cut off but by `top_p`: ten hot draws reach beyond the 50 likeliest of 256 tokens."""
    hot = [Sampling(max_new_tokens=1, temperature=1e6, seed=seed) for seed in range(10)]
    drawn = [run(language, prompt, sampling=sampling).tokens[0] for sampling in hot]
    likeliest = language.model(torch.tensor([prompt])).logits[0, -1].topk(50).indices
    assert not set(drawn) <= set(likeliest.tolist())


def test_times_are_those_of_the_tokens(language, prompt, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: next(ticks) ** 2))
    found = run(language, prompt)  # starts at 0; tokens come at 1, 4, 9, ..., 81
    assert found.prefill_seconds == 1
    assert found.tokens_per_second == 8 / (81 - 1)


def test_a_lone_token_has_no_rate(language, prompt):
    found = run(language, prompt, sampling=Sampling(max_new_tokens=1))
    assert found.prefill_seconds > 0
    assert found.tokens_per_second is None
    assert found.keys_of_new == 71


def interrupter(after):
    """A writer that is interrupted once, when it has been called so often."""
    calls = itertools.count(1)

    def write(_):
        if next(calls) == after:
            raise KeyboardInterrupt

    return write


@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupt_keeps_what_has_come(language, prompt, after):
    attention = Attention("union", 12)
    whole = run(language, prompt, attention)
    found = run(language, prompt, attention, write=interrupter(after))
    assert found.interrupted
    assert 0 < found.new_tokens < whole.new_tokens
    assert found.tokens == whole.tokens[: found.new_tokens]
    assert found.text == language.tokenizer.decode(found.tokens)
    with pytest.raises(ValueError, match="model must have been swapped"):
        restore(language.model)


def test_an_interrupt_before_the_first_token(language, prompt, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(language.model, "generate", interrupted)
    found = run(language, prompt)
    assert (found.interrupted, found.new_tokens, found.text) == (True, 0, "")
    assert found.prefill_seconds is found.tokens_per_second is found.keys_of_new is None
    assert render([found]).splitlines()[1].split() == ["full", "70", "0", "-", "-", "35.5", "-", "full()"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "nonsense"}, "method must be one of 'full', 'swa'"),
        ({"method": "sa"}, "budget must be an integer >= 1, got None"),
        ({"method": "sa", "budget": 0}, "budget must be an integer >= 1, got 0"),
        ({"method": "full", "budget": 5}, "budget must not be given with method 'full', got 5"),
        ({"method": "full", "decode": "full"}, "decode must not be given with method 'full', got 'full'"),
        ({"method": "full", "layers": (1,)}, r"layers must not be given with method 'full', got \(1,\)"),
        ({"method": "full", "backend": "blocked"}, "backend must not be given with method 'full'"),
        ({"method": "swa", "budget": 5, "routing_seed": 1}, "routing_seed must not be given with method 'swa'"),
        ({"method": "sa", "budget": 5, "routing_seed": -1}, "routing_seed must be an integer in"),
        ({"method": "sa", "budget": 5, "decode": "some"}, "decode must be one of 'full', 'stochastic', got 'some'"),
        ({"method": "sa", "budget": 5, "backend": "some"}, "backend must be one of"),
        ({"method": "preset:gone.json"}, "preset must be a file that holds one, got 'gone.json'"),
    ],
    ids=str,
)
def test_attention_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Attention(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be a finite number > 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must be a probability, at most 1, got 1.5"),
        ({"temperature": 1.0, "seed": -1}, "seed must be an integer in"),
        ({"top_p": 0.5}, "top_p must not be given with temperature 0, where nothing is drawn, got 0.5"),
        ({"seed": 3}, "seed must not be given with temperature 0"),
    ],
    ids=str,
)
def test_sampling_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize(("length", "new"), [(513, 1), (500, 13)])
def test_a_prompt_must_leave_room_in_the_models_positions(language, length, new):
    with pytest.raises(ValueError, match=rf"512 positions, got a prompt of {length} tokens and {new}"):
        run(language, [1] * length, sampling=Sampling(max_new_tokens=new))


def test_layers_must_be_the_models(language, prompt):
    with pytest.raises(ValueError, match=r"layers must be distinct indices in \[0, 2\)"):
        run(language, prompt, Attention("sa", 5, layers=(0, 7)))


def test_a_chat_template_is_put_around_the_prompt(model, tokenizer, monkeypatch):
    language = LanguageModel(model, tokenizer)
    with pytest.raises(ValueError, match="chat needs a tokenizer that has a chat template"):
        encode_prompt(language, "hello", chat=True)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert tokenizer.decode(encode_prompt(language, "hello", chat=True)) == "<user>hello<a>"
    assert tokenizer.decode(encode_prompt(language, "hello")) == "hello"


def test_a_prompt_must_not_be_empty(language):
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        encode_prompt(language, "")


@pytest.mark.parametrize(
    ("first", "second", "agreeing", "told"),
    [
        ([1, 2, 3], [1, 2, 3], 3, "agree in all 3 tokens"),
        ([1, 2, 3], [1, 2, 4], 2, "agree up to token 2"),
        ([1, 2], [1, 2, 3], 2, "agree up to token 2"),
        ([1, 2, 3], [4, 2, 3], 0, "differ from the first token on"),
    ],
)
def test_agreement_is_of_the_first_tokens(first, second, agreeing, told):
    assert agreeing_tokens(first, second) == agreeing
    assert agreement(agreeing, len(first), len(second)) == told


class TestCommand:
    @pytest.fixture
    def arguments(self, model_folder):
        return ["generate", "--model", str(model_folder), "--max-new-tokens", "9", "--prompt", SENTENCE[:70]]

    def test_text_and_figures_come_apart(self, arguments, language, prompt, tmp_path, capsys):
        assert cli.main([*arguments, "--budget", "12", "--output", str(tmp_path / "out")]) == 0
        shown = capsys.readouterr()
        whole, found = run(language, prompt), run(language, prompt, Attention("union", 12))
        assert shown.out == f"{found.text}\n"
        header, *lines = shown.err[shown.err.index("method ") :].splitlines()
        assert header.split()[:3] == ["method", "prompt", "new"]
        assert [line.split()[:3] for line in lines[:2]] == [["union", "70", "9"], ["full", "70", "9"]]
        assert lines[2].startswith("The two texts ")
        record = json.loads((tmp_path / "out" / "record.json").read_text(encoding="utf-8"))
        assert record["command"].startswith("sattn generate --model ")
        assert record["config"]["budget"] == 12
        assert [c["tokens"] for c in record["results"]["continuations"]] == [found.tokens, whole.tokens]
        assert record["results"]["agreeing_tokens"] == agreeing_tokens(found.tokens, whole.tokens)

    @pytest.mark.parametrize("options", [["--method", "full"], ["--budget", "12", "--no-full"]], ids=str)
    def test_one_run_alone(self, arguments, options, capsys):
        assert cli.main([*arguments, *options]) == 0
        told = capsys.readouterr().err
        assert told[told.index("method ") :].count("\n") == 2

    @pytest.mark.parametrize("source", ["-", "file"])
    def test_the_prompt_may_come_from_elsewhere(self, arguments, source, tmp_path, monkeypatch, capsys):
        whole = [*arguments, "--method", "full"]
        cli.main(whole)
        expected = capsys.readouterr().out
        if source == "-":
            monkeypatch.setattr("sys.stdin", io.StringIO(SENTENCE[:70]))
        else:
            source = str(tmp_path / "prompt.txt")
            (tmp_path / "prompt.txt").write_text(SENTENCE[:70], encoding="utf-8")
        at = whole.index("--prompt")
        assert cli.main([*whole[:at], "--prompt-file", source, *whole[at + 2 :]]) == 0
        assert capsys.readouterr().out == expected

    @pytest.mark.parametrize(("runs", "lines"), [(1, 1), (2, 2)])
    def test_an_interrupt_ends_with_the_figures_so_far(self, arguments, runs, lines, monkeypatch, capsys):
        count = itertools.count(1)
        put = generation._Stream.put

        def interrupted(self, value):
            put(self, value)
            if next(count) == 10 * runs - 6:  # a run puts its prompt and 9 tokens
                raise KeyboardInterrupt

        monkeypatch.setattr(generation._Stream, "put", interrupted)
        assert cli.main([*arguments, "--budget", "12"]) == 130
        told = capsys.readouterr().err
        assert told.endswith("Interrupted.\n")
        assert sum(line.startswith(("union ", "full ")) for line in told.splitlines()) == lines

    @pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "not UTF-8"])
    def test_a_prompt_that_cannot_be_read_is_told_in_one_line(self, tmp_path, content, capsys):
        path = tmp_path / "prompt.txt"
        if content is not None:
            path.write_bytes(content)
        assert cli.main(["generate", "--prompt-file", str(path), "--method", "full"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("sattn generate: prompt_file must be a UTF-8 file that can be read")
        assert error.count("\n") == 1

    @pytest.mark.parametrize("given", [[], ["--prompt", "x", "--prompt-file", "y"]], ids=str)
    def test_one_prompt_is_needed(self, given):
        with pytest.raises(SystemExit) as stop:
            cli.main(["generate", *given])
        assert stop.value.code == 2


@pytest.mark.slow
def test_the_embedded_model_continues_a_long_prompt():
    language = load_model()
    prompt = encode_prompt(language, " ".join([f"{SENTENCE}."] * 30))
    sampling = Sampling(max_new_tokens=16)
    whole = run(language, prompt, sampling=sampling)
    found = run(language, prompt, Attention("union", 128), sampling)
    assert len(prompt) > 600
    assert SENTENCE.startswith(whole.text.strip(" ."))
    assert found.tokens == whole.tokens  # a text that repeats within the window
    assert found.keys_of_new == pytest.approx(128, rel=0.05)
    assert whole.keys_of_new == len(prompt) + 17 / 2


def test_a_preset_decodes_by_its_own_rule_and_takes_no_other_settings(language, prompt, tmp_path):
    for decode in ("full", "stochastic"):
        plain = Attention("union-prefix", 12, layers=(1,), decode=decode)
        pattern = plain.fit(len(prompt), SHORT.max_new_tokens)
        save_preset(tmp_path / "it.json", "it", Preset(pattern, (1,), decode))
        found, same = (run(language, prompt, each) for each in (Attention(f"preset:{tmp_path / 'it.json'}"), plain))
        assert found.tokens == same.tokens
        assert (found.keys_of_prompt, found.keys_of_new) == (same.keys_of_prompt, same.keys_of_new)
    with pytest.raises(ValueError, match="budget must not be given with a preset, which says it all, got 5"):
        Attention(f"preset:{tmp_path / 'it.json'}", 5)
