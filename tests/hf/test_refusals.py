"""What a swap refuses: it raises, and never computes something else."""

import math

import pytest
import torch
import transformers

from stochastic_attention import Pattern
from stochastic_attention.hf import registration, report, restore, set_step, swap

PATTERN = Pattern.stochastic(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": []}, r"layers must be distinct indices in \[0, 3\), at least one, got \[\]"),
        ({"layers": 1}, "layers must be None, a string or an iterable of indices, got 1"),
        ({"layers": "most"}, "layers must be None, 'all', 'sliding', 'full', 'every 4th' .* got 'most'"),
        ({"layers": "every 0th"}, "layers must be None, 'all', .* got 'every 0th'"),
        ({"layers": "every 4th"}, "layers must choose at least one of the model's 3 layers, got 'every 4th'"),
        ({"layers": "sliding"}, "layers must choose at least one of the model's 3 layers, got 'sliding'"),
        ({"layers": [3]}, r"layers .* got \[3\]"),
        ({"layers": [-1]}, r"layers .* got \[-1\]"),
        ({"layers": [True]}, r"layers .* got \[True\]"),
        ({"layers": [1, 1]}, r"layers .* got \[1, 1\]"),
        ({"layers": [1.0]}, r"layers .* got \[1.0\]"),
        ({"pattern": "stochastic"}, "pattern must be a Pattern, got str"),
        ({"pattern": {}}, r"layers must be distinct indices in \[0, 3\), at least one, got \[\]"),
        ({"pattern": {3: PATTERN}}, r"layers must be distinct indices in \[0, 3\), at least one, got \[3\]"),
        ({"pattern": {0: "stochastic"}}, "pattern must be a Pattern, got str"),
        ({"pattern": {0: PATTERN}, "layers": [0]}, r"layers must be None where pattern is a mapping, .* got \[0\]"),
        ({"pattern": None}, "config must say what to swap"),
        ({"pattern": None, "layers": [0]}, "pattern must be given with layers, decode or backend, got None"),
        ({"decode": "some"}, "decode must be one of 'full', 'stochastic', got 'some'"),
        ({"backend": "fast"}, "backend must be one of .*'reference', got 'fast'"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_bad_arguments_leave_the_model_alone(make_model, arguments, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        swap(model, **({"pattern": PATTERN} | arguments))
    assert [line.calls for line in report(model)] == [None] * 3


@pytest.mark.parametrize("function", [lambda m: swap(m, PATTERN), report, restore], ids=["swap", "report", "restore"])
def test_models_that_are_not_supported(function):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, bos_token_id=None, eos_token_id=None)
    with pytest.raises(ValueError, match=r"supported family \(llama, .*, phi3\), got 'gpt2'"):
        function(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="model must be a transformers PreTrainedModel, got Linear"):
        function(torch.nn.Linear(1, 1))
    wrapped = torch.nn.Sequential(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="got Sequential around a GPT2LMHeadModel: pass that one"):
        function(wrapped)


def test_a_model_whose_layers_are_not_found(make_model):
    model = make_model()
    model.config.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"one Qwen3Attention for each of its 4 layers, found layers \[0, 1, 2\]"):
        swap(model, PATTERN)


def test_native_implementations_that_are_not_supported(make_model):
    with pytest.raises(ValueError, match="sdpa or eager to be swapped, got 'flex_attention'"):
        swap(make_model(attn_implementation="flex_attention"), PATTERN)


def test_restore_and_set_step_need_a_swapped_model(make_model):
    for function, model in ((restore, make_model()), (set_step, make_model()), (set_step, torch.nn.Linear(1, 1))):
        with pytest.raises(ValueError, match="model must have been swapped first"):
            function(model, *[1] * (function is set_step))


@pytest.mark.parametrize("step", [-1, 1.5, True, torch.tensor(1.0)], ids=str)
def test_set_step_checks_the_step(make_model, step):
    with pytest.raises(ValueError, match="step"):
        set_step(swap(make_model(), PATTERN), step)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attention_mask": torch.zeros(2, 1, 21, 21)}, r"cannot honour a ready-made one, got \[2, 1, 21, 21\]"),
        (
            {"attention_mask": torch.ones(2, 20), "use_cache": True},
            r"attention_mask must have shape .* N = 21, .* got \[2, 20\]",
        ),
        (
            {"attention_mask": torch.ones(2, 22), "use_cache": False},
            r"attention_mask must have shape .* N = 21, .* got \[2, 22\]",
        ),
        ({"attention_mask": torch.ones(2, 22)}, r"attention_mask must have shape .* N = 21, .* got \[2, 22\]"),
        ({"attention_mask": torch.ones(3, 21)}, r"attention_mask must have shape .* B = 2, got \[3, 21\]"),
        ({"attention_mask": torch.zeros(2, 21).index_fill(1, torch.arange(4), -math.inf)}, "bool or hold 0 and 1 only"),
        ({"attention_mask": torch.arange(1, 22).expand(2, -1) // 12 + 1}, "bool or hold 0 and 1 only"),
        ({"output_attentions": True}, "output_attentions must be False"),
        ({"is_causal": False}, "is_causal must be True"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 21])}, "does not know the argument 'cu_seq_lens_q'"),
        ({"position_bias": torch.zeros(1)}, "does not know the argument 'position_bias'"),
        ({"position_ids": torch.cat([torch.arange(9), torch.arange(20, 32)])[None]}, "8 followed by 20 in row 0"),
    ],
    ids=[
        "4-D mask",
        "short mask",
        "long mask, no cache",
        "long mask",
        "other rows",
        "additive mask",
        "numbered documents",
        "output_attentions",
        "is_causal",
        "cu_seq_lens",
        "unknown",
        "jumping positions",
    ],
)
@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "one layer"])
def test_calls_that_cannot_be_honoured(make_model, family, ids, call, message, layers):
    model = swap(make_model(family), PATTERN, layers)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(ids, **call)


