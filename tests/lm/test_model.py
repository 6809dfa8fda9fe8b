"""The language model: its layers against a swapped Llama and the modules, caches, padding, packing, training, files."""

import inspect
import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

from stochastic_attention import Pattern
from stochastic_attention.hf import RoutingStep, configure, report, restore, set_step, swap
from stochastic_attention.lm import StochasticLlamaConfig, StochasticLlamaForCausalLM, StochasticLlamaModel
from stochastic_attention.nn import GATE_BIAS, GatedStochasticAttention

from .conftest import KINDS, MIXED, SIZES

SA = Pattern.stochastic(4, scope="prefix")
PATTERNS = {"full": Pattern.full(), "swa": Pattern.local(4), "sa": SA}
kinds = pytest.mark.parametrize("kind", [*KINDS, MIXED], ids=str)
# Renamed inside the range of supported versions.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

# Rounding of float32 over three layers, logits of magnitude 10.
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def logits(model, ids, **call):
    return model(ids, **({"use_cache": False} | call)).logits


@pytest.mark.parametrize("kind", PATTERNS)
def test_without_gates_it_is_a_swapped_llama(make_lm, make_llama, ids, kind):
    model, llama = make_lm(kind), make_llama()
    llama.load_state_dict(model.state_dict())  # the parameters, and their names, are Llama's own
    assert_close(logits(model, ids), logits(swap(llama, PATTERNS[kind], "all"), ids))
    if kind == "full":
        assert_close(logits(model, ids), logits(restore(llama), ids))


def test_a_gated_layer_is_the_module(make_lm):
    model = make_lm("gated", num_hidden_layers=1).double()
    attention = model.model.layers[0].self_attn
    module = GatedStochasticAttention(32, 4, SA, Pattern.local(4), layer=0, num_kv_heads=2, dtype=torch.float64)
    module.load_state_dict(attention.state_dict())
    x = torch.randn(2, 21, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotary = model.model.rotary_emb(x, torch.arange(21)[None])
    seen = []
    attention.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    attention.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"hidden_states": x}), with_kwargs=True)
    logits(model, torch.ones(2, 21, dtype=torch.int64), routing_step=7)
    torch.testing.assert_close(seen[0], module(x, rotary=rotary, step=7), rtol=0, atol=1e-10)


def test_closed_gates_leave_the_other_path(make_lm, ids):
    gated = make_lm("gated")
    for path, other in (("sa", "swa"), ("swa", "sa")):
        alone = make_lm(path)
        alone.load_state_dict(gated.state_dict(), strict=False)
        for layer in gated.model.layers:
            for name, bias in ((path, 50.0), (other, -50.0)):
                projection = getattr(layer.self_attn.gates, name)
                torch.nn.init.zeros_(projection.weight)
                torch.nn.init.constant_(projection.bias, bias)
        assert_close(logits(gated, ids), logits(alone, ids))


@kinds
def test_no_token_sees_the_future(make_lm, ids, kind):
    model, changed = make_lm(kind), ids.clone()
    changed[:, 15:] = ids[:, 15:] % 63 + 1
    assert torch.equal(logits(model, ids)[:, :15], logits(model, changed)[:, :15])
    assert not torch.allclose(logits(model, ids)[:, 15:], logits(model, changed)[:, 15:])


@kinds
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_generate_with_a_cache_equals_none(make_lm, ids, kind, options):
    model = make_lm(kind)
    expected = ids
    for _ in range(8):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    found = model.generate(ids, max_new_tokens=8, do_sample=False, disable_compile=True, **options)
    if "num_beams" in options:
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False, **options)
    assert torch.equal(found, expected)


@kinds
@pytest.mark.parametrize("sizes", [[1], [5], [12, 1, 8]], ids=str)
def test_chunks_through_a_cache_equal_one_pass(make_lm, ids, kind, sizes):
    model = make_lm(kind)
    found, start, cache = [], 0, {}
    while start < 21:
        stop = start + sizes[min(len(found), len(sizes) - 1)]
        out = model(ids[:, start:stop], use_cache=True, **cache)
        cache = {CACHE: getattr(out, CACHE)}
        found.append(out.logits)
        start = stop
    assert_close(torch.cat(found, 1), logits(model, ids))


@pytest.mark.parametrize("decode", ["stochastic", "full"])
@pytest.mark.parametrize("kind", ["sa", "gated"])
def test_what_a_decoded_token_sees_under_scope_sequence(make_lm, ids, kind, decode):
    """Every cached key in the stochastic path, or its N(i) as the newest token; its own window in the other path."""
    model = make_lm(kind, "sequence", decode=decode, num_hidden_layers=1)
    with torch.no_grad():
        cache = getattr(model(ids[:, :20], use_cache=True), CACHE)
        found = model(ids[:, 20:], **{CACHE: cache}).logits
    expected = make_lm(kind, "sequence", num_hidden_layers=1, sa={"window": 99 if decode == "full" else 4})
    assert_close(found, logits(expected, ids)[:, -1:])


