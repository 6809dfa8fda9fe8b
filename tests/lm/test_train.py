"""Training runs from end to end on a tiny model: what they write, how they resume, and what stops them."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import stochastic_attention.lm  # noqa: F401  # registers the model
from stochastic_attention import cli
from stochastic_attention.hf.attend import STEP_ARGUMENT
from stochastic_attention.hf.state import FAMILIES
from stochastic_attention.lm import callbacks, checkpoints, train, trainer
from stochastic_attention.lm.callbacks import NotFiniteError
from stochastic_attention.lm.checkpoints import DiskFullError, step_of
from stochastic_attention.lm.checkpoints import checkpoints as complete
from stochastic_attention.lm.data import DataExhausted
from stochastic_attention.lm.loss_log import LossLog
from stochastic_attention.lm.train_config import read_config
from stochastic_attention.records import Record

EXPERTS = {
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.fixture
def run(config_file, tmp_path):
    """run(output, *settings, resume) -> how the run ended."""
    path = config_file()

    def run(output="run", *settings, resume=True):
        config = read_config(path, list(settings))
        folder = tmp_path / output
        return train.train(config, folder, command="sattn train", resume=resume, cache=tmp_path / "data")

    return run


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    """Drawing takes longer than such a run."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(callbacks, "plot_training", lambda *_: None)


@pytest.fixture(scope="module")
def unbroken(config_in, tmp_path_factory):
    """The output of a run from beginning to end."""
    folder = tmp_path_factory.mktemp("unbroken")
    train.train(read_config(config_in(folder), []), folder / "run", command="")
    return folder / "run"


@pytest.fixture
def at_step(monkeypatch):
    """at_step(n, act, patched): call `act` when n optimizer steps are done, before anything is logged or saved."""

    def at_step(step, act, patched=monkeypatch):
        original = train.StopOnSignal.on_step_end

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                act()
            original(self, args, state, control, **kwargs)

        patched.setattr(train.StopOnSignal, "on_step_end", on_step_end)

    return at_step


def lines(folder, *names):
    return [tuple(entry[name] for name in names) for entry in LossLog(folder / "loss.jsonl").entries()]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same_run(one, other):
    names = ("step", "tokens", "loss", "grad_norm", "learning_rate")
    assert lines(one, *names) == lines(other, *names)
    assert (one / "validation.jsonl").read_text() == (other / "validation.jsonl").read_text()
    ours, theirs = weights(one / "model"), weights(other / "model")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.filterwarnings("error")
def test_what_a_run_leaves_and_its_picture(run, tmp_path, capsys):
    outcome = run()
    folder = tmp_path / "run"
    assert (outcome.step, outcome.stopped_by, outcome.resumed_from) == (6, None, 0)
    steps = lines(folder, "step", "tokens", "learning_rate")
    assert [step for step, _, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert [tokens for _, tokens, _ in steps] == [96 * step for step in range(1, 7)]
    assert steps[0][2] == 0.0
    assert steps[2][2] == 0.01, "the learning rate is largest after the warm-up"
    assert [step_of(path) for path in complete(folder / "checkpoints")] == [4, 6]
    assert not (folder / "checkpoints" / "unfinished").exists()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = Record.load(folder / "record.json")
    assert record.config == yaml.safe_load((folder / "config.yaml").read_text())
    assert record.results["tokens"] == 576
    assert record.results["peak_flops_source"] == "given"
    assert [entry["step"] for entry in record.results["validation"]] == [2, 4, 6]
    assert "training: 100%" in capsys.readouterr().err

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.layer_attention == "gated"
    assert model.config.use_cache
    assert not list((folder / "model").glob("*.bin")), "nothing pickled"
    validation = record.results["validation"][-1]
    data = train.open_data(
        read_config(tmp_path / "config.yaml", []).data,
        tokenizer=tokenizer,
        sequence_length=24,
        seed=0,
        cache_dir=tmp_path / "data",
    )
    total = count = 0
    for row in data.validation:
        labels = row["labels"]
        logits = model(row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="none", ignore_index=-100)
        total, count = total + losses.sum().item(), count + (labels[1:] != -100).sum().item()
    assert validation["scored_tokens"] == count
    assert validation["loss"] == pytest.approx(total / count, rel=1e-5)


def test_every_optimizer_step_draws_its_own_permutations_and_validation_the_same(run, monkeypatch):
    seen = []
    make = AutoModelForCausalLM.from_config

    def watched(config):
        model = make(config)
        model.model.layers[1].self_attn.register_forward_pre_hook(
            lambda module, _, kwargs: seen.append((module.training, kwargs[STEP_ARGUMENT])), with_kwargs=True
        )
        return model

    monkeypatch.setattr(train.AutoModelForCausalLM, "from_config", watched)
    run("run", "training.micro_batch=2")
    assert [step for training, step in seen if training] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {step for training, step in seen if not training} == {0}


def test_micro_batches_change_no_more_than_rounding(run, unbroken, tmp_path):
    run("run", "training.micro_batch=1")
    whole, parts = (torch.tensor(lines(folder, "loss", "grad_norm")) for folder in (unbroken, tmp_path / "run"))
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("step", "number"), [(1, signal.SIGINT), (3, signal.SIGTERM), (5, signal.SIGINT)])
def test_a_stopped_run_goes_on_bit_for_bit(run, unbroken, at_step, tmp_path, step, number):
    with pytest.MonkeyPatch.context() as patched:
        at_step(step, lambda: os.kill(os.getpid(), number), patched)
        outcome = run()
    assert (outcome.step, outcome.stopped_by) == (step, number)
    assert not (tmp_path / "run" / "model").exists()
    assert run().resumed_from == step
    assert_same_run(unbroken, tmp_path / "run")


