"""lm-evaluation-harness on a swapped model: no score moves with the batch size or the order of the requests."""

import copy
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from stochastic_attention import Pattern
from stochastic_attention.hf import swap

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from stochastic_attention.evaluation.harness.lm import CountingLM, MethodLM, SwappedLM
from stochastic_attention.evaluation.prefill import attended
from stochastic_attention.evaluation.requests import Profile

SPECIAL = ["[pad]", "[end]", "[unknown]"]
WORDS = [f"w{index}" for index in range(61)]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LENGTHS = [(3, 2), (17, 4), (9, 1), (9, 3), (1, 6), (26, 2)]  # words of context, of continuation

PATTERNS = {
    "sequence": Pattern.stochastic(4),
    "block": Pattern.stochastic(4, shape="block"),
    "prefix": Pattern.stochastic(4, scope="prefix"),
    "union": Pattern.stochastic(4, local=3, sinks=1, correction=0.5),
    "local": Pattern.local(5, sinks=1),
}


@pytest.fixture(scope="module")
def words():
    """A tokenizer of one token a word."""
    vocab = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    by_word = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[2]))
    by_word.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_word, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[2]
    )


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0, bos_token_id=None, eos_token_id=1))


@pytest.fixture
def make_lm(plain, words):
    def make(pattern, batch_size, kind=SwappedLM, **arguments):
        model = swap(copy.deepcopy(plain), pattern)
        return kind(pretrained=model, tokenizer=words, batch_size=batch_size, **arguments)

    return make


@pytest.fixture
def make_method_lm(plain, words):
    def make(pattern, batch_size):
        lm = MethodLM(pretrained=copy.deepcopy(plain), tokenizer=words, batch_size=batch_size)
        lm.pattern = pattern
        return lm

    return make


@pytest.fixture
def requests(plain):
    """Six requests, the last words of every other one those that the model without a swap finds likeliest."""
    draw = random.Random(0)
    texts = []
    for index, (context, continuation) in enumerate(LENGTHS):
        tokens = [draw.randrange(3, 64) for _ in range(context)]
        for _ in range(continuation):
            with torch.no_grad():
                likeliest = int(plain.eval()(torch.tensor([tokens])).logits[0, -1, 3:].argmax()) + 3
            tokens.append(draw.randrange(3, 64) if index % 2 else likeliest)
        said = [WORDS[token - 3] for token in tokens]
        texts.append((" ".join(said[:context]), " " + " ".join(said[context:])))
    return texts


def instances(kind, arguments):
    return [Instance(kind, {}, request, index) for index, request in enumerate(arguments)]


def loglikelihoods(lm, requests):
    return lm.loglikelihood(instances("loglikelihood", requests), disable_tqdm=True)


def assert_equal_scores(found, expected):
    torch.testing.assert_close(
        torch.tensor([score for score, _ in found]), torch.tensor([score for score, _ in expected]), rtol=0, atol=1e-4
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_scores_move_with_neither_batch_size_nor_order(make_lm, requests, pattern):
    expected = [loglikelihoods(make_lm(pattern, 1), [request])[0] for request in requests]
    for batch_size in (1, 2, 5):
        assert_equal_scores(loglikelihoods(make_lm(pattern, batch_size), requests), expected)
        order = random.Random(batch_size).sample(range(len(requests)), len(requests))
        shuffled = loglikelihoods(make_lm(pattern, batch_size), [requests[index] for index in order])
        assert_equal_scores(shuffled, [expected[index] for index in order])


def test_scores_are_those_of_the_swapped_model(make_lm, plain, words, requests):
    model = swap(copy.deepcopy(plain).eval(), PATTERNS["sequence"])
    for request, (score, greedy) in zip(
        requests, loglikelihoods(make_lm(PATTERNS["sequence"], 3), requests), strict=True
    ):
        context, whole = (words(text, return_tensors="pt").input_ids for text in (request[0], "".join(request)))
        with torch.no_grad():
            logits = model(whole[:, :-1]).logits[0, context.shape[1] - 1 :]
        targets = whole[0, context.shape[1] :]
        assert score == pytest.approx(float(logits.log_softmax(-1).gather(-1, targets[:, None]).sum()), abs=1e-4)
        assert greedy == bool((logits.argmax(-1) == targets).all())


def test_rolling_scores_and_truncated_ones(make_lm, requests):
    """Texts longer than the model's positions: windows of one length, and contexts cut at the left."""
    texts = [(" ".join(WORDS[index : index + length]),) for index, length in [(0, 40), (5, 20), (9, 33)]]
    found = [
        make_lm(PATTERNS["sequence"], size, max_length=16).loglikelihood_rolling(
            instances("loglikelihood_rolling", texts), disable_tqdm=True
        )
        for size in (1, 4)
    ]
    torch.testing.assert_close(*map(torch.tensor, found), rtol=0, atol=1e-4)
    one, four = (loglikelihoods(make_lm(PATTERNS["sequence"], size, max_length=8), requests) for size in (1, 4))
    assert_equal_scores(four, one)


def test_a_tokenizer_that_begins_every_text_begins_it_once(plain, words):
    begun = copy.deepcopy(words)
    begun.bos_token = SPECIAL[1]
    begun.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)]
    )
    text = [(" ".join(WORDS[:9]),)]
    one, two = (SwappedLM(pretrained=copy.deepcopy(plain), tokenizer=tokenizer) for tokenizer in (words, begun))
    rolled = [lm.loglikelihood_rolling(instances("loglikelihood_rolling", text), True) for lm in (one, two)]
    assert rolled[0] == pytest.approx(rolled[1])
    (found,) = loglikelihoods(two, [("w1 w2", " w3")])
    (expected,) = loglikelihoods(one, [(f"{SPECIAL[1]} w1 w2", " w3")])
    assert found == pytest.approx(expected)
    assert found != pytest.approx(loglikelihoods(one, [("w1 w2", " w3")])[0])


