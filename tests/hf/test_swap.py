"""Swapping, restoring, reporting: what changes in a model, and what does not."""

import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
import transformers

from stochastic_attention import Pattern
from stochastic_attention.hf import report, restore, set_step, swap

from .conftest import SLIDING_FAMILIES

PATTERN = Pattern.stochastic(4)
# Layers 0 and 1 full attention, layers 2 and 3 a native sliding window of 5.
SLIDING = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def calls(model):
    return [line.calls for line in report(model)]


def test_restore_gives_back_the_untouched_model(make_model, family, native, ids):
    model, untouched = make_model(family, native), make_model(family, native)
    config = copy.deepcopy(model.config)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    assert swap(model, PATTERN) is model
    logits(model, ids)
    assert list(model.state_dict()) == keys
    assert restore(model) is model
    assert torch.equal(logits(model, ids), logits(untouched, ids))
    assert vars(model.config) == vars(config)
    assert model.config.to_json_string() == config.to_json_string()
    assert model.config._attn_implementation == native
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not model.base_model._forward_pre_hooks


def test_every_swapped_layer_is_called(make_model, family, ids):
    model = swap(make_model(family), PATTERN)
    assert calls(model) == [0, 0, 0]
    logits(model, ids)
    logits(model, ids)
    assert calls(model) == [2, 2, 2]
    restore(model)
    logits(model, ids)
    assert calls(model) == [None, None, None]
    swap(model, PATTERN)
    logits(model, ids)
    assert calls(model) == [1, 1, 1]


def test_swapping_again_equals_swapping_once(make_model, family, ids):
    model = swap(swap(make_model(family), Pattern.local(2)), PATTERN)
    assert torch.equal(logits(model, ids), logits(swap(make_model(family), PATTERN), ids))
    assert torch.equal(logits(restore(model), ids), logits(make_model(family), ids))


def test_layers_can_have_patterns_of_their_own(make_model, ids):
    model = swap(swap(make_model(), PATTERN, [0, 2]), Pattern.local(3), [2], backend="reference")
    assert [line.attention for line in report(model)] == [
        "stochastic_attention: stochastic(window=4)",
        "sdpa",
        "stochastic_attention: local(window=3)",
    ]
    assert [line.backend for line in report(model)] == ["automatic", "-", "reference"]
    one_by_one = swap(swap(make_model(), Pattern.local(3), [2]), PATTERN, [0])
    assert torch.equal(logits(model, ids), logits(swap(one_by_one, Pattern.local(3), [2], backend="reference"), ids))


@pytest.mark.parametrize("mask", [None, "left", "right"])
def test_layers_left_alone_keep_their_attention_and_mask(make_model, family, native, ids, mask):
    """With the full pattern in one layer, any fault of the others shows against the untouched model."""
    if mask:
        attention_mask = torch.ones_like(ids)
        attention_mask[0, slice(0, 4) if mask == "left" else slice(-4, None)] = 0
    else:
        attention_mask = None
    config = {"qwen2": SLIDING, "qwen3": SLIDING} | {name: {"sliding_window": 5} for name in SLIDING_FAMILIES}
    config = config.get(family, {})
    untouched = make_model(family, native, **config)
    # What layer 1 does by itself, said as a pattern.
    pattern = Pattern.local(5) if family == "mistral" else Pattern.full()
    model = swap(make_model(family, native, **config), pattern, [1])
    found, expected = (logits(m, ids, attention_mask=attention_mask) for m in (model, untouched))
    real = attention_mask.bool() if mask else torch.ones_like(ids, dtype=torch.bool)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    assert calls(model) == [1] * len(report(model))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_only_the_layers_asked_for_change(make_model, ids, layer):
    model, untouched = swap(make_model(), PATTERN, [layer]), make_model()
    inputs = {"output_hidden_states": True, "use_cache": False}
    found, expected = (m(ids, **inputs).hidden_states for m in (model, untouched))
    assert [torch.equal(f, e) for f, e in zip(found, expected, strict=True)] == [i <= layer for i in range(4)]