class Killed(BaseException):
    """The process is gone: nothing else may catch it."""


@pytest.mark.parametrize("point", ["while it writes", "before it is renamed", "while older ones are removed"])
def test_a_run_killed_in_a_save_goes_on_bit_for_bit(run, unbroken, tmp_path, point):
    module, name, at_least = {
        "while it writes": (torch, "save", 1),
        "before it is renamed": (trainer, "finish", 1),
        "while older ones are removed": (checkpoints, "checkpoints", 2),
    }[point]
    original = getattr(module, name)
    folder = tmp_path / "run" / "checkpoints"

    def killed(*args):
        if len(list(folder.glob("checkpoint-*"))) < at_least:
            return original(*args)
        if point == "while it writes":
            Path(args[1]).write_bytes(b"half")
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, killed)
        with pytest.raises(Killed):
            run("run", "training.keep=1")
    assert run("run", "training.keep=1").resumed_from == 2 * at_least
    assert_same_run(unbroken, tmp_path / "run")
    assert [step_of(path) for path in complete(folder)] == [6]


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_goes_on(run, tmp_path):
    run()
    folder = tmp_path / "run"
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert run().resumed_from == 6
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    before = weights(folder / "model")
    (folder / "record.json").unlink()  # as if killed between the last checkpoint and the end
    shutil.rmtree(folder / "model")
    assert run().resumed_from == 6
    after = weights(folder / "model")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run("run", "training.steps=8", "training.save_every=3").resumed_from == 6
    assert [step for (step,) in lines(folder, "step")] == list(range(1, 9))
    assert [step_of(path) for path in complete(folder / "checkpoints")] == [6, 8]


def test_an_output_of_another_run_is_refused(run):
    run()
    with pytest.raises(ValueError, match=r"training.learning_rate was 0.01, now 0.02\); choose another output"):
        run("run", "training.learning_rate=0.02")
    with pytest.raises(ValueError, match="holds a run, which --no-resume must not touch"):
        run(resume=False)


@pytest.mark.parametrize("changed", ["text", "validation"])
def test_an_output_of_a_run_on_other_data_is_refused(run, tmp_path, changed):
    """Settings name files, which may have changed since."""
    text = tmp_path / "corpus.txt"
    held = tmp_path / "held.txt"
    held.write_text(text.read_text()[:900])
    run("run", f"data.validation={held}", "training.steps=2")
    file = text if changed == "text" else held
    whole = file.read_text()
    file.write_text(whole[1:])
    with pytest.raises(ValueError, match=f"was of other tokens: {file.name} or the tokenizer has changed since"):
        run("run", f"data.validation={held}")
    file.write_text(whole)
    assert run("run", f"data.validation={held}").resumed_from == 2