def test_the_harness_alone_lets_padding_into_the_permutation(make_lm, requests):
    """Why SwappedLM is there, and where plain HFLM does as well."""
    for name, pattern in PATTERNS.items():
        one, five = (loglikelihoods(make_lm(pattern, size, kind=HFLM), requests) for size in (1, 5))
        moved = max(abs(a - b) for (a, _), (b, _) in zip(one, five, strict=True))
        assert moved > 0.01 if name in ("sequence", "block", "union") else moved < 1e-4
    one, five = (loglikelihoods(make_lm(PATTERNS["sequence"], size), requests) for size in (1, 5))
    assert_equal_scores(five, one)


@pytest.mark.parametrize("answer", ["", " w1 w2 w3 w4 w5 w6 w7 w8 w9"])
def test_answers_that_cannot_be_scored_are_refused(make_lm, answer):
    lm = make_lm(PATTERNS["local"], 1, max_length=8)
    with pytest.raises(
        ValueError, match=f"an answer must have from 1 token to the length, 8, got one of {len(answer.split())}"
    ):
        loglikelihoods(lm, [("w3 w4", answer)])


def test_a_process_group_of_the_caller_shares_nothing(make_lm, requests, monkeypatch):
    """As in an evaluation by one rank of a training run: an exchange would wait for the others forever."""
    expected = loglikelihoods(make_lm(PATTERNS["sequence"], 2), requests)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for name in ("get_rank", "get_world_size", "all_gather_object"):
        monkeypatch.setattr(f"torch.distributed.{name}", None)
    assert loglikelihoods(make_lm(PATTERNS["sequence"], 2), requests) == expected


def test_the_model_gets_the_batch_size_asked_for(make_lm):
    lm = make_lm(PATTERNS["sequence"], 2)
    shapes = []
    lm.model.register_forward_pre_hook(lambda *call: shapes.append(list(call[2]["input_ids"].shape)), with_kwargs=True)
    lengths = (7, 9, 5, 7, 5, 5, 7, 5, 9, 5)  # of distinct contexts
    loglikelihoods(lm, [(" ".join(WORDS[i : i + length]), " w1 w2") for i, length in enumerate(lengths)])
    assert shapes == [[2, 10], [2, 8], [2, 8], [2, 6], [2, 6]]


