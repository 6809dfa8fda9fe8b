"""LoRA adapters on a swapped model."""

import pytest
import torch
import transformers

from stochastic_attention import Pattern
from stochastic_attention.hf import RoutingStep, report, restore, set_step, swap
from stochastic_attention.hf.attend import STEP_ARGUMENT
from stochastic_attention.models import EMBEDDED, check_model, load_model

peft = pytest.importorskip("peft")

# peft asks a model by a name that newer transformers call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PATTERN = Pattern.stochastic(4)
TEXT = (
    "A lighthouse keeper counts the ships that pass at night. The first carries salt, the second carries letters, and "
    "the third carries nothing at all, yet it is the third that he writes down with the greatest care. When the fog "
    "comes he rings the bell four times, waits, and rings it four times more. In the morning he climbs the stairs, "
    "cleans the glass, winds the clock, and reads what he wrote: salt, letters, nothing; salt, letters, nothing. "
)


def lora(model, **arguments):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **arguments))


def fit(model, ids, steps, learning_rate):
    """The losses of `steps` steps of AdamW on one batch, a routing step each."""
    callback, state = RoutingStep(), transformers.TrainerState()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for state.global_step in range(steps):
        callback.on_step_begin(None, state, None, model=model)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    callback.on_step_end(None, state, None, model=model)
    return losses


def test_adapters_learn_and_the_model_does_not(make_model, ids):
    model = swap(make_model(), PATTERN)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = lora(model)
    losses = fit(adapted, ids, steps=30, learning_rate=1e-2)
    assert losses[-1] < losses[0] - 0.5
    after = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if ".lora_" not in name}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], p) for name, p in before.items())
    assert all(p.grad.isfinite().all() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end"])
def test_the_trainer_callback_finds_the_swapped_model(make_model, ids, event):
    model = swap(make_model(), PATTERN)
    adapted = lora(model)
    steps = []
    model.model.layers[0].register_forward_pre_hook(
        lambda *call: steps.append(call[2][STEP_ARGUMENT]), with_kwargs=True
    )
    getattr(RoutingStep(evaluation_step=7), event)(None, transformers.TrainerState(global_step=5), None, model=adapted)
    adapted(input_ids=ids)
    assert steps == [5 if event == "on_step_begin" else 7]


def test_a_fresh_adapter_changes_nothing_and_a_merged_one_stays(make_model, ids):
    def logits(model, step=0):
        set_step(plain, step)
        with torch.no_grad():
            return model(input_ids=ids).logits

    plain = swap(make_model(), PATTERN)
    expected = logits(plain)
    adapted = lora(plain)
    assert torch.equal(logits(adapted), expected)
    fit(adapted, ids, steps=5, learning_rate=1e-2)
    adapted.eval()
    trained = logits(adapted, 3)
    merged = adapted.merge_and_unload()
    assert [line.calls is not None for line in report(merged)] == [True] * 3
    torch.testing.assert_close(logits(merged, 3), trained, rtol=1e-4, atol=1e-4)
    assert (trained - logits(merged, 4)).abs().max() > 0.1
    restore(merged)


@pytest.mark.slow
def test_adapters_lower_the_loss_of_a_pretrained_model():
    try:
        check_model(EMBEDDED)
    except ValueError as missing:
        pytest.skip(str(missing))
    language = load_model()
    ids = language.tokenizer(TEXT, return_tensors="pt").input_ids[:, :96]
    model = swap(language.model, Pattern.stochastic(16, local=16, sinks=4))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = lora(model, r=4)
    losses = fit(adapted, ids, steps=12, learning_rate=2e-3)
    assert losses[-1] < 0.7 * losses[0]