def test_a_data_set_that_runs_dry_is_told_before_the_first_step(run, tmp_path):
    with pytest.raises(DataExhausted, match=r"the data set holds .* tokens in 3 passes, 96000 were asked for"):
        run("run", "training.steps=1000")
    assert not (tmp_path / "run" / "loss.jsonl").exists()


def test_a_loss_that_is_no_number_stops_the_run_and_is_kept(run, at_step, tmp_path, monkeypatch):
    model = []
    make = AutoModelForCausalLM.from_config
    monkeypatch.setattr(
        train.AutoModelForCausalLM, "from_config", lambda config: model.append(make(config)) or model[-1]
    )

    def spoil():
        with torch.no_grad():
            model[-1].lm_head.weight[0, 0] = float("nan")

    at_step(3, spoil)
    with pytest.raises(NotFiniteError, match=r"loss is nan at step 4, on rows 12 to 15 .* newest checkpoint is .*-2;"):
        run("run", "training.eval_every=5")
    folder = tmp_path / "run"
    assert [step for (step,) in lines(folder, "step")] == [1, 2, 3]
    assert [step_of(path) for path in complete(folder / "checkpoints")] == [2]
    facts = json.loads((folder / "not-finite-4" / "facts.json").read_text())
    assert (facts["rows_of_training_data"], facts["resume_from"]) == ([12, 16], "checkpoint-2")
    assert load_file(folder / "not-finite-4" / "rows-of-process-0.safetensors")["input_ids"].shape == (4, 24)


def test_a_disk_without_room_is_told_before_a_checkpoint_is_begun(run, tmp_path, monkeypatch):
    run("run", "training.steps=2")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with pytest.raises(DiskFullError, match=r"bytes are needed, 5 are free; the last complete one is .*checkpoint-2"):
        run("run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("file write failed")])
def test_a_disk_that_fills_up_leaves_the_checkpoint_before(run, unbroken, tmp_path, error):
    original = torch.save

    def full(value, path, *args):
        original(value, path, *args)
        if "checkpoint-4" in str(path):
            raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(
            DiskFullError, match=r"no room for a checkpoint: .* the last complete one is .*checkpoint-2"
        ):
            run()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert run().resumed_from == 2
    assert_same_run(unbroken, tmp_path / "run")


def test_another_error_of_a_save_is_not_explained_away(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        run()


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize(
    ("setting", "tolerance"), [("training.gradient_checkpointing=true", 0.0), ("training.precision=bf16", 2e-2)]
)
def test_how_a_step_runs_changes_its_loss_by_rounding(run, unbroken, tmp_path, setting, tolerance):
    run("run", setting)
    plain, other = (torch.tensor(lines(folder, "loss")) for folder in (unbroken, tmp_path / "run"))
    torch.testing.assert_close(other, plain, rtol=tolerance, atol=tolerance)


def test_a_streamed_set_goes_on_where_it_was(config_file, tmp_path, at_step):
    documents = [{"text": "".join("abcd"[(i * k) % 4] for i in range(90 + k))} for k in range(60)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    dataset = {"name": "json", "files": [str(tmp_path / "set.jsonl")], "streaming": True}
    path = config_file(data={"text": None, "dataset": dataset, "validation": None}, training={"eval_every": None})
    config = read_config(path, [])

    def run(name):
        return train.train(config, tmp_path / name, command="", cache=tmp_path / "data")

    run("unbroken")
    with pytest.MonkeyPatch.context() as patched:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert run("broken").step == 3
    assert run("broken").resumed_from == 3
    assert lines(tmp_path / "unbroken", "step", "loss") == lines(tmp_path / "broken", "step", "loss")


@pytest.mark.parametrize("model_type", [*(family for family in FAMILIES if family != "gpt_oss"), "stochastic_llama"])
def test_packed_documents_do_not_see_each_other(config_file, bytes_tokenizer, model_type):
    """In the arguments that a step gives its model."""
    model = {"model_type": model_type}
    if model_type in FAMILIES:
        model |= {"layer_attention": "absent", "swa": "absent", "sa": "absent", "num_key_value_heads": 2}
        model |= EXPERTS.get(model_type, {})
    config = train.make_model_config(read_config(config_file(model=model), []), bytes_tokenizer)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(24)
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(10), torch.arange(14)])}
    other = row | {"input_ids": torch.cat([ids[:10].flip(0), ids[10:]])}
    logits = [network(**trainer.collate([given])).logits[0] for given in (row, other)]
    assert torch.equal(logits[0][10:], logits[1][10:])
    assert not torch.equal(logits[0][:10], logits[1][:10])


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"model_type": "llamas"}, "model.model_type must be a model type that transformers knows, got 'llamas'"),
        ({"model_type": "absent"}, "model.model_type must be a model type that transformers knows, got None"),
        ({"hidden_sizes": 3}, "model.hidden_sizes is no field of a stochastic_llama; it has"),
        ({"hidden_size": "big"}, "model: .*hidden_size"),
        ({"vocab_size": 20}, "model.vocab_size must be an integer >= 259, got 20"),
        ({"pad_token_id": 259}, r"model.pad_token_id must be an integer in \[0, 258\], got 259"),
        ({"max_position_embeddings": 20}, "model.max_position_embeddings must be an integer >= 24, got 20"),
        ({"layer_attention": "dense"}, "model: layer_attention must be one of"),
        ({"sa": {"window": 0}}, "model: sa must be arguments of Pattern.stochastic"),
        ({"model_type": "gpt2"}, "data.documents must be 'joined' with a gpt2"),
        ({"model_type": "gpt_oss"}, "data.documents must be 'joined' with a gpt_oss"),
    ],
)
def test_a_model_that_cannot_be_is_told_by_its_field(config_file, bytes_tokenizer, model, told):
    with pytest.raises(ValueError, match=told):
        train.make_model_config(read_config(config_file(model=model), []), bytes_tokenizer)


