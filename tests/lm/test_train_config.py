"""What a configuration file may say, and what is told of one that says something else."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from stochastic_attention.lm import StochasticLlamaConfig
from stochastic_attention.lm.sections import apply_settings, read_yaml
from stochastic_attention.lm.train_config import changed_settings, read_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("training", {"stepz": 3}, "training.stepz is no setting; training has sequence_length, learning_rate"),
        ("training", {"sequence_length": "absent"}, "training.sequence_length must be an integer, got nothing"),
        ("training", {"sequence_length": 1}, "training.sequence_length must be an integer >= 2, got 1"),
        ("training", {"sequence_length": 24.5}, "training.sequence_length must be an integer, got 24.5"),
        ("training", {"sequence_length": True}, "training.sequence_length must be an integer, got True"),
        ("training", {"sequence_length": float("inf")}, "training.sequence_length must be an integer, got inf"),
        ("training", {"learning_rate": "fast"}, "training.learning_rate must be a number, got 'fast'"),
        ("training", {"learning_rate": 0}, "training.learning_rate must be a finite number > 0.0, got 0"),
        ("training", {"learning_rate": float("nan")}, "training.learning_rate must be a finite number > 0.0, got nan"),
        ("training", {"min_learning_rate": 1}, "training.min_learning_rate must be at most learning_rate 0.01, got 1"),
        ("training", {"warmup_steps": 7}, r"training.warmup_steps must be an integer in \[0, 6\], got 7"),
        ("training", {"betas": [0.9]}, r"training.betas must be two numbers in \[0, 1\), got \[0.9\]"),
        ("training", {"betas": [0.9, "x"]}, r"training.betas\[1\] must be a number, got 'x'"),
        ("training", {"betas": 0.9}, "training.betas must be a list of a number, got 0.9"),
        ("training", {"clip": 0}, "training.clip must be a finite number > 0.0, got 0"),
        ("training", {"keep": 0}, "training.keep must be an integer >= 1, got 0"),
        ("training", {"precision": "fp8"}, "training.precision must be one of 'fp32', 'bf16', got 'fp8'"),
        ("training", {"parallel": None}, "training.parallel must be one of 'none', 'ddp', 'fsdp2', got None"),
        ("training", {"torch_compile": 1}, "training.torch_compile must be true or false, got 1"),
        ("training", {"tokens": 96}, "training.steps or training.tokens must be given, and not both, got 6 and 96"),
        ("training", {"steps": None}, "training.steps or training.tokens must be given, and not both, got None and"),
        (
            "training",
            {"global_batch_tokens": 96},
            "training.global_batch_sequences or training.global_batch_tokens must",
        ),
        (
            "training",
            {"global_batch_sequences": None, "global_batch_tokens": 100},
            "training.global_batch_tokens must be a multiple of sequence_length 24, got 100",
        ),
        ("training", {"eval_every": None}, "training.eval_every and data.validation must be given together, got None"),
        (
            "data",
            {"validation": None},
            "training.eval_every and data.validation must be given together, got 2 and None",
        ),
        ("data", {"texts": "x"}, "data.texts is no setting; data has text, dataset"),
        ("data", {"documents": "merged"}, "data.documents must be one of 'isolated', 'joined', got 'merged'"),
        ("tokenizer", {"train": {"size": 3}}, "tokenizer.train.size is no setting; tokenizer.train has vocab_size"),
    ],
)
def test_what_is_wrong_is_told_by_its_name(config_file, section, changes, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        read_config(config_file(**{section: changes}), [])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 2]", "config must hold a mapping of sections, got list"),
        ("model: {", "config .* is not valid YAML"),
        ("model: {a: 1, a: 2}", "config .* is not valid YAML: a is given twice"),
        ("{model: 3, tokenizer: {}, data: {}, training: {}}", "model must be a mapping, got 3"),
        ("model: {}", "tokenizer must be a mapping, got nothing"),
        ("a: 1", "a is no setting; config has model, tokenizer, data, training"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, told):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_config(path, [])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config must be a YAML file that can be read"):
        read_yaml(tmp_path / "none.yaml")


def test_settings_go_over_the_file(config_file):
    path = config_file()
    settings = ["training.learning_rate=3e-4", "training.steps=null", "training.tokens=1e3", "model.sa.window=8"]
    config = read_config(path, [*settings, "model.layer_attention=[full, sa]", "training.betas=[0.8, 0.9]"])
    assert config.training.learning_rate == 3e-4
    assert config.training.betas == (0.8, 0.9)
    assert config.training.total_steps == 11, "1000 tokens in steps of 96, rounded up"
    assert config.model["sa"] == {"window": 8}
    assert config.model["layer_attention"] == ["full", "sa"]


@pytest.mark.parametrize("setting", ["training.steps", "=3", "training..steps=3", "model.model_type.x=3", "a.b={"])
def test_a_setting_of_another_form_is_refused(setting):
    with pytest.raises(ValueError, match=r"set must|not valid YAML"):
        apply_settings({"model": {"model_type": "llama"}}, [setting])


@pytest.mark.parametrize(
    ("processes", "micro_batch", "expected"), [(1, None, (12, 1)), (1, 4, (4, 3)), (3, None, (4, 1)), (3, 2, (2, 2))]
)
def test_the_global_batch_is_dealt_out(config_file, processes, micro_batch, expected):
    path = config_file(training={"global_batch_sequences": 12, "micro_batch": micro_batch})
    assert read_config(path, []).training.micro_batches(processes) == expected


@pytest.mark.parametrize(
    ("processes", "micro_batch", "told"),
    [(5, None, "must be a multiple of the number of processes, got 5"), (3, 3, "must divide the 4 rows .* got 3")],
)
def test_a_batch_that_does_not_divide_is_refused(config_file, processes, micro_batch, told):
    path = config_file(training={"global_batch_sequences": 12, "micro_batch": micro_batch})
    with pytest.raises(ValueError, match=told):
        read_config(path, []).training.micro_batches(processes)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], []),
        (["training.save_every=3", "training.log_every=2", "training.micro_batch=1", "training.keep=9"], []),
        (["training.steps=7", "training.parallel=ddp"], []),
        (["training.steps=5"], ["training.steps was 6, now 5"]),
        (["training.parallel=fsdp2"], ["training.parallel was 'none', now 'fsdp2'"]),
        (
            ["training.learning_rate=0.02", "model.sa.window=5", "model.gate=channel"],
            [
                "model.gate was None, now 'channel'",
                "model.sa.window was 4, now 5",
                "training.learning_rate was 0.01, now 0.02",
            ],
        ),
    ],
)
def test_what_a_resumed_run_may_change(config_file, settings, told):
    path = config_file()
    old = yaml.safe_load(yaml.safe_dump(read_config(path, []).plain()))
    assert changed_settings(old, read_config(path, settings).plain()) == told


@pytest.fixture
def shipped(tmp_path):
    """shipped(name, *settings): a configuration that comes with the package, on some text."""
    text = tmp_path / "text.txt"
    text.write_text("words")

    def shipped(name, *settings):
        path = CONFIGS / f"{name}.yaml"
        on_text = [f"data.text={text}", "data.validation=0.1"] if "text: null" in path.read_text() else []
        return read_config(path, [*on_text, *settings])

    return shipped


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_the_configurations_that_come_with_it_divide_their_batches(shipped, name):
    training = shipped(name).training
    micro, steps = training.micro_batches(1 if training.parallel == "none" else 8)
    assert micro * steps * (1 if training.parallel == "none" else 8) == training.rows


@pytest.mark.parametrize("name", ["360m", "100m", "books"])
@pytest.mark.parametrize("attention", ["full", "swa", "sa", "gated"])
def test_a_configuration_says_how_many_parameters_it_has(shipped, name, attention):
    config = shipped(name, f"model.layer_attention={attention}")
    learned = {"vocab_size": config.tokenizer.train.vocab_size} if config.tokenizer.train else {}
    fields = learned | {key: value for key, value in config.model.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(StochasticLlamaConfig(**fields))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,}" in (CONFIGS / f"{name}.yaml").read_text()


def test_the_steps_of_the_large_run_are_those_that_its_file_says(shipped):
    training = shipped("360m").training
    assert f"{training.total_steps:,} steps" in (CONFIGS / "360m.yaml").read_text()
    assert training.rows == 256
