"""Gradients through a swapped model, with and without activation checkpointing."""

from functools import partial

import pytest
import torch

from stochastic_attention import Pattern
from stochastic_attention.hf import set_step, swap

PATTERN = Pattern.stochastic(4, scope="prefix")
# Rounding of float32 over three layers, some of experts, gradients of magnitude 1.
assert_close = partial(torch.testing.assert_close, rtol=1e-3, atol=5e-5)
POSITIONS = torch.cat([torch.arange(9), torch.arange(12)])[None]
MASK = torch.ones(2, 21, dtype=torch.int64)
MASK[1, :5] = 0


def gradients(model, ids, call, next_step=None):
    loss = model(ids, labels=ids, **call).loss
    if next_step is not None:
        set_step(model, next_step)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "one layer"])
@pytest.mark.parametrize(
    "call",
    [{}, {"attention_mask": MASK}, {"position_ids": POSITIONS, "use_cache": False}],
    ids=["plain", "padded", "packed"],
)
def test_checkpointing_changes_no_gradient(make_model, family, ids, reentrant, layers, call):
    plain, checkpointed = (swap(make_model(family), PATTERN, layers).train() for _ in range(2))
    # Renamed inside the range of supported versions.
    enable = getattr(checkpointed, "activation_checkpointing_enable", None)
    (enable or checkpointed.gradient_checkpointing_enable)({"use_reentrant": reentrant, "preserve_rng_state": False})
    for model in (plain, checkpointed):
        set_step(model, 5)
    expected = gradients(plain, ids, call)
    # The step of the next forward pass may be set before the backward that recomputes this one.
    found = gradients(checkpointed, ids, call, next_step=6)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in found.values())
    checkpointed.zero_grad()
    set_step(checkpointed, step := torch.tensor(5))
    loss = checkpointed(ids, labels=ids, **call).loss
    step += 1
    loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in checkpointed.named_parameters())


def test_steps_change_the_gradient(make_model, ids):
    model = swap(make_model(), PATTERN).train()
    first = gradients(model, ids, {})["model.layers.0.self_attn.q_proj.weight"].clone()
    model.zero_grad()
    set_step(model, 1)
    assert (gradients(model, ids, {})["model.layers.0.self_attn.q_proj.weight"] - first).abs().max() > 1e-4


def test_backends_agree_on_gradients(make_model, family, backend, ids):
    call = {"attention_mask": MASK}
    found, expected = (
        gradients(swap(make_model(family), PATTERN, backend=b), ids, call) for b in (backend, "reference")
    )
    for name, grad in expected.items():
        assert_close(found[name], grad)


def test_a_full_pattern_has_the_gradients_of_the_untouched_model(make_model, family, backend, ids):
    expected = gradients(make_model(family), ids, {})
    found = gradients(swap(make_model(family), Pattern.full(), backend=backend), ids, {})
    for name, grad in expected.items():
        assert_close(found[name], grad)
