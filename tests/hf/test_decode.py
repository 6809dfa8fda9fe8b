"""Cached keys: decoding step by step, in chunks, in batches, by every strategy of `generate` and in every cache."""

from functools import partial

import pytest
import torch
import transformers

from stochastic_attention import Pattern, attention
from stochastic_attention.hf import swap

from .conftest import SLIDING_FAMILIES

# Their N(i) depends on i alone, not on how many tokens there are, so a cache must change nothing.
STABLE = (
    Pattern.stochastic(4, scope="prefix"),
    Pattern.stochastic(3, scope="prefix", shape="block", local=2, sinks=1, correction=0.5, per_head=True),
    Pattern.local(4, sinks=1),
    Pattern.bigbird(3, 1, local=2, sinks=1),
    Pattern.moba(block_size=4, top_k=2),
)
PREFIX = STABLE[0]
SEQUENCE = Pattern.stochastic(4)
# What decodes: the pattern, and what `decode` is set to.
DECODING = [
    (PREFIX, None),
    (SEQUENCE, "full"),
    (SEQUENCE, "stochastic"),
    (Pattern.stochastic(3, local=2, sinks=1), None),
]
decoding = pytest.mark.parametrize(("pattern", "decode"), DECODING, ids=lambda x: str(x))
stable = pytest.mark.parametrize("pattern", STABLE, ids=str)

# Rounding of float32 over three layers, logits of magnitude 10.
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def in_chunks(model, ids, sizes, name, cache=None, mask=None, position_ids=None):
    """Logits of `ids` fed chunk by chunk through a cache; the last size repeats."""
    found, start = [], 0
    while start < ids.shape[1]:
        size = sizes[min(len(found), len(sizes) - 1)]
        stop = min(start + size, ids.shape[1])
        given = {} if mask is None else {"attention_mask": mask[:, :stop]}
        if position_ids is not None:
            given["position_ids"] = position_ids[:, start:stop]
        if cache is not None:
            given[name] = cache
        out = model(ids[:, start:stop], use_cache=True, **given)
        cache = getattr(out, name)
        found.append(out.logits)
        start = stop
    return torch.cat(found, dim=1)