@pytest.mark.parametrize("kind", ["gated", MIXED], ids=str)
def test_the_first_layers_run_alone(make_lm, ids, kind):
    """As in assisted decoding with an early exit."""
    model, first = make_lm(kind), make_lm("gated", num_hidden_layers=1)
    first.load_state_dict(model.state_dict(), strict=False)
    model.config.num_hidden_layers = 1
    assert torch.equal(logits(model, ids), logits(first, ids))


def test_generate_refuses_to_split_a_prompt_under_scope_sequence(make_lm, ids):
    with pytest.raises(NotImplementedError, match="prefill_chunk_size"):
        make_lm("gated", "sequence").generate(ids, max_new_tokens=2, prefill_chunk_size=4)
    assert make_lm("swa").generate(ids, max_new_tokens=2, prefill_chunk_size=4).shape == (2, 23)


@kinds
@pytest.mark.parametrize("scope", ["prefix", "sequence"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_alone_equals_the_row_in_a_batch(make_lm, ids, kind, scope, side):
    model = make_lm(kind, scope)
    real = slice(6, 21) if side == "left" else slice(0, 15)
    mask, padded = torch.zeros_like(ids), ids.clone()
    mask[0], mask[1, real] = 1, 1
    padded[1][mask[1] == 0] = 0
    found = logits(model, padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    assert_close(found[0:1], logits(model, ids[0:1]))
    assert_close(found[1:2, real], logits(model, ids[1:2, real]))


@kinds
@pytest.mark.parametrize("scope", ["prefix", "sequence"])
@pytest.mark.parametrize("call", [{}, {"use_cache": True}, {"attention_mask": torch.ones(1, 21)}], ids=str)
def test_packed_documents_do_not_see_each_other(make_lm, ids, kind, scope, call):
    """Layers of full attention too, and whatever else is said in the call."""
    model, row = make_lm(kind, scope), ids[:1]
    positions = torch.cat([torch.arange(9), torch.arange(12)])[None]
    found = logits(model, row, position_ids=positions, **call)
    for document in (slice(0, 9), slice(9, 21)):
        assert_close(found[:, document], logits(model, row[:, document]))


@kinds
def test_every_parameter_gets_a_gradient(make_lm, ids, kind):
    model = make_lm(kind).train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient(make_lm, ids, reentrant):
    found = []
    for checkpointed in (False, True):
        model = make_lm("gated", "sequence").train()
        if checkpointed:  # renamed inside the range of supported versions
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant, "preserve_rng_state": False})
        set_step(model, 5)
        loss = model(ids, labels=ids).loss
        set_step(model, 6)  # the recomputation sees the step of its own forward pass
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_step_moves_the_stochastic_path_alone(make_lm, ids):
    for kind in KINDS:
        model = make_lm(kind, "sequence")
        before = logits(model, ids)
        set_step(model, 3)
        after = logits(model, ids)
        assert torch.equal(before, after) == (kind in ("full", "swa"))
        assert torch.equal(after, logits(make_lm(kind, "sequence"), ids, routing_step=3))
        set_step(model, 0)
        assert torch.equal(before, logits(model, ids))


def test_the_trainer_moves_the_step(make_lm, ids, tmp_path):
    model, seen = make_lm("gated", "sequence"), []
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda m, _, k: seen.append((m.training, k["routing_step"])), with_kwargs=True)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[RoutingStep()])
    trainer.train()
    trainer.evaluate()
    assert seen == [(True, 0), (True, 1), (True, 2), (False, 0)]


@kinds
def test_it_saves_and_loads_by_the_auto_classes(make_lm, ids, kind, tmp_path):
    model = make_lm(kind, "sequence")
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is StochasticLlamaForCausalLM
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is StochasticLlamaModel
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert json.loads((tmp_path / "config.json").read_text())["layer_attention"] == kind
    assert AutoConfig.from_pretrained(tmp_path).attention_plan == model.config.attention_plan


def test_a_config_holds_what_json_does():
    """Also where a number comes from another library."""
    config = StochasticLlamaConfig(**SIZES, sa={"window": np.int64(4)})
    assert json.loads(config.to_json_string())["sa"] == {"window": 4}


