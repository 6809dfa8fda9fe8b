"""Which layer runs what: how it is asked for, kept in a config, saved and loaded."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers

from stochastic_attention import Pattern
from stochastic_attention.hf import configure, report, restore, set_step, swap
from stochastic_attention.hf.plan import NAME, LayerPlan, read

from .conftest import EAGER_FAMILIES, FAMILY, SIZES, SLIDING_FAMILIES

SA = Pattern.stochastic(4)
UNION = Pattern.stochastic(3, scope="prefix", shape="block", local=2, sinks=1, correction=0.5, seed=7, per_head=True)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def patterns(model):
    plan = read(model.config).layers
    return [plan[i].pattern if i in plan else None for i in range(model.config.num_hidden_layers)]


@pytest.mark.parametrize(
    ("pattern", "layers", "expected"),
    [
        (SA, None, [SA, None, SA]),
        (SA, "sliding", [SA, None, SA]),
        (SA, "full", [None, SA, None]),
        (SA, "all", [SA, SA, SA]),
        (SA, "every 2nd", [None, SA, None]),
        (SA, "every 1st", [SA, SA, SA]),
        (SA, "every 3rd", [None, None, SA]),
        (SA, [2, 0], [SA, None, SA]),
        (SA, range(1), [SA, None, None]),
        ({0: SA, 1: UNION}, None, [SA, UNION, None]),
    ],
    ids=str,
)
def test_layers_are_chosen_by_kind_number_or_index(make_model, pattern, layers, expected):
    assert patterns(swap(make_model("gemma2"), pattern, layers)) == expected


@pytest.mark.parametrize("layers", [None, "all", "full"])
def test_a_model_without_windows_has_full_layers_only(make_model, layers):
    assert patterns(swap(make_model("llama"), SA, layers)) == [SA] * 3


def test_a_layer_with_a_pattern_of_its_own_is_the_layer_swapped_alone(make_model, ids):
    at_once = swap(make_model(), {0: SA, 2: UNION})
    one_by_one = swap(swap(make_model(), UNION, [2]), SA, [0])
    assert torch.equal(logits(at_once, ids), logits(one_by_one, ids))


@pytest.mark.parametrize(
    ("pattern", "decode", "expected"),
    [
        (SA, None, "full"),
        (SA, "stochastic", "stochastic"),
        (UNION, None, "stochastic"),
        (UNION, "full", "full"),
        (Pattern.local(4), None, "stochastic"),
        (Pattern.full(), None, "stochastic"),
    ],
    ids=str,
)
def test_what_decoding_sees_unless_asked(pattern, decode, expected):
    assert LayerPlan.checked(pattern, decode).decode == expected


@pytest.mark.parametrize("pattern", [SA, UNION, Pattern.local(4, sinks=1), Pattern.full(), Pattern.moba(4, 2)], ids=str)
def test_patterns_survive_json(pattern):
    assert Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern


def test_a_saved_swap_is_a_plain_model_that_swaps_again(make_model, family, ids, tmp_path):
    config = {"sliding_window": 5} if family in SLIDING_FAMILIES else {}
    model = swap(swap(make_model(family, **config), SA), UNION, [1], decode="full", backend="blocked")
    model.save_pretrained(tmp_path)
    native = "eager" if family in EAGER_FAMILIES else "sdpa"
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=native)
    assert torch.equal(logits(plain, ids), logits(make_model(family, **config), ids))
    built = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert torch.equal(logits(built, ids), logits(model, ids))
    swapped = swap(plain)
    assert torch.equal(logits(swapped, ids), logits(model, ids))
    assert read(swapped.config) == read(model.config)
    assert [line.attention for line in report(built)] == [line.attention for line in report(model)]


def test_a_saved_swap_loads_without_this_package(make_model, ids, tmp_path):
    model = swap(make_model("mistral", sliding_window=5), SA)
    model.save_pretrained(tmp_path)
    restore(model)
    code = (
        "import sys, torch, transformers; m = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "assert 'stochastic_attention' not in sys.modules; "
        "torch.save(m(torch.tensor(eval(sys.argv[2]))).logits.detach(), sys.argv[1] + '/logits.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(ids.tolist())], check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model, ids))


def test_both_ways_in_give_the_same_model(make_model, family, ids):
    swapped = swap(make_model(family), SA, "all")
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILY.get(family, {})))
    built = transformers.AutoModelForCausalLM.from_config(configure(config, SA, "all"), attn_implementation=NAME).eval()
    built.load_state_dict(swapped.state_dict())
    assert torch.equal(logits(built, ids), logits(swapped, ids))
    assert read(built.config) == read(swapped.config)
    assert [line.calls for line in report(built)] == [1, 1, 1]
    options = {"max_new_tokens": 6, "do_sample": False}
    for implementation in ("dynamic", "static"):
        found, expected = (m.generate(ids, cache_implementation=implementation, **options) for m in (built, swapped))
        assert found.tolist() == expected.tolist()


def test_a_model_built_so_becomes_a_swapped_or_a_plain_one(make_model, ids):
    plain = make_model("gemma2", sliding_window=5)

    def build():
        config = configure(copy.deepcopy(plain.config), SA, "all")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
        model.load_state_dict(plain.state_dict())
        logits(model, ids)
        return model

    expected = logits(build(), ids)
    assert torch.equal(logits(swap(build()), ids), expected)
    assert torch.equal(logits(restore(build()), ids), logits(plain, ids))
    assert patterns(swap(build(), UNION, [1])) == [SA, UNION, SA]
    stepped = build()
    set_step(stepped, 3)
    assert not torch.equal(logits(stepped, ids), expected)


@pytest.mark.parametrize("family", SLIDING_FAMILIES)
def test_a_cache_of_windows_in_a_model_built_so_raises_once_it_drops_keys(family, ids):
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILY[family] | {"sliding_window": 5}))
    configure(config, Pattern.stochastic(4, scope="prefix"), "all")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    options = {"do_sample": False}
    few = model.generate(ids[:, :2], max_new_tokens=3, **options)
    with pytest.raises(ValueError, match=r"the cache of layer 0 must hold all .* swap\(model\) reads the same config"):
        model.generate(ids, max_new_tokens=3, **options)
    swap(model)
    assert model.generate(ids[:, :2], max_new_tokens=3, **options).tolist() == few.tolist()
    model.generate(ids, max_new_tokens=3, **options)


def test_a_config_that_does_not_say_what_to_swap(make_model, ids):
    model = transformers.AutoModelForCausalLM.from_config(make_model().config, attn_implementation=NAME)
    with pytest.raises(ValueError, match=r"it has no 'stochastic_attention'; use swap\(model, pattern\), or configure"):
        model(ids)
    model.load_state_dict(make_model().state_dict())
    assert torch.equal(logits(swap(model, SA), ids), logits(swap(make_model(), SA), ids))
    assert torch.equal(logits(restore(model), ids), logits(make_model(), ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("full", r"config.stochastic_attention must have the keys layers, native, got str"),
        ({"native": "flash"}, r"\['native'\] must be one of 'sdpa', 'eager', got 'flash'"),
        ({"version": 1}, r"must have the keys layers, native, got \['layers', 'native', 'version'\]"),
        ({"layers": [{"layers": [0]}]}, r"\['layers'\] must have the keys layers, pattern, got \['layers'\]"),
        ({"layers": [{"layers": [9], "pattern": SA.to_dict()}]}, r"distinct indices in \[0, 3\), .* got \[9\]"),
        ({"layers": [{"layers": [0], "pattern": SA.to_dict()}] * 2}, "must name a layer once, got layer 0 twice"),
        ({"layers": [{"layers": [0], "pattern": {"window": 4}}]}, 'described by a mapping with a "kind"'),
        ({"layers": [{"layers": [0], "pattern": {"kind": "local", "width": 4}}]}, "by its fields, got 'width'"),
        ({"layers": [{"layers": [0], "pattern": {"kind": "local", "window": 0}}]}, "window must be"),
        ({"layers": [{"layers": [0], "pattern": SA.to_dict(), "decode": "no"}]}, "decode must be one of"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else str(x),
)
def test_entries_that_cannot_be(make_model, ids, change, message):
    config = configure(make_model().config, SA)
    entry = getattr(config, NAME)
    setattr(config, NAME, {**entry, **change} if isinstance(change, dict) else change)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with pytest.raises(ValueError, match=message):
        model(ids)


def test_softcaps_that_sdpa_leaves_out_are_not_swapped_over():
    config = transformers.AutoConfig.for_model("gemma2", **(SIZES | FAMILY["gemma2"]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(ValueError, match='must have attn_implementation="eager" to be swapped'):
        swap(model, SA)
