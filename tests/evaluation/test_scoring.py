import copy
import math

import pytest
import torch

from stochastic_attention.evaluation.requests import Request, profile
from stochastic_attention.evaluation.scoring import batches, score_requests
from stochastic_attention.evaluation.token_losses import token_losses

LENGTHS = [(49, 3), (53, 1), (50, 19), (45, 8), (58, 20), (2, 1)]


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(1)
    return [Request(tuple(torch.randint(256, (n,), generator=generator).tolist()), scored) for n, scored in LENGTHS]


@pytest.fixture(scope="module")
def naive(model, requests):
    """Each request alone, in full, without a mask."""
    results = []
    with torch.inference_mode():
        for request in requests:
            tokens = torch.tensor(request.tokens)[None]
            logs = model(tokens).logits[0, :-1].log_softmax(-1)[-request.scored :]
            targets = tokens[0, -request.scored :]
            results.append((logs.gather(-1, targets[:, None]).sum().item(), bool((logs.argmax(-1) == targets).all())))
    return results


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 2, 0, 5, 3, 1]], ids=["as given", "shuffled"])
def test_scores_move_with_neither_batch_size_nor_order(model, requests, naive, rows, order):
    scores = score_requests(model, [requests[index] for index in order], batch_tokens=57 * rows)
    for index, score in zip(order, scores, strict=True):
        assert score.loglikelihood == pytest.approx(naive[index][0], abs=1e-4)
        assert score.is_greedy == naive[index][1]


def test_greedy_continuations_are_recognised(model):
    tokens = [1, 2, 3]
    with torch.inference_mode():
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 256]
    scores = score_requests(model, [Request(tuple(tokens), 4), Request(tuple(other), 4)])
    assert [score.is_greedy for score in scores] == [True, False]


def test_a_model_that_gives_no_numbers_is_refused(model):
    """The likeliest of several NaN is the first one: an accuracy like any other."""
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[3, 0] = math.nan
    with pytest.raises(ValueError, match="must give a number for every token it scores, got NaN"):
        score_requests(broken, [Request((1, 2, 3), 1)])
    with pytest.raises(ValueError, match="must give a number for every token it scores, got NaN"):
        token_losses(broken, [[1, 2, 3]], batch_tokens=10, on_batch=lambda _: None)


def test_the_model_sees_a_mask_that_is_zero_at_padding(model, requests):
    seen = []

    def spy(_module, _args, kwargs):
        seen.append((kwargs["input_ids"], kwargs["attention_mask"]))

    handle = model.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        score_requests(model, requests, batch_tokens=10_000)
    finally:
        handle.remove()
    assert [len(tokens) for tokens, _ in seen] == [5, 1]
    lengths = [length for _, mask in seen for length in mask.sum(-1).tolist()]
    assert sorted(lengths) == sorted(request.queries for request in requests)
    for tokens, mask in seen:
        assert (mask[:, 1:] <= mask[:, :-1]).all()
        assert (tokens[mask == 0] == 0).all()


@pytest.mark.parametrize("limit", [1, 40, 64, 1000])
def test_batches_hold_every_request_once_within_the_limit(requests, limit):
    groups = list(batches(requests, limit))
    assert sorted(index for group in groups for index in group) == list(range(len(requests)))
    for group in groups:
        queries = [requests[index].queries for index in group]
        assert len(group) == 1 or len(group) * max(queries) <= limit
        assert min(queries) >= 0.75 * max(queries)


def test_progress_counts_each_real_token_once(model, requests):
    counted = []
    score_requests(model, requests, batch_tokens=64, on_batch=counted.append)
    assert sum(counted) == sum(request.queries for request in requests)
    assert len(counted) > 1


def test_profile_counts_queries_and_scored_queries(requests):
    assert profile([*requests, requests[0]])[(48, 3)] == 2


@pytest.mark.parametrize("scored", [0, 3, 4])
def test_a_request_needs_a_token_before_those_it_scores(scored):
    with pytest.raises(ValueError, match=r"scored must be in \[1, 2\]"):
        Request((1, 2, 3), scored)