def greedy(model, ids, new=8, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize("sizes", [(3, 1), (4, 1), (5, 1), (11, 1), (5, 3), (1, 20), (1,)], ids=str)
@stable
def test_chunks_of_any_size_equal_one_pass(make_model, cache_name, pattern, ids, sizes):
    model = swap(make_model(), pattern)
    assert_close(in_chunks(model, ids, sizes, cache_name), logits(model, ids))


@pytest.mark.parametrize("layers", ["all", None, [1]], ids=str)
def test_a_cache_changes_nothing_in_any_family(make_model, cache_name, family, ids, layers):
    config = {"sliding_window": 5} if family in SLIDING_FAMILIES else {}
    model = swap(make_model(family, **config), PREFIX, layers)
    assert_close(in_chunks(model, ids, (6, 1, 1, 1, 3), cache_name), logits(model, ids))


@pytest.mark.parametrize("layers", [None, [0], [2]], ids=str)
@pytest.mark.parametrize("family", SLIDING_FAMILIES)
def test_a_native_window_said_as_a_pattern_decodes_as_the_untouched_model(make_model, cache_name, family, ids, layers):
    """Layers swapped and layers left alone hold different numbers of keys, and each gets a mask of its own."""
    untouched = make_model(family, sliding_window=5)
    model = swap(make_model(family, sliding_window=5), Pattern.local(5), layers)
    for sizes in ((3, 1), (8, 1), (5, 4)):
        assert_close(in_chunks(model, ids, sizes, cache_name), in_chunks(untouched, ids, sizes, cache_name))


@pytest.mark.parametrize("mask", [False, True], ids=["unpadded", "left-padded"])
def test_full_decoding_attends_to_every_cached_key(make_model, cache_name, family, ids, mask):
    """In a model of one layer, cached keys do not depend on what their queries saw."""
    config = {"sliding_window": 64} if family in SLIDING_FAMILIES else {}
    if "layer_types" in (make_model(family).config.to_dict() or {}) and make_model(family).config.layer_types:
        config["layer_types"] = ["full_attention"]
    config["num_hidden_layers"] = 1
    if family == "smollm3":
        config["no_rope_layers"] = [1]
    attention_mask = torch.ones_like(ids)
    if mask:
        attention_mask[1, :3] = 0
    expected = logits(make_model(family, **config), ids, attention_mask=attention_mask)
    model = swap(make_model(family, **config), SEQUENCE)
    found = in_chunks(model, ids, (6, 1, 1, 4, 1), cache_name, mask=attention_mask)
    assert_close(found[:, 6:], expected[:, 6:])
    assert (found[:, :6] - expected[:, :6]).abs().max() > 0.01


@pytest.mark.parametrize("pattern", [SEQUENCE, DECODING[-1][0]], ids=str)
def test_stochastic_decoding_is_the_last_row_of_the_pattern_on_each_prefix(make_model, cache_name, pattern, ids):
    model = swap(make_model(num_hidden_layers=1), pattern, decode="stochastic")
    found = in_chunks(model, ids, (6, 1, 1, 4, 1), cache_name)
    for position in range(6, ids.shape[1]):
        assert_close(found[:, position], logits(model, ids[:, : position + 1])[:, -1])


@decoding
def test_new_tokens_come_one_by_one_or_together(make_model, cache_name, pattern, decode, ids):
    model = swap(make_model(), pattern, decode=decode)
    one_by_one, together = (in_chunks(model, ids, sizes, cache_name) for sizes in ((6, 1), (6, 4, 7, 1)))
    assert_close(together, one_by_one)


@decoding
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_changed_future_token_changes_no_earlier_logit(make_model, cache_name, family, pattern, decode, static, ids):
    config = {"sliding_window": 5} if family in SLIDING_FAMILIES and not static else {}
    model = swap(make_model(family, **config), pattern, decode=decode)
    changed = ids.clone()
    changed[:, 12] = ids[:, 12] % 63 + 1
    found = []
    for tokens in (ids, changed):
        cache = transformers.StaticCache(config=model.config, max_cache_len=24) if static else None
        found.append(in_chunks(model, tokens, (6, 3, 1), cache_name, cache))
    assert torch.equal(found[0][:, :12], found[1][:, :12])
    assert (found[0][:, 12:] - found[1][:, 12:]).abs().max() > 0.01


@decoding
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_row_generates_alone_what_it_generates_in_a_batch(make_model, family, pattern, decode, implementation, ids):
    """Prompts shorter than the window, as long and longer, padded on the left."""
    model = swap(make_model(family), pattern, decode=decode)
    lengths = (2, 4, 5, 12)
    rows = torch.cat([ids, ids.flip(-1)])[:, :12]
    mask = torch.stack([torch.arange(12) >= 12 - n for n in lengths]).long()
    options = {"cache_implementation": implementation}
    batch = greedy(model, rows * mask, attention_mask=mask, **options)
    for row, n, found in zip(rows, lengths, batch, strict=True):
        assert found.tolist() == greedy(model, row[None, 12 - n :], **options)[0].tolist()


@decoding
def test_static_and_dynamic_caches_generate_the_same(make_model, family, pattern, decode, ids):
    config = {"sliding_window": 5} if family in SLIDING_FAMILIES else {}
    model = swap(make_model(family, **config), pattern, decode=decode)
    prompt = ids[:, :12]
    assert greedy(model, prompt, cache_implementation="static").tolist() == greedy(model, prompt).tolist()


@stable
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "top_k": 8},
        {"do_sample": True, "num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
    ],
    ids=["greedy", "beams", "sampling", "sampled beams", "several samples"],
)
def test_generation_strategies_do_not_see_the_cache(make_model, pattern, use_cache, options, ids):
    model = swap(make_model(), pattern)
    prompt = ids[:, :7]
    found = []
    for cached in (False, use_cache):
        torch.manual_seed(0)
        found.append(model.generate(prompt, max_new_tokens=9, use_cache=cached, **options).tolist())
    assert found[0] == found[1]


@stable
def test_assisted_decoding_equals_greedy(make_model, pattern, ids):
    model = swap(make_model(), pattern)
    prompt = ids[:1, :7]
    expected = greedy(model, prompt)
    assert greedy(model, prompt, assistant_model=make_model(num_hidden_layers=1)).tolist() == expected.tolist()
    assert greedy(model, prompt, assistant_model=model).tolist() == expected.tolist()
    assert greedy(model, prompt, prompt_lookup_num_tokens=2).tolist() == expected.tolist()