@pytest.mark.parametrize("pattern", [PATTERNS["sequence"], Pattern.full()], ids=["sequence", "full"])
def test_batches_are_made_smaller_until_they_fit(make_method_lm, pattern):
    """Memory that holds 40 tokens, for six requests of 15."""
    contexts = [" ".join(WORDS[index : index + 15]) for index in range(6)]
    asked = [(context, " w7") for context in contexts]
    prompts = instances("generate_until", [(context, {"until": [], "max_gen_toks": 8}) for context in contexts])
    two = make_method_lm(pattern, 2)
    sizes, most = [], 40

    def fits(*call):
        sizes.append(call[-1]["input_ids"].numel())
        if sizes[-1] > most:
            raise torch.OutOfMemoryError

    def limited():
        sizes.clear()
        lm = make_method_lm(pattern, "auto")
        lm.model.register_forward_pre_hook(fits, with_kwargs=True)
        return lm

    lm = limited()
    assert_equal_scores(loglikelihoods(lm, asked), loglikelihoods(two, asked))
    assert (sizes[0], sizes[-3:]) == (90, [30, 30, 30])
    most = 14
    with pytest.raises(torch.OutOfMemoryError):
        loglikelihoods(lm, [(contexts[0], " w8")])
    most = 40
    assert limited().generate_until(prompts, disable_tqdm=True) == two.generate_until(prompts, disable_tqdm=True)
    assert sizes[0] == 90
    assert most >= sizes[-1]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_generation_moves_not_with_the_batch_size(make_lm, requests, pattern):
    prompts = instances("generate_until", [(context, {"until": [], "max_gen_toks": 8}) for context, _ in requests[:2]])
    one, two = (make_lm(pattern, size).generate_until(prompts, disable_tqdm=True) for size in (1, 2))
    assert one == two
    assert min(len(text.split()) for text in one) > 1


@pytest.mark.parametrize("pattern", [*PATTERNS.values(), Pattern.moba(block_size=4, top_k=2)], ids=[*PATTERNS, "moba"])
def test_a_method_reads_the_prompt_and_new_tokens_see_every_key(make_method_lm, plain, words, requests, pattern):
    prompts = instances("generate_until", [(context, {"until": [], "max_gen_toks": 6}) for context, _ in requests[:3]])
    one, three = (make_method_lm(pattern, size).generate_until(prompts, disable_tqdm=True) for size in (1, 3))
    assert one == three
    model = swap(copy.deepcopy(plain).eval(), pattern, "all", "full")
    for prompt, text in zip(prompts, one, strict=True):
        ids = words(prompt.args[0], return_tensors="pt").input_ids
        said = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert text == words.decode(said, skip_special_tokens=True)


@pytest.mark.parametrize("pattern", [Pattern.local(64), Pattern.full()], ids=["local", "full"])
def test_a_model_that_slides_itself_is_not_taken_for_full_attention(words, requests, pattern):
    """A window as long as the text is another thing than the model's own; "full" is the model as it is."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8))
    lm = MethodLM(pretrained=copy.deepcopy(model), tokenizer=words, batch_size=3)
    lm.pattern = pattern
    known = model if pattern == Pattern.full() else swap(copy.deepcopy(model), pattern, "all")
    expected = loglikelihoods(SwappedLM(pretrained=known, tokenizer=words, batch_size=3), requests)
    assert_equal_scores(loglikelihoods(lm, requests), expected)
    native = [Pattern.local(8)] * 2
    assert attended(model, pattern) == (native if pattern == Pattern.full() else [pattern] * 2)


def test_a_prompt_counts_with_its_last_token(plain, words, requests):
    lm = CountingLM(pretrained=plain, tokenizer=words, batch_size=1, max_length=20)
    lm.lengths = Profile()
    options = {"until": [], "max_gen_toks": 6}
    lm.generate_until(instances("generate_until", [(context, options) for context, _ in requests]))
    assert lm.lengths == Profile({(3, 1): 1, (14, 1): 2, (9, 1): 2, (1, 1): 1})
    with pytest.raises(ValueError, match=r"length must leave room for a prompt beside the 20 tokens .*, got 20"):
        lm.generate_until(instances("generate_until", [("w1", {"until": [], "max_gen_toks": 20})]))


def test_the_mask_of_a_padded_prompt_reaches_the_op(make_lm, requests):
    lm = make_lm(PATTERNS["sequence"], 2)
    seen = []
    attention = lm.model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda *call: seen.append(call[2]["attention_mask"].real), with_kwargs=True)
    prompts = [(context, {"until": [], "max_gen_toks": 1}) for context, _ in requests[:2]]
    lm.generate_until(instances("generate_until", prompts), disable_tqdm=True)
    assert seen[0].sum(-1).tolist() == [17, 3]
    assert not seen[0][1, :14].any()


def test_a_tokenizer_that_marks_no_end_is_named(plain, words):
    unmarked = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, pad_token=SPECIAL[0])
    with pytest.raises(ValueError, match="model must have a tokenizer with a beginning-of-sequence or an end"):
        SwappedLM(pretrained=plain, tokenizer=unmarked)
    unmarked.bos_token = SPECIAL[1]
    lm = SwappedLM(pretrained=plain, tokenizer=unmarked)
    with pytest.raises(ValueError, match="model must have a tokenizer with an end-of-sequence token to write until"):
        lm.generate_until(instances("generate_until", [("w1", {"until": [], "max_gen_toks": 2})]))
