import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from stochastic_attention import Pattern
from stochastic_attention.hf import Preset, load_preset, report, restore, save_preset, swap
from stochastic_attention.records import Environment, Record

UNION = Pattern.stochastic(3, local=2, sinks=1, correction=0.5, scope="prefix", seed=4)
LOCAL = Pattern.local(4, sinks=1)
PRESETS = {
    "all layers": Preset(UNION, "all"),
    "default layers": Preset(UNION),
    "every 2nd": Preset(UNION, "every 2nd", "full"),
    "indices": Preset(UNION, [1]),
    "by layer": Preset({0: UNION, 1: LOCAL}, None, "stochastic"),
}
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES)).eval()


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_a_file_gives_back_what_swap_takes(preset, model, tmp_path):
    save_preset(tmp_path / "folder" / "it.json", "it", preset)
    loaded = load_preset(tmp_path / "folder" / "it.json")
    reports = []
    for each in (preset, loaded):
        reports.append([(line.attention, line.decode) for line in report(swap(model, *each))])
        restore(model)
    assert reports[0] == reports[1]
    assert loaded.to_list() == preset.to_list()
    assert loaded.decode == preset.decode


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_the_patterns_of_layers_are_those_that_run(preset, model):
    patterns = preset.layer_patterns(model.config)
    lines = report(swap(model, *preset))
    restore(model)
    for line, pattern in zip(lines, patterns, strict=True):
        assert line.attention == ("sdpa" if pattern == Pattern.full() else f"stochastic_attention: {pattern}")


def test_a_layer_left_alone_keeps_its_own_window():
    config = MistralConfig(num_hidden_layers=2, sliding_window=8, **SIZES)
    assert Preset(UNION, [1]).layer_patterns(config) == [Pattern.local(8), UNION]


def test_another_seed_changes_patterns_with_chance_alone():
    seeded = Preset({0: UNION, 1: LOCAL}).seeded(9)
    assert seeded.pattern == {0: UNION.seeded(9), 1: LOCAL}
    assert Preset(UNION, "all").seeded(9) == Preset(UNION.seeded(9), "all")
    assert (Preset({0: LOCAL}).is_random, Preset({0: LOCAL, 1: UNION}).is_random) == (False, True)


def test_words_name_each_pattern_with_its_layers():
    assert str(Preset(LOCAL, "all")) == "local(window=4, sinks=1)"
    assert str(Preset(LOCAL)) == "local(window=4, sinks=1) in the layers that swap chooses"
    assert str(Preset({0: LOCAL, 1: Pattern.full(), 2: LOCAL})) == (
        "local(window=4, sinks=1) in layers [0, 2]; full() in layers [1]"
    )


def test_the_record_is_kept_beside(tmp_path):
    save_preset(tmp_path / "it.json", "it", Preset(UNION), Record("sattn x", {"a": 1}, Environment.current(), {"b": 2}))
    facts = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))
    assert (facts["preset"], facts["record"]["command"], facts["record"]["results"]) == ("it", "sattn x", {"b": 2})


def test_a_preset_for_other_layers_is_refused(model):
    with pytest.raises(ValueError, match=r"indices in \[0, 2\)"):
        Preset({0: UNION, 5: UNION}).plans(model.config)


GROUP = {"layers": [0], "pattern": {"kind": "full"}}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"patterns": [], "decode": None}),
        json.dumps({"patterns": [GROUP]}),
        json.dumps({"patterns": [{**GROUP, "pattern": {"kind": "nonsense"}}], "decode": None}),
        json.dumps({"patterns": [GROUP, GROUP], "decode": None}),
        json.dumps({"patterns": [GROUP, {**GROUP, "layers": "all"}], "decode": None}),
    ],
    ids=["no JSON", "a list", "nothing", "no pattern", "no decode", "wrong pattern", "a layer twice", "named layers"],
)
def test_a_file_that_holds_none_is_refused_by_its_name(content, tmp_path):
    (tmp_path / "bad.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"preset must be a file that holds one, got '.*bad.json'"):
        load_preset(tmp_path / "bad.json")


def test_no_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"preset must be a file that holds one, got '.*gone.json'"):
        load_preset(tmp_path / "gone.json")
