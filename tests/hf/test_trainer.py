"""A swapped model under transformers' Trainer: which permutations a step draws, checkpointing, resuming, evaluation."""

from functools import partial

import pytest
import torch
import transformers

from stochastic_attention import Pattern
from stochastic_attention.hf import RoutingStep, configure, set_step, swap
from stochastic_attention.hf.attend import STEP_ARGUMENT

PATTERN = Pattern.stochastic(4)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
# Renamed inside the range of supported versions.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in transformers.TrainingArguments.__dataclass_fields__
)


class StopAt(transformers.TrainerCallback):
    """End a run early, as if it had been interrupted after a save."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
        control.should_training_stop = state.global_step == self.step


@pytest.fixture
def make_trainer(make_model, tmp_path):
    """make_trainer(model, routing, **arguments): 6 steps on 24 rows, the first 4 of which are also those evaluated."""
    rows = torch.randint(1, 64, (24, 21), generator=torch.Generator().manual_seed(2))
    dataset = [{"input_ids": row, "labels": row} for row in rows]

    def make(model=None, routing=None, callbacks=(), reentrant=None, **arguments):
        if reentrant is not None:
            arguments |= {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        return transformers.Trainer(
            model or swap(make_model(), PATTERN),
            transformers.TrainingArguments(**(defaults | arguments)),
            train_dataset=dataset,
            eval_dataset=dataset[:4],
            callbacks=[routing or RoutingStep(), *callbacks],
        )

    return make


def losses(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def steps_seen(model):
    """A list that fills with (training or not, step) at each call of the first layer."""
    seen = []
    layer = next(m for m in model.modules() if hasattr(m, "layer_idx"))
    layer.register_forward_pre_hook(
        lambda m, _, kwargs: seen.append((m.training, kwargs[STEP_ARGUMENT])), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("evaluation_step", [0, 9])
def test_the_step_is_the_number_of_optimizer_steps_done(make_trainer, micro_batches, evaluation_step):
    trainer = make_trainer(
        routing=RoutingStep(evaluation_step),
        max_steps=4,
        gradient_accumulation_steps=micro_batches,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    seen = steps_seen(trainer.model)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    evaluated = [(False, evaluation_step)]
    first, second = ([(True, step) for step in pair for _ in range(micro_batches)] for pair in ([0, 1], [2, 3]))
    assert seen == evaluated * 2 + first + evaluated + second + evaluated * 2


def test_another_step_is_another_loss(make_model, make_trainer):
    """Without this, nothing below could tell one step from another."""
    frozen = make_trainer(swap(make_model(), PATTERN), learning_rate=0.0, max_steps=1)
    found = []
    for step in range(3):
        set_step(frozen.model, step)
        found.append(frozen.evaluate()["eval_loss"])
    assert len(set(found)) == 3


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_a_resumed_run_draws_what_the_unbroken_one_did(make_model, make_trainer, tmp_path, reentrant):
    how = {"reentrant": reentrant, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    unbroken = make_trainer(**how)
    unbroken.train()
    broken = make_trainer(**how, callbacks=[StopAt(3)], output_dir=str(tmp_path / "broken"))
    broken.train()
    assert broken.state.global_step == 3
    resumed = make_trainer(swap(make_model(), PATTERN), **how, output_dir=str(tmp_path / "broken"))
    seen = steps_seen(resumed.model)
    resumed.train(resume_from_checkpoint=True)
    assert sorted({step for training, step in seen if training}) == [3, 4, 5]
    assert losses(resumed) == losses(unbroken)
    assert len(losses(resumed)) == 6
    assert all(torch.equal(p, q) for p, q in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_loss(make_trainer, reentrant):
    plain, checkpointed = make_trainer(), make_trainer(reentrant=reentrant)
    seen = steps_seen(checkpointed.model)
    plain.train()
    checkpointed.train()
    assert len(seen) == 12, "every forward pass runs again in the backward pass"
    assert losses(checkpointed) == losses(plain)


def test_evaluation_leaves_the_draws_of_training_alone(make_trainer):
    plain = make_trainer()
    evaluated = make_trainer(eval_strategy="steps", eval_steps=1)
    for trainer in (plain, evaluated):
        trainer.train()
    assert losses(evaluated) == losses(plain)
    assert evaluated.evaluate()["eval_loss"] == losses(evaluated, "eval_loss")[5]


def test_evaluations_of_equal_weights_are_equal(make_trainer):
    trainer = make_trainer(learning_rate=0.0, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    trainer.train()
    assert len(losses(trainer, "eval_loss")) == 7
    assert len(set(losses(trainer, "eval_loss"))) == 1


@pytest.mark.parametrize(
    "wrap",
    [torch.nn.DataParallel, torch.nn.Sequential, partial(torch.compile, backend="eager")],
    ids=["DataParallel", "Sequential", "compile"],
)
def test_a_wrapped_model_is_driven(make_model, ids, wrap):
    model = swap(make_model(), PATTERN)
    seen = steps_seen(model)
    state = transformers.TrainerState(global_step=5)
    RoutingStep().on_step_begin(None, state, None, model=wrap(model))
    model(ids)
    assert seen == [(False, 5)]


def test_a_model_built_as_a_swapped_one_is_driven(make_model, ids):
    config = configure(make_model().config, PATTERN)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="stochastic_attention")
    RoutingStep().on_step_begin(None, transformers.TrainerState(global_step=5), None, model=model)
    seen = steps_seen(model)
    model(ids)
    assert seen == [(True, 5)]


@pytest.mark.parametrize("late", [False, True], ids=["at construction", "added later"])
def test_a_model_that_is_not_swapped_raises(make_model, make_trainer, late):
    plain = make_model()
    if not late:
        with pytest.raises(ValueError, match="must have been swapped"):
            make_trainer(plain)
        return
    trainer = make_trainer(plain, routing=transformers.TrainerCallback())
    trainer.add_callback(RoutingStep())
    with pytest.raises(ValueError, match="must have been swapped"):
        trainer.train()


def test_a_module_that_holds_no_model_raises():
    with pytest.raises(ValueError, match="got a Linear that is none and holds none"):
        RoutingStep().on_train_begin(None, transformers.TrainerState(), None, model=torch.nn.Linear(2, 2))


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, True, None, "0"])
def test_evaluation_steps_out_of_their_domain_raise(step):
    with pytest.raises(ValueError, match="evaluation_step must be an integer"):
        RoutingStep(evaluation_step=step)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_experts_see_equal_inputs_when_recomputed(make_model, make_trainer, reentrant):
    """A router amplifies the smallest difference of a recomputed input into another choice of experts."""
    model = swap(make_model("qwen3_moe", **MOE), PATTERN).to(torch.bfloat16)
    outputs = {layer.self_attn: [] for layer in model.model.layers}
    for attention in outputs:
        attention.register_forward_hook(lambda module, _, output: outputs[module].append(output[0].detach().clone()))
    trainer = make_trainer(model, reentrant=reentrant, max_steps=20, max_grad_norm=1.0, learning_rate=1e-3)
    trainer.train()
    norms = torch.tensor(losses(trainer, "grad_norm"))
    assert norms.isfinite().all()
    assert len(norms) == 20
    for found in outputs.values():
        assert len(found) == 40, "a forward pass and its recomputation, 20 times"
        assert all(torch.equal(found[i], found[i + 1]) for i in range(0, 40, 2))
        assert not torch.equal(found[0], found[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # asked for by torch's own tracing
def test_a_compiled_run_has_the_losses_of_an_eager_one(make_trainer):
    eager, compiled = make_trainer(), make_trainer(torch_compile=True, torch_compile_backend="eager")
    for trainer in (eager, compiled):
        trainer.train()
    assert losses(compiled) == losses(eager)