def test_a_changed_config_is_followed(make_lm, ids):
    """Also after a call, as in transformers."""
    model = make_lm("sa")
    logits(model, ids)
    model.config.sa = {"window": 7}
    assert torch.equal(logits(model, ids), logits(make_lm("sa", sa={"window": 7}), ids))
    model.config.layer_attention = "gated"
    with pytest.raises(ValueError, match="path_gates must be given where a layer has two paths"):
        logits(model, ids)


def test_attention_weights_asked_for_by_the_config_are_refused(make_lm, ids):
    with pytest.raises(ValueError, match="output_attentions must be False"):
        make_lm(output_attentions=True)(ids)


def test_gates_start_open_and_alone_where_a_llama_is_loaded(make_llama, ids, tmp_path):
    """A pretrained Llama's weights under gated layers: the gates are new, and everything else is the Llama's."""
    llama = make_llama()
    llama.save_pretrained(tmp_path)
    config = StochasticLlamaConfig(**SIZES, swa={"window": 64}, sa={"window": 64})
    assert torch.equal(
        StochasticLlamaForCausalLM(config).model.layers[1].self_attn.gates.sa.bias.unique(), torch.ones(1)
    )
    model = StochasticLlamaForCausalLM.from_pretrained(tmp_path, config=config)
    for layer in model.model.layers:
        for projection in (layer.self_attn.gates.sa, layer.self_attn.gates.swa):
            assert (projection.bias == GATE_BIAS).all()
            assert 0 < projection.weight.abs().max() < 4
            torch.nn.init.zeros_(projection.weight)
            torch.nn.init.zeros_(projection.bias)
    # Half of each path, both of which see everything: the Llama itself.
    assert_close(logits(model, ids), logits(llama, ids))


# peft asks a model by a name that newer transformers call deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_trains_and_merges(make_lm, ids):
    peft = pytest.importorskip("peft")
    model = make_lm("gated")
    before = logits(model, ids)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM"))
    loss = tuned(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter -= 0.5 * parameter.grad
    expected = logits(tuned, ids)
    assert not torch.allclose(expected, before)
    assert_close(logits(tuned.merge_and_unload(), ids), expected)


def test_half_precision_and_autocast(make_lm, ids):
    expected = logits(make_lm(initializer_range=0.1), ids)
    scale = expected.abs().max()
    assert (logits(make_lm(initializer_range=0.1).bfloat16(), ids) - expected).abs().max() < 0.05 * scale
    with torch.autocast("cpu", torch.bfloat16):
        assert (logits(make_lm(initializer_range=0.1), ids) - expected).abs().max() < 0.05 * scale


def test_the_report_names_both_paths(make_lm, ids):
    model = make_lm(MIXED)
    logits(model, ids)
    set_step(model, 0)
    logits(model, ids)
    lines = report(model)
    assert [line.attention.removeprefix("stochastic_attention: ") for line in lines] == [
        "stochastic(window=4, scope=prefix) gated with local(window=4)",
        "full()",
        "stochastic(window=4, scope=prefix)",
    ]
    assert all(line.calls for line in lines)


def test_there_is_nothing_to_swap(make_lm):
    model = make_lm()
    for attempt in (
        lambda: swap(model, Pattern.full()),
        lambda: restore(model),
        lambda: configure(model.config, Pattern.full()),
    ):
        with pytest.raises(ValueError, match="cannot be swapped or restored"):
            attempt()
    with pytest.raises(
        ValueError, match="what a layer runs is in layer_attention, swa and sa of the config, got 'sdpa'"
    ):
        model.set_attn_implementation("sdpa")
    with pytest.raises(
        ValueError, match="what a layer runs is in layer_attention, swa and sa of the config, got 'eager'"
    ):
        AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_attention": "moba"}, "layer_attention must be one of 'full', 'swa', 'sa', 'gated', got 'moba'"),
        ({"layer_attention": ["sa", "swa"]}, "layer_attention must have one entry for each of 3 layers, got 2"),
        ({"layer_attention": None}, "layer_attention must be a kind of attention or a list of them, got None"),
        ({"sa": 4}, "sa must be arguments of Pattern.stochastic, got 4"),
        ({"gate": "token"}, "gate must be one of 'head', 'channel', got 'token'"),
        ({"decode": "none"}, "decode must be one of 'full', 'stochastic', got 'none'"),
        ({"sa": {"windows": 3}}, r"sa must be arguments of Pattern.stochastic, got \{'windows': 3\}"),
        ({"sa": {"window": 0}}, "window must be an integer"),
        ({"swa": {"window": 2.5}}, "swa must be arguments of Pattern.local"),
        ({"head_dim": 9}, "head_dim must be even, as rotary embeddings turn pairs, got 9"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0, which is all that the op has, got 0.1"),
    ],
)
def test_the_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        StochasticLlamaConfig(**(SIZES | options))