def crops_what_is_empty():
    try:
        transformers.cache_utils.DynamicLayer().crop(-1)
    except TypeError:
        return False
    return True


@stable
@pytest.mark.skipif(not crops_what_is_empty(), reason="this transformers crops no layer that a draft has not run")
def test_drafts_of_the_first_layers_equal_greedy(make_model, pattern, ids):
    model = swap(make_model(), pattern)
    prompt = ids[:1, :7]
    expected = greedy(model, prompt)
    assert greedy(model, prompt, assistant_early_exit=2).tolist() == expected.tolist()


@stable
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("size", [1, 3, 5, 12])
def test_chunked_prefill_equals_one_pass(make_model, pattern, implementation, size, ids):
    model = swap(make_model(), pattern)
    options = {"cache_implementation": implementation, "output_logits": True, "return_dict_in_generate": True}
    options |= {"max_new_tokens": 3, "do_sample": False}
    whole, chunked = (model.generate(ids[:, :12], prefill_chunk_size=n, **options) for n in (None, size))
    assert whole.sequences.tolist() == chunked.sequences.tolist()
    assert_close(torch.stack(chunked.logits), torch.stack(whole.logits))


@pytest.mark.parametrize("name", ["prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model"])
def test_first_calls_that_are_not_the_prompt_are_refused_where_it_is_permuted(make_model, name, ids):
    model = swap(make_model(), {0: PREFIX, 2: SEQUENCE})
    value = make_model() if name == "assistant_model" else 3
    with pytest.raises(NotImplementedError, match=f'{name} must not be used under scope "sequence"'):
        greedy(model, ids[:1], **{name: value})
    if name != "assistant_model":
        setattr(model.generation_config, name, value)
        with pytest.raises(NotImplementedError, match=f'{name} must not be used under scope "sequence"'):
            greedy(model, ids[:1])


@decoding
def test_a_conversation_continues_from_its_cache(make_model, cache_name, pattern, decode, ids):
    model = swap(make_model(), pattern, decode=decode)
    options = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 4}
    first = model.generate(ids[:, :7], **options)
    turn = torch.cat([first.sequences, ids[:, :5]], dim=1)
    cache = getattr(first, cache_name)
    held = cache.get_seq_length()
    second = model.generate(turn, **{cache_name: cache}, **options)
    if decode is None and pattern.scope == "prefix":
        assert second.sequences.tolist() == model.generate(turn, **options).sequences.tolist()
    fed = in_chunks(model, second.sequences[:, :-1], (7, 1, 1, 1, turn.shape[1] - held, 1), cache_name)
    assert second.sequences[:, turn.shape[1] :].tolist() == fed[:, turn.shape[1] - 1 :].argmax(-1).tolist()


@torch.no_grad()
def test_padding_between_a_prompt_and_what_follows(make_model, cache_name, ids):
    """A prompt padded on the right goes on behind its padding."""
    model = swap(make_model(), PREFIX)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 7:10] = 0
    cache = getattr(model(ids[:, :10], attention_mask=mask[:, :10]), cache_name)
    position_ids = mask.sum(-1, keepdim=True) - 1
    found = model(ids[:, 10:11], attention_mask=mask, position_ids=position_ids, **{cache_name: cache}).logits
    alone = torch.cat([ids[1:, :7], ids[1:, 10:11]], dim=1)
    assert_close(found[1, 0], logits(model, alone)[0, -1])
    assert_close(found[0, 0], logits(model, ids[:1, :11])[0, -1])


@torch.no_grad()
def test_a_mask_as_long_as_the_static_cache(make_model, cache_name, ids):
    model = swap(make_model(), PREFIX)
    cache = {cache_name: transformers.StaticCache(config=model.config, max_cache_len=24)}
    model(ids[:, :8], **cache)
    mask = (torch.arange(24) < 9).long().expand(2, -1)
    assert_close(model(ids[:, 8:9], attention_mask=mask, **cache).logits[:, 0], logits(model, ids)[:, 8])


def test_prompts_given_as_embeddings(make_model, ids):
    model = swap(make_model(), PREFIX)
    found = model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=8, do_sample=False)
    assert found.tolist() == greedy(model, ids).tolist()


