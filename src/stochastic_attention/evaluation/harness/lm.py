"""lm-evaluation-harness on a swapped model: likelihoods that no padding enters, patterns, and a model that counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from ...hf import Preset
from ...hf.plan import native_windows
from ...ops.pattern import Pattern
from ..budget import sees_everything
from ..prefill import attending
from ..requests import Profile, Request, Score, profile
from ..scoring import score_requests
from .sharing import is_first, shared

Answer = TypeVar("Answer", Score, str)


class SwappedLM(HFLM):
    """The harness's `HFLM`, whose scores move with neither batch size nor order. Arguments: those of `HFLM`.

    Batch size "auto": rows whose tokens together are few enough for the CPU, or for a GPU's memory, where they are made
    half as many whenever it runs out.

    `HFLM` pads batches of loglikelihood requests at the right and tells the model nothing of it. That is harmless where
    a token's keys do not depend on what comes later, but scope "sequence" draws its permutation over the whole row:
    padding would take part. Here the attention mask goes along (`scoring.score_requests`), and the head runs on what is
    scored alone. Generation needs no such care: there `HFLM` passes its mask.

    Rolling texts begin with one beginning-of-sequence token, where a tokenizer that adds its own would give `HFLM` two,
    the second of which it scores.
    """

    def __init__(self, *arguments: Any, batch_size: int | str = 1, **options: Any) -> None:  # noqa: ANN401  # `HFLM`'s
        """Wrap a model. ValueError where its tokenizer marks neither the beginning nor the end of a text."""
        fixed: Any = {"batch_size": 1 if batch_size == "auto" else batch_size}
        super().__init__(*arguments, **fixed, **options)
        if self.prefix_token_id is None:  # type: ignore[attr-defined]
            raise ValueError(
                "model must have a tokenizer with a beginning-of-sequence or an end-of-sequence token, which stands "
                "before texts that have no context, got one with neither"
            )
        self._is_auto = batch_size == "auto"
        self._batch_tokens = 4096 if self.device.type == "cpu" else 65536  # type: ignore[attr-defined]

    def score(self, requests: Sequence[Request], on_batch: Callable[[int], object] | None = None) -> list[Score]:
        """The score of each request; the seam for what runs differently. Processes of a group share the work."""
        return shared(
            lambda share: self._score(share, on_batch), requests, together=lambda request: request.tokens[:-1]
        )

    def _score(self, requests: Sequence[Request], on_batch: Callable[[int], object] | None) -> list[Score]:
        def run(**batches: int) -> list[Score]:
            return score_requests(self.model, requests, on_batch=on_batch, **batches)  # type: ignore[arg-type]

        if not self._is_auto:
            return run(batch_rows=int(self.batch_size))  # type: ignore[attr-defined]
        longest = max((request.queries for request in requests), default=0)
        return self._fitting(lambda tokens: run(batch_tokens=tokens), longest)

    def _fitting(self, run: Callable[[int], list[Answer]], longest: int) -> list[Answer]:
        """What `run` gives with as many tokens a batch as memory holds, of one row of `longest` at the least."""
        while True:
            try:
                return run(self._batch_tokens)
            except torch.OutOfMemoryError:
                if self._batch_tokens <= longest:
                    raise
                self._batch_tokens //= 2
            torch.cuda.empty_cache()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log likelihood of each text, in windows of the model's length, as in `HFLM`."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),  # type: ignore[attr-defined]
                prefix_token=self.prefix_token_id,  # type: ignore[attr-defined]
                max_seq_len=self.max_length,  # type: ignore[attr-defined]
                context_len=1,
            )
            for window in map(utils.make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy or sampled text after each prompt, as in `HFLM`."""
        return shared(lambda share: self._write(share, disable_tqdm or not is_first()), requests)

    def _write(self, requests: Sequence[Instance], disable_tqdm: bool) -> list[str]:
        if self.eot_token_id is None:  # type: ignore[attr-defined]
            raise ValueError(
                "model must have a tokenizer with an end-of-sequence token to write until, got one without"
            )
        longest = max((sum(self._prompt(request)) for request in requests), default=1)

        def run(tokens: int) -> list[str]:
            if self._is_auto:
                self.batch_size_per_gpu = max(1, tokens // longest)  # type: ignore[attr-defined]
            return super(SwappedLM, self).generate_until(requests, disable_tqdm)  # type: ignore[misc]

        return self._fitting(run, longest) if self._is_auto else run(0)

    def _prompt(self, request: Instance) -> tuple[int, int]:
        """Tokens of the prompt, cut at the left so that what is asked for fits, and those asked for.

        Raises:
            ValueError: there is no room for a prompt.
        """
        arguments: Any = request.args
        asked: Any = normalize_gen_kwargs(arguments[1], self.max_gen_toks)  # type: ignore[attr-defined]
        room = self.max_length - asked["max_gen_toks"]  # type: ignore[attr-defined]
        if room < 1:
            raise ValueError(
                f"length must leave room for a prompt beside the {asked['max_gen_toks']} tokens that are asked for, "
                f"got {self.max_length}"  # type: ignore[attr-defined]
            )
        tokens, _ = self.tok_batch_encode([arguments[0]], left_truncate_len=room)  # type: ignore[attr-defined]
        return tokens.shape[1], asked["max_gen_toks"]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        assert override_bs is None  # `HFLM` asks for another batch size in its own rolling alone
        asked = [self._request(context, continuation) for _, context, continuation in requests]
        total = sum(request.queries for request in asked)
        hidden = disable_tqdm or not is_first()
        with tqdm(total=total, disable=hidden, desc="loglikelihood", unit="tok", unit_scale=True) as progress:
            return [(score.loglikelihood, score.is_greedy) for score in self.score(asked, progress.update)]

    def _request(self, context: Sequence[int], continuation: Sequence[int]) -> Request:
        """Cut at the left to the model's length; ValueError where an answer is empty, or would be cut itself."""
        if not 1 <= len(continuation) <= self.max_length:  # type: ignore[attr-defined]
            raise ValueError(
                f"an answer must have from 1 token to the length, {self.max_length}, "  # type: ignore[attr-defined]
                f"got one of {len(continuation)}"
            )
        most = self.max_length + 1  # type: ignore[attr-defined]  # the last token is not run
        return Request((*context, *continuation)[-most:], len(continuation))


class MethodLM(SwappedLM):
    """A plain model whose scores are those under `pattern`, which may be set anew; the model itself stays as it is.

    A request so short that the pattern and the model's own layers are full attention on it runs once, on the untouched
    model, for all patterns.
    Text is generated as in the paper: the pattern decides what a prompt's tokens see, and new ones see every key.
    """

    def __init__(self, attention_backend: str | None = None, **options: Any) -> None:  # noqa: ANN401  # of `HFLM`
        """Wrap a model; `attention_backend` runs the pattern, by default the fastest that can."""
        super().__init__(**options)
        self.pattern = Pattern.full()
        self._attention_backend = attention_backend
        windows = native_windows(self.model.config.get_text_config())  # type: ignore[attr-defined]
        self._native = min((window for window in windows if window is not None), default=math.inf)
        self._full: dict[Request, Score] = {}

    def score(self, requests: Sequence[Request], on_batch: Callable[[int], object] | None = None) -> list[Score]:
        """The score of each request under `pattern`."""
        lengths = {request.queries for request in requests}
        is_full = self.pattern == Pattern.full()
        whole = {n for n in lengths if is_full or (n <= self._native and sees_everything(self.pattern, n))}
        new = [request for request in dict.fromkeys(requests) if request.queries in whole and request not in self._full]
        self._full |= zip(new, super().score(new, on_batch), strict=True)
        swapped = [request for request in dict.fromkeys(requests) if request.queries not in whole]
        with attending(self.model, self.pattern, self._attention_backend):  # type: ignore[arg-type]
            scores = dict(zip(swapped, super().score(swapped, on_batch), strict=True))
        return [self._full[request] if request.queries in whole else scores[request] for request in requests]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each prompt, which is read under `pattern`."""
        pattern = self.pattern if self.pattern == Pattern.full() else Preset(self.pattern, "all", "full")
        with attending(self.model, pattern, self._attention_backend):  # type: ignore[arg-type]
            return super().generate_until(requests, disable_tqdm)


class CountingLM(SwappedLM):
    """A model that runs nothing, and counts how many tokens it would have run and scored.

    Of a prompt the last token is scored, which the text begins with.
    """

    lengths: Profile

    def score(self, requests: Sequence[Request], on_batch: Callable[[int], object] | None = None) -> list[Score]:
        """No score, but a count in `lengths`."""
        del on_batch
        self.lengths += profile(requests)
        return [Score((0.0,), (False,))] * len(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """No text, but a count in `lengths`."""
        del disable_tqdm
        self.lengths += Profile((self._prompt(request)[0], 1) for request in requests)
        return [""] * len(requests)