def test_the_vocabulary_holds_the_largest_token(config_file, bytes_tokenizer, monkeypatch):
    """Ids may have gaps."""
    vocabulary = bytes_tokenizer.get_vocab() | {"last": 299}
    monkeypatch.setattr(type(bytes_tokenizer), "get_vocab", lambda _: vocabulary)
    assert train.make_model_config(read_config(config_file(), []), bytes_tokenizer).vocab_size == 300


@pytest.mark.parametrize(
    ("parallel", "processes", "told"),
    [
        ("none", "2", "training.parallel must be 'ddp' or 'fsdp2' with 2 processes, got 'none'"),
        ("fsdp2", None, "training.parallel 'fsdp2' must be launched by torchrun, also for one process"),
        ("ddp", "3", "must be a multiple of the number of processes, got 3"),
    ],
)
def test_a_launch_that_is_not_what_was_asked_for_is_refused(run, tmp_path, monkeypatch, parallel, processes, told):
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(ValueError, match=told):
        run("run", f"training.parallel={parallel}")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_the_command_says_how_a_run_ended(config_file, at_step, tmp_path, capsys):
    command = ["train", "--config", str(config_file()), "--output", str(tmp_path / "run")]
    with pytest.MonkeyPatch.context() as patched:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert cli.main(command) == 128 + signal.SIGTERM
    error = capsys.readouterr().err
    assert "Stopped by SIGTERM after step 3" in error
    assert f"To resume: sattn train --config {tmp_path}/config.yaml" in error
    assert cli.main(command) == 0
    assert capsys.readouterr().out.endswith("model, record.json, loss.jsonl, loss.png\n")
    assert cli.main([*command, "--set", "training.steps=2000"]) == 1
    assert "sattn train: the data set holds" in capsys.readouterr().err
    assert cli.main([*command, "--output", str(tmp_path / "config.yaml")]) == 2
    assert "sattn train: output must be a folder to write into" in capsys.readouterr().err
    assert cli.main([*command, "--set", "training.sed=1"]) == 2
    assert "sattn train: training.sed is no setting" in capsys.readouterr().err

    prompt = ["--method", "full", "--prompt", "ab", "--max-new-tokens", "3", "--output", str(tmp_path / "text")]
    assert cli.main(["generate", "--model", str(tmp_path / "run" / "model"), *prompt]) == 0
    assert Record.load(tmp_path / "text" / "record.json").results["continuations"]