def test_mask_mappings(make_model, ids):
    with pytest.raises(ValueError, match="cannot honour a ready-made one, got NoneType"):
        swap(make_model("qwen3"), PATTERN)(ids, attention_mask={"full_attention": None})


def test_modules_that_are_not_causal(make_model, ids):
    model = swap(make_model(), PATTERN)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="is_causal must be True"):
        model(ids)


def test_output_attentions_in_the_config(make_model):
    model = make_model(attn_implementation="eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"config.output_attentions must be False"):
        swap(model, PATTERN)


def test_attention_dropout_in_training(make_model, family, ids):
    model = swap(make_model(family, attention_dropout=0.5), PATTERN)
    model(ids)
    with pytest.raises(ValueError, match=r"attention dropout must be 0 in a swapped layer, got 0.5"):
        model.train()(ids)


def test_switching_the_implementation_of_a_swapped_model(make_model, ids):
    model = swap(make_model(), PATTERN)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="was set to 'eager', so no swapped layer would run: restore"):
        model(ids)
    restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_layer_outside_a_call_of_its_model(make_model, ids, cache_name):
    model, seen = swap(make_model(), PATTERN), []
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *call: seen.append(call[2]), with_kwargs=True)
    model(ids)
    del seen[0]["routing_step"]
    with pytest.raises(ValueError, match="runs inside a call of its model only"):
        layer(**(seen[0] | {cache_name: None}))


def test_other_versions_of_transformers_warn(make_model, monkeypatch):
    # transformers replaces its own module object in some imports: this is the one that the check reads.
    monkeypatch.setattr(registration.transformers, "__version__", "6.0.0")
    with pytest.warns(UserWarning, match="written for transformers >=5.17,<6, got 6.0.0"):
        swap(make_model(), PATTERN)