def test_packing_reaches_native_layers_as_before(make_model, native, ids):
    position_ids = torch.cat([torch.arange(9), torch.arange(12)])[None]
    call = {"position_ids": position_ids, "use_cache": False}
    model = swap(make_model(attn_implementation=native), Pattern.full(), [1])
    expected = logits(make_model(attn_implementation=native), ids, **call)
    torch.testing.assert_close(logits(model, ids, **call), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("qwen", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("config", "layers", "expected"),
    [
        ({"use_sliding_window": False}, [2], ["sdpa", "sdpa", "swapped", "sdpa"]),
        ({}, [0, 3], ["swapped", "sdpa", "sdpa, sliding_window=5", "swapped, in place of sliding_window=5"]),
        ({}, None, ["sdpa", "sdpa"] + ["swapped, in place of sliding_window=5"] * 2),
        ({}, "all", ["swapped", "swapped"] + ["swapped, in place of sliding_window=5"] * 2),
        ({"max_window_layers": 4}, [1], ["sdpa", "swapped", "sdpa", "sdpa"]),
    ],
    ids=["window off", "some of each", "sliding layers", "all layers", "no layer slides"],
)
def test_native_sliding_layers(make_model, qwen, config, layers, expected, ids):
    model = make_model(qwen, **(SLIDING | config))
    full = model.config.max_window_layers if model.config.use_sliding_window else 4
    native = ["sdpa"] * full + ["sdpa, sliding_window=5"] * (4 - full)
    assert [line.attention for line in report(model)] == native
    swap(model, Pattern.full(), layers)
    found = [line.attention.replace("stochastic_attention: full()", "swapped") for line in report(model)]
    assert found == expected
    slides = ["sdpa, sliding_window" in attention for attention in found]
    untouched = make_model(qwen, **(SLIDING | {"use_sliding_window": False}))
    if not any(slides):  # the pattern took the windows away
        torch.testing.assert_close(logits(model, ids), logits(untouched, ids), rtol=1e-4, atol=1e-4)
    else:
        assert (logits(model, ids) - logits(untouched, ids)).abs().max() > 0.1
    assert torch.equal(logits(restore(model), ids), logits(make_model(qwen, **(SLIDING | config)), ids))


def test_the_report_reads_as_a_table(make_model, ids):
    model = swap(make_model(**SLIDING), PATTERN, [0, 3])
    logits(model, ids)
    lines = str(report(model)).splitlines()
    assert [re.split(" {2,}", line) for line in lines] == [
        ["index", "name", "attention", "decode", "backend", "calls"],
        ["0", "model.layers.0.self_attn", "stochastic_attention: stochastic(window=4)", "full", "automatic", "1"],
        ["1", "model.layers.1.self_attn", "sdpa", "-", "-", "1"],
        ["2", "model.layers.2.self_attn", "sdpa, sliding_window=5", "-", "-", "1"],
        [
            "3",
            "model.layers.3.self_attn",
            "stochastic_attention: stochastic(window=4), in place of sliding_window=5",
            "full",
            "automatic",
            "1",
        ],
    ]
    assert len({len(line.rpartition("  ")[0]) for line in lines}) == 1, "columns are aligned"


def test_models_that_shared_a_config_are_untouched(make_model, ids):
    one = make_model()
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict())
    expected = logits(other, ids)
    swap(one, PATTERN)
    assert torch.equal(logits(other, ids), expected)
    swap(other, Pattern.full())
    restore(one)
    assert torch.equal(logits(one, ids), expected)
    assert calls(other) == [0, 0, 0]


def test_a_deep_copy_is_a_swapped_model_of_its_own(make_model, ids):
    model = swap(make_model(), PATTERN)
    twin = copy.deepcopy(model)
    assert twin.generate.args[0] is twin
    set_step(twin, 3)
    restore(model)
    assert calls(twin) == [0, 0, 0]
    assert not torch.equal(logits(twin, ids), logits(swap(make_model(), PATTERN), ids))
    assert torch.equal(logits(restore(twin), ids), logits(model, ids))


def test_a_pickled_model_is_a_swapped_one(make_model, ids):
    model = swap(make_model("gemma2", sliding_window=5), PATTERN)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin, ids), logits(model, ids))
    assert twin.generate(ids, max_new_tokens=3).tolist() == model.generate(ids, max_new_tokens=3).tolist()
    with pytest.raises(NotImplementedError, match="prefill_chunk_size must not be used"):
        twin.generate(ids, max_new_tokens=3, prefill_chunk_size=4)


@pytest.mark.parametrize("head", ["AutoModel", "AutoModelForSequenceClassification"])
def test_other_heads(make_model, family, ids, head):
    config = make_model(family).config
    model = getattr(transformers, head).from_config(config).eval()
    with torch.no_grad():
        expected = model(ids)[0]
        torch.testing.assert_close(swap(model, Pattern.full())(ids)[0], expected, rtol=1e-4, atol=1e-4)
    assert calls(model) == [1, 1, 1]


def test_routing_follows_the_step_and_repeats(make_model, backend, ids):
    model = swap(make_model(), PATTERN, backend=backend)
    first = logits(model, ids)
    assert torch.equal(logits(model, ids), first)
    set_step(model, 1)
    assert (logits(model, ids) - first).abs().max() > 0.1
    set_step(model, torch.tensor(0))
    assert torch.equal(logits(model, ids), first)


def test_routing_differs_by_layer(make_model, backend, ids, cache_name):
    """Layers of equal weights, given equal inputs."""
    model = swap(make_model(), PATTERN, backend=backend)
    layers = [layer.self_attn for layer in model.model.layers]
    inputs = []
    layers[0].register_forward_pre_hook(lambda *call: inputs.append(call[2]), with_kwargs=True)
    logits(model, ids)
    outputs = []
    for layer in layers:
        layer.load_state_dict(layers[0].state_dict())
        with torch.no_grad():
            outputs.append(layer(**(inputs[0] | {cache_name: None}))[0])
    assert min((outputs[i] - outputs[i - 1]).abs().max() for i in range(3)) > 0.1


def test_compiled_models_follow_the_step(make_model, ids):
    model = swap(make_model(), PATTERN)
    compiled = torch.compile(model, backend="eager")
    outputs = []
    for step in range(3):
        set_step(model, torch.tensor(step))
        outputs.append(logits(compiled, ids, use_cache=False))
        assert torch.equal(outputs[-1], logits(model, ids, use_cache=False))
    assert min((outputs[i] - outputs[i - 1]).abs().max() for i in range(3)) > 0.1


def test_importing_the_swap_registers_it_and_importing_the_package_does_nothing():
    code = (
        "import sys, stochastic_attention; assert 'transformers' not in sys.modules; import stochastic_attention.hf; "
        "from transformers import AttentionInterface as A, AttentionMaskInterface as M; "
        "assert [[n for n in r if 'stochastic' in n] for r in (A(), M())] == [['stochastic_attention']] * 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