@decoding
def test_a_packed_document_goes_on_alone(make_model, cache_name, pattern, decode, ids):
    """The second document of a packed row, decoded, sees nothing of the first."""
    model = swap(make_model(), pattern, decode=decode)
    cut = 9
    position_ids = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None].expand(2, -1)
    packed = in_chunks(model, ids, (15, 1, 3, 1), cache_name, position_ids=position_ids)
    alone = in_chunks(model, ids[:, cut:], (15 - cut, 1, 3, 1), cache_name)
    assert_close(packed[:, cut:], alone)


def test_documents_that_begin_behind_cached_ones(make_model, cache_name, ids):
    model = swap(make_model(), PREFIX)
    position_ids = torch.cat([torch.arange(9), torch.arange(4), torch.arange(8)])[None].expand(2, -1)
    found = in_chunks(model, ids, (9, 6, 1), cache_name, position_ids=position_ids)
    assert_close(found[:, 9:13], logits(model, ids[:, 9:13]))
    assert_close(found[:, 13:], logits(model, ids[:, 13:]))


@pytest.mark.parametrize("family", SLIDING_FAMILIES)
@pytest.mark.parametrize("layers", [None, "all", [0]], ids=str)
def test_caches_that_users_make(make_model, cache_name, family, layers, ids):
    model = swap(make_model(family, sliding_window=5), PREFIX, layers)
    expected = logits(model, ids)
    caches = [transformers.DynamicCache(config=model.config)]
    if family != "mistral":  # with full layers among its layers, a static cache says how long it is meant to be
        caches.append(transformers.StaticCache(config=model.config, max_cache_len=24))
    for cache in caches:
        assert_close(in_chunks(model, ids, (8, 1, 2, 1), cache_name, cache), expected)


def test_a_static_cache_of_unknown_length(make_model, cache_name, ids):
    model = swap(make_model("mistral", sliding_window=5), PREFIX)
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    with pytest.raises(
        ValueError, match="nothing says how many tokens a static cache must hold for the swapped layer 0"
    ):
        in_chunks(model, ids, (8, 1), cache_name, cache)


def test_a_cache_that_dropped_keys_before_the_swap(make_model, cache_name, ids):
    model = make_model("mistral", sliding_window=5)
    cache = transformers.DynamicCache(config=model.config)
    in_chunks(model, ids[:, :8], (8,), cache_name, cache)
    with pytest.raises(ValueError, match="the cache must be empty, or made for this swapped model: its layer 0"):
        in_chunks(swap(model, PREFIX), ids[:, 8:], (1,), cache_name, cache)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputed_layers_find_no_cached_keys(make_model, monkeypatch, family, reentrant, ids):
    """Checkpointing with use_cache left as it is: a layer run twice must not find its own keys of the first time."""
    model = swap(make_model(family, sliding_window=5), PREFIX, "all").train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    lengths = []

    def spy(q, k, *args, **kwargs):
        lengths.append((q.shape[2], k.shape[2]))
        return attention(q, k, *args, **kwargs)

    monkeypatch.setattr("stochastic_attention.hf.attend.attention", spy)
    model(ids, labels=ids).loss.backward()
    assert lengths == [(21, 21)] * 6


def test_steps_under_autocast(make_model, cache_name, ids):
    """QK-norm leaves keys in float32 beside values in bfloat16."""
    model = swap(make_model(), PREFIX)
    exact = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = in_chunks(model, ids, (6, 1), cache_name)
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


@decoding
def test_compiled_steps_with_a_static_cache(make_model, cache_name, pattern, decode, ids):
    """One graph serves every step, and gives what eager steps give."""
    model = swap(make_model(), pattern, decode=decode)
    expected = in_chunks(model, ids, (8, 1), cache_name)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    found = [in_chunks(model, ids[:, :8], (8,), cache_name, cache)]
    torch.compiler.reset()
    step = torch.compile(model, backend=count, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for at in range(8, ids.shape[1]):
            position_ids = torch.full((2, 1), at)
            found.append(step(ids[:, at : at + 1], position_ids=position_ids, **{cache_name: cache}).logits)
    assert_close(torch.cat(found, dim=1), expected)
    assert len(graphs) == 1
