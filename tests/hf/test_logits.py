"""What a swapped model computes: the untouched model where the pattern is full, causal, and blind to padding."""

from functools import partial

import pytest
import torch
import transformers

from stochastic_attention import Pattern
from stochastic_attention.hf import swap

PADS = 5

# Rounding of float32 over three layers, logits of magnitude 10: softmaxes are summed in other orders.
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def padded(ids, pads, side, fill=0):
    """(ids, attention_mask) with `pads` padding tokens on one side of every row."""
    filler = torch.full((ids.shape[0], pads), fill)
    parts = [(filler, torch.zeros_like(filler)), (ids, torch.ones_like(ids))]
    if side == "right":
        parts.reverse()
    return tuple(torch.cat(x, dim=1) for x in zip(*parts, strict=True))


def real_part(x, pads, side):
    return x[:, pads:] if side == "left" else x[:, : x.shape[1] - pads]


def test_a_window_as_long_as_the_row_is_the_untouched_model(make_model, family, backend, native, ids):
    model = make_model(family, native)
    before = logits(model, ids)
    assert_close(logits(swap(model, Pattern.stochastic(ids.shape[1]), backend=backend), ids), before)


def changed(make_model, family, ids, **config):
    """How far logits of a swapped model move with its config."""
    found, expected = (logits(swap(make_model(family, **c), Pattern.stochastic(4), "all"), ids) for c in (config, {}))
    return (found - expected).abs().max()


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 80}),
        ("gemma3_text", {"query_pre_attn_scalar": 80}),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    ],
    ids=str,
)
def test_what_is_peculiar_to_a_family_reaches_a_swapped_layer(make_model, family, config, ids):
    assert changed(make_model, family, ids, **config) > 0.1


