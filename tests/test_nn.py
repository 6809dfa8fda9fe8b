"""The attention modules: against the op written out by hand, with caches, documents, rotary embedding, and refusals."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from stochastic_attention import Pattern, attention
from stochastic_attention.nn import GATE_BIAS, GatedStochasticAttention, KeyValueCache, StochasticAttention

PREFIX = Pattern.stochastic(3, scope="prefix")
LOCAL = Pattern.local(3)
E, H, HKV, D = 10, 4, 2, 6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def redraw(module):
    """Large weights, so that attention is far from uniform and gates are far from equal."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator(number), dtype=parameter.dtype) * 0.6)
    return module


def plain(pattern=PREFIX, **options):
    options = {"layer": 3, "num_kv_heads": HKV, "head_dim": D, "dtype": torch.float64} | options
    return redraw(StochasticAttention(E, H, pattern, **options))


def gated(pattern=PREFIX, local=LOCAL, **options):
    options = {"layer": 3, "num_kv_heads": HKV, "head_dim": D, "dtype": torch.float64} | options
    return redraw(GatedStochasticAttention(E, H, pattern, local, **options))


def hidden(tokens=11, rows=2, dtype=torch.float64):
    return torch.randn(rows, tokens, E, generator=generator(9), dtype=torch.float64).to(dtype)


def rotary(positions, size=D):
    angles = positions[..., None] / 100 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def by_hand(module, x, pattern, step=0, causal=True):
    """The heads' outputs [B, H, N, D], by the oracle."""
    q, k, v = (p(x).view(*x.shape[:2], -1, D).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    return attention(q, k, v, pattern, layer=module.layer, step=step, causal=causal, backend="reference")


@pytest.mark.parametrize("pattern", [PREFIX, Pattern.stochastic(3, shape="block"), LOCAL, Pattern.full()], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_module_is_projections_around_the_op(pattern, bias):
    module, x = plain(pattern, bias=bias), hidden()
    expected = module.o_proj(by_hand(module, x, pattern, step=5).transpose(1, 2).flatten(-2))
    assert_close(module(x, step=5), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_the_gated_sum_is_the_papers(gate):
    """Y = sigmoid(x W_sa + b_sa) * Y_sa + sigmoid(x W_swa + b_swa) * Y_swa, a gate a head or a channel."""
    module, x = gated(gate=gate), hidden()
    heads = torch.zeros(2, H, 11, D, dtype=torch.float64)
    for projection, pattern in ((module.gates.sa, PREFIX), (module.gates.swa, LOCAL)):
        gates = 1 / (1 + (-(x @ projection.weight.T + projection.bias)).exp())
        path = by_hand(module, x, pattern, step=2)
        for h in range(H):
            mine = gates[..., h : h + 1] if gate == "head" else gates[..., h * D : (h + 1) * D]
            heads[:, h] += mine * path[:, h]
    assert_close(module(x, step=2), module.o_proj(heads.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-10)


def test_gates_are_independent_and_start_open():
    module = GatedStochasticAttention(E, H, PREFIX, LOCAL, layer=0, head_dim=D)
    g_sa, g_swa = module.gates(torch.zeros(1, 2, E))
    assert g_sa.shape == g_swa.shape == (1, H, 2, 1)
    assert_close(g_sa, torch.full_like(g_sa, 1 / (1 + math.exp(-GATE_BIAS))))
    assert (g_swa > 0.5).all()
    with torch.no_grad():
        module.gates.sa.bias.fill_(-50)
    closed, open_still = module.gates(torch.zeros(1, 2, E))
    assert closed.max() < 1e-12
    assert torch.equal(open_still, g_swa)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_gradcheck_of_the_gated_sum(gate):
    """Of x and of every parameter: q, k, v, both gates, the output projection."""
    module, x = gated(gate=gate), hidden(9, 1).requires_grad_()
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("tokens", [1, 2, 11])
@pytest.mark.parametrize("window", [1, 3, 64])
def test_every_parameter_gets_a_gradient(tokens, window):
    module = gated(Pattern.stochastic(window), Pattern.local(window))
    module(hidden(tokens)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        alone = tokens == 1 or window == 1  # a softmax over one key does not depend on q and k
        assert alone or parameter.grad.abs().max() > 0, name
        assert "gates" not in name or parameter.grad.abs().max() > 0, name


def test_rotary_is_llamas():
    q = torch.randn(2, H, 11, D, generator=generator(), dtype=torch.float64)
    cos, sin = rotary(torch.arange(11.0, dtype=torch.float64).expand(2, -1))
    module = plain(Pattern.full())
    x = hidden()
    q, k, v = (p(x).view(2, 11, -1, D).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    expected = module.o_proj(attention(q, k, v, Pattern.full()).transpose(1, 2).flatten(-2))
    assert_close(module(x, rotary=(cos, sin)), expected, rtol=0, atol=1e-10)
    assert_close(module(x, rotary=(cos[0], sin[0])), expected, rtol=0, atol=1e-10)


def test_a_partial_rotary_leaves_the_other_channels():
    module, x = plain(Pattern.full()), hidden()
    cos, sin = rotary(torch.arange(11.0, dtype=torch.float64), size=4)
    none = torch.ones(11, 2, dtype=torch.float64), torch.zeros(11, 2, dtype=torch.float64)
    with torch.no_grad():  # what is not rotated is not read
        for projection in (module.q_proj, module.k_proj):
            projection.weight.view(-1, D, E)[:, :4] = 0
    assert_close(module(x, rotary=(cos, sin)), module(x), rtol=0, atol=1e-12)
    assert_close(module(x, rotary=none), module(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [plain, gated])
@pytest.mark.parametrize("sizes", [[1] * 11, [7, 1, 3], [10, 1]], ids=str)
def test_a_cache_changes_nothing(make, sizes):
    module, x, cache = make(), hidden(), KeyValueCache()
    cos, sin = rotary(torch.arange(11.0, dtype=torch.float64))
    found, start = [], 0
    for size in sizes:
        here = slice(start, start + size)
        found.append(module(x[:, here], rotary=(cos[here], sin[here]), cache=cache))
        start += size
    assert len(cache) == 11
    assert_close(torch.cat(found, 1), module(x, rotary=(cos, sin)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("make", [plain, gated])
def test_documents_and_padding_with_and_without_a_cache(make):
    module, x = make(), hidden(rows=1)
    documents = torch.tensor([[-1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    whole = module(x, documents=documents)
    assert_close(whole[:, 1:5], module(x[:, 1:5]), rtol=0, atol=1e-10)
    assert_close(whole[:, 5:], module(x[:, 5:]), rtol=0, atol=1e-10)
    cache = KeyValueCache()
    parts = [module(x[:, s], documents=documents[:, : s.stop], cache=cache) for s in (slice(0, 8), slice(8, 11))]
    assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


def test_layers_and_steps_draw_their_own_permutations():
    pattern, x = Pattern.stochastic(2), hidden()
    first, other_layer = plain(pattern), plain(pattern, layer=4)
    other_layer.load_state_dict(first.state_dict())
    assert torch.equal(first(x), first(x))
    assert not torch.allclose(first(x), other_layer(x))
    assert not torch.allclose(first(x), first(x, step=1))
    assert torch.equal(first(x, step=1), first(x, step=torch.tensor(1)))


@pytest.mark.parametrize("make", [plain, gated])
def test_not_causal(make):
    module, x = make(Pattern.stochastic(3), causal=False), hidden()
    changed = x.clone()
    changed[:, -1] += 1
    assert (module(changed) - module(x))[:, :-1].abs().max() > 1e-3
    if make is plain:
        expected = by_hand(module, x, module.pattern, causal=False)
        assert_close(module(x), module.o_proj(expected.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-10)


def test_modules_copy_save_and_print():
    module, x = gated(), hidden()
    again = gated()
    again.load_state_dict(module.state_dict())
    assert torch.equal(copy.deepcopy(module)(x), again(x))
    assert "stochastic(window=3, scope=prefix) + local(window=3), layer=3" in str(module)


def test_half_precision_and_autocast():
    module, x = gated(), hidden(dtype=torch.float32)
    expected = module(x.double())
    half = copy.deepcopy(module).bfloat16()(x.bfloat16())
    assert half.dtype is torch.bfloat16
    scale = expected.abs().max()
    assert (half - expected).abs().max() < 0.05 * scale
    single = copy.deepcopy(module).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = single(x, rotary=tuple(r.float() for r in rotary(torch.zeros(11, dtype=torch.float64))))
    assert (found - expected).abs().max() < 0.05 * scale


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
        ({"num_heads": True}, "num_heads must be an integer >= 1, got True"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
        ({"num_heads": 3}, "num_heads must divide hidden_size = 10 where head_dim is not given, got 3"),
        ({"head_dim": 0}, "head_dim must be an integer >= 1, got 0"),
        ({"layer": -1}, "layer must be an integer >= 0, got -1"),
        ({"pattern": "sa"}, "pattern must be a Pattern, got str"),
        ({"local": 3}, "local must be a Pattern, got int"),
        ({"gate": "token"}, "gate must be one of 'head', 'channel', got 'token'"),
        ({"backend": "fast"}, "backend must be one of"),
        ({"causal": False}, 'causal=False needs scope="sequence"'),
        ({"causal": 1}, "causal must be True or False, got 1"),
    ],
)
def test_construction_refuses(options, message):
    head_dim = {} if options == {"num_heads": 3} else {"head_dim": D}
    defaults = {"hidden_size": E, "num_heads": H, "pattern": PREFIX, "local": LOCAL, "layer": 0, **head_dim}
    with pytest.raises(ValueError, match=message):
        GatedStochasticAttention(**(defaults | options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"x": torch.zeros(2, 3)}, r"x must have shape \[B, N, 10\], got \[2, 3\]"),
        ({"rotary": (torch.zeros(5, D), torch.zeros(5, D))}, r"rotary must be cos and sin of one shape .* N = 11"),
        (
            {"rotary": (torch.zeros(3, 11, D), torch.zeros(3, 11, D))},
            r"B = 2, N = 11 .* got \[\[3, 11, 6\], \[3, 11, 6\]\]",
        ),
        ({"rotary": torch.zeros(11, D)}, "got Tensor"),
        ({"rotary": (torch.zeros(11, 3), torch.zeros(11, 3))}, "an even R <= 6"),
        ({"rotary": (torch.zeros(11, 8), torch.zeros(11, 8))}, "an even R <= 6"),
        ({"documents": torch.zeros(2, 12, dtype=torch.int64)}, "documents"),
        ({"step": -1}, "step"),
        ({"cache": []}, "cache must be a KeyValueCache, got list"),
    ],
)
def test_a_call_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        gated()(**({"x": hidden()} | call))


@pytest.mark.parametrize(
    ("layer", "call", "message"),
    [
        (4, {}, "cache must be the layer's own, got that of layer 3 in layer 4"),
        (3, {"x": hidden(rows=1)}, "x must have as many rows as the cache, 2, got 1"),
        (3, {"documents": torch.zeros(2, 4, dtype=torch.int64)}, "documents must have shape"),
    ],
)
def test_a_cache_stays_as_it_was_where_a_call_is_refused(layer, call, message):
    x, cache = hidden(), KeyValueCache()
    plain()(x[:, :7], cache=cache)
    with pytest.raises(ValueError, match=message):
        plain(layer=layer)(**({"x": x[:, 7:]} | call), cache=cache)
    assert len(cache) == 7
    assert_close(plain()(x[:, 7:], cache=cache), plain()(x)[:, 7:], rtol=0, atol=1e-10)


def test_a_cache_needs_causality():
    with pytest.raises(ValueError, match="cache must be None where causal=False"):
        plain(Pattern.stochastic(3), causal=False)(hidden(), cache=KeyValueCache())