def test_learned_sinks_reach_a_swapped_layer(make_model, ids):
    model = swap(make_model("gpt_oss"), Pattern.stochastic(4), "all")
    before = logits(model, ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(10.0)
    assert (logits(model, ids) - before).abs().max() > 0.1


def test_a_short_window_is_not_the_untouched_model(make_model, family, backend, pattern, ids):
    model = make_model(family)
    before = logits(model, ids)
    assert (logits(swap(model, pattern, backend=backend), ids) - before).abs().max() > 0.1


def test_backends_agree(make_model, backend, pattern, ids):
    found, expected = (logits(swap(make_model(), pattern, backend=name), ids) for name in (backend, "reference"))
    assert_close(found, expected)


@pytest.mark.parametrize("pads", [0, PADS])
def test_a_changed_future_token_changes_no_earlier_logit(make_model, family, backend, pattern, ids, pads):
    model = swap(make_model(family), pattern, backend=backend)
    ids, mask = padded(ids, pads, "left")
    changed = ids.clone()
    changed[:, pads + 12] = ids[:, pads + 12] % 63 + 1
    before, after = logits(model, ids, attention_mask=mask), logits(model, changed, attention_mask=mask)
    # Which tokens choose a block decides how the work is grouped, hence the rounding of all of them.
    rounding = 1e-4 if pattern.kind == "moba" and backend != "reference" else 0
    assert (before - after)[:, pads : pads + 12].abs().max() <= rounding
    assert (before - after)[:, pads + 12].abs().max() > 0.01


@pytest.mark.parametrize("side", ["left", "right"])
def test_ids_under_padding_change_nothing(make_model, family, backend, pattern, ids, side):
    model = swap(make_model(family), pattern, backend=backend)
    found = []
    for fill in (0, 33):
        with_pads, mask = padded(ids, PADS, side, fill)
        found.append(logits(model, with_pads, attention_mask=mask))
        assert found[-1].isfinite().all()
    assert torch.equal(real_part(found[0], PADS, side), real_part(found[1], PADS, side))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_alone_equals_the_row_in_a_padded_batch(make_model, family, backend, pattern, ids, side):
    model = swap(make_model(family), pattern, backend=backend)
    rows = {pads: ids[:1, : ids.shape[1] - pads] for pads in (0, 1, 3, 17)}
    padded_rows = [padded(row, pads, side) for pads, row in rows.items()]
    batch, mask = (torch.cat(x) for x in zip(*padded_rows, strict=True))
    for found, (pads, row) in zip(logits(model, batch, attention_mask=mask), rows.items(), strict=True):
        assert_close(real_part(found[None], pads, side), logits(model, row))


packed_calls = pytest.mark.parametrize(
    "call",
    [{"use_cache": False}, {}, {"attention_mask": torch.ones(2, 21, dtype=torch.int64)}],
    ids=["no cache, no mask", "default cache", "mask of ones"],
)


@packed_calls
def test_packed_documents_are_separate(make_model, family, backend, pattern, ids, call):
    assert_separate(swap(make_model(family), pattern, "all", backend=backend), ids, **call)


@packed_calls
def test_packed_documents_are_separate_in_layers_left_alone(make_model, family, native, ids, call):
    """Where transformers lets them see each other: with a cache or a mask, and in gpt-oss always."""
    assert_separate(swap(make_model(family, native), Pattern.stochastic(4), [1]), ids, **call)


def test_packed_documents_are_separate_in_a_static_cache(make_model, native, ids, cache_name):
    model = swap(make_model("qwen3", native), Pattern.stochastic(4), [1])
    assert_separate(model, ids, **{cache_name: transformers.StaticCache(model.config, max_cache_len=30)})


def assert_separate(model, ids, **call):
    cut = 9
    position_ids = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None]
    packed = logits(model, ids, position_ids=position_ids, **call)
    assert_close(packed[:, :cut], logits(model, ids[:, :cut]))
    assert_close(packed[:, cut:], logits(model, ids[:, cut:]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_documents_beside_padding_are_separate(make_model, backend, pattern, ids, side):
    model = swap(make_model(), pattern, backend=backend)
    cut = 9
    with_pads, mask = padded(ids, PADS, side)
    position_ids, _ = padded(torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None], PADS, side, 1)
    packed = real_part(logits(model, with_pads, attention_mask=mask, position_ids=position_ids), PADS, side)
    assert_close(packed[:, :cut], logits(model, ids[:, :cut]))
    assert_close(packed[:, cut:], logits(model, ids[:, cut:]))


def test_a_row_of_padding_alone_is_finite(make_model, family, backend, pattern, ids):
    mask = torch.ones_like(ids)
    mask[0] = 0
    model = swap(make_model(family), pattern, backend=backend)
    found = model(ids, attention_mask=mask, output_hidden_states=True)
    assert all(h.isfinite().all() for h in found.hidden_states)
    assert_close(found.logits[1:], logits(model, ids[1:]))


def test_one_token(make_model, family, backend, pattern, ids):
    model = make_model(family)
    before = logits(model, ids[:, :1])
    assert_close(logits(swap(model, pattern, backend=backend), ids[:, :1]), before)


@pytest.mark.parametrize("use_mask", [False, True], ids=["unpadded", "left-padded"])
def test_generation_without_a_cache_equals_full_forward_passes(make_model, family, backend, ids, use_mask):
    model = swap(make_model(family), Pattern.stochastic(4), backend=backend)
    expected = ids[:1, :7]
    for _ in range(4):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    start, mask = padded(ids[:1, :7], PADS if use_mask else 0, "left")
    found = model.generate(start, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=False)
    assert found[:, start.shape[1] - 7 :].tolist() == expected.tolist()


def test_autocast_over_float32_weights(make_model, backend, pattern, ids):
    """QK-norm leaves queries and keys in float32 beside values in bfloat16."""
    model = swap(make_model("qwen3"), pattern, backend=backend)
    exact = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, ids)
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_global_random_state_is_neither_read_nor_written(make_model, backend, pattern, ids):
    model = swap(make_model(), pattern, backend=backend)
    state = torch.get_rng_state()
    first = logits(model, ids)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1234)
    assert torch.equal(logits(model, ids), first)
