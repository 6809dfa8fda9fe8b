"""Continue a prompt under a method: the text as it comes, the time that it takes, and the keys that it reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from transformers import GenerationConfig, PreTrainedModel, TextStreamer

from ..hf import Preset, restore, swap
from ..hf.plan import Decode, LayersSpec, has_own_plan, read
from ..hf.presets import native_patterns
from ..models import LanguageModel
from ..ops.backends import backend_names
from ..ops.keys_per_query import keys_per_query
from ..ops.pattern import Pattern
from ..ops.validation import check_choice, check_count, check_real
from .budget import expected_keys
from .methods import METHODS, PRESET, REFERENCE, preset_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# What a layer runs: one pattern, in a gated layer two.
_Paths = tuple[Pattern, ...]


@dataclass(frozen=True)
class Attention:
    """What the model attends by. Method "full" is the model as it is, and nothing else applies to it.

    Attributes:
        method: a name from `METHODS`, or "preset:FILE", which says all but the backend.
        budget: mean keys of a new token in a swapped layer. With decode "full", where new tokens read every key
            whatever the method, mean keys of a token of the prompt.
        routing_seed: of methods with chance.
        layers, decode: see `swap`.
        backend: see `attention`.
    """

    method: str = REFERENCE
    budget: int | None = None
    routing_seed: int = 0
    layers: LayersSpec = "all"
    decode: Decode = "stochastic"
    backend: str | None = None

    def __post_init__(self) -> None:
        """Check everything that needs no model."""
        if preset_of(self.method) is not None:
            _refuse(self, ("budget", "routing_seed", "layers", "decode"), "with a preset, which says it all")
            _check_backend(self.backend)
            return
        check_choice("method", self.method, (*METHODS, f"{PRESET}FILE"))
        if self.method == REFERENCE:
            _refuse(self, ("budget", "routing_seed", "layers", "decode", "backend"), "with method 'full'")
            return
        check_count("budget", self.budget, minimum=1)
        check_count("routing_seed", self.routing_seed, minimum=0, maximum=2**63 - 1)
        if not METHODS[self.method].is_random:
            _refuse(self, ("routing_seed",), f"with method {self.method!r}, which draws nothing")
        check_choice("decode", self.decode, get_args(Decode))
        _check_backend(self.backend)

    def preset(self, prompt: int, new: int) -> Preset | None:
        """What to swap in for `new` tokens behind `prompt` tokens, None for method "full"."""
        found = preset_of(self.method)
        if found is not None:
            return found
        pattern = self.fit(prompt, new)
        return None if pattern is None else Preset(pattern, self.layers, self.decode)

    def fit(self, prompt: int, new: int) -> Pattern | None:
        """The method's pattern nearest to the budget in expectation, for `new` tokens behind `prompt` tokens.

        None for method "full".
        """
        if self.budget is None:
            return None
        if self.decode == "full":
            position = torch.arange(prompt)
            length = torch.full_like(position, prompt)
        else:
            position = torch.arange(prompt, prompt + new)
            length = position + 1  # each is the newest token of its document
        method, budget = METHODS[self.method], self.budget
        nearest = min(
            method.candidates(int(length[-1])),
            key=lambda pattern: abs(float(expected_keys(pattern, position, length).mean()) - budget),
        )
        return nearest.seeded(self.routing_seed)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. A checkpoint's own settings are not used: they would differ from model to model.

    Attributes:
        max_new_tokens: where to stop at the latest.
        temperature: 0 takes the likeliest token; above, tokens are drawn from the logits divided by it.
        top_p: draw among the fewest likeliest tokens whose probabilities sum to it.
        seed: of the draw.
        eos: stop at the model's end of text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    eos: bool = True

    def __post_init__(self) -> None:
        """Check everything."""
        check_count("max_new_tokens", self.max_new_tokens, minimum=1)
        check_real("temperature", self.temperature, minimum=0.0)
        check_real("top_p", self.top_p, above=0.0)
        if self.top_p > 1:
            raise ValueError(f"top_p must be a probability, at most 1, got {self.top_p}")
        check_count("seed", self.seed, minimum=0, maximum=2**63 - 1)
        if not self.temperature:
            _refuse(self, ("top_p", "seed"), "with temperature 0, where nothing is drawn")

    def generation_config(self, own: GenerationConfig) -> GenerationConfig:
        """For a model whose `own` config knows its end of text."""
        drawing: dict[str, Any] = {}
        if self.temperature:
            drawing = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens, eos_token_id=own.eos_token_id if self.eos else None, **drawing
        )


def _check_backend(backend: str | None) -> None:
    if backend is not None:
        check_choice("backend", backend, backend_names())


def _refuse(settings: Attention | Sampling, names: Iterable[str], where: str) -> None:
    """Raise ValueError for a setting that has another value than its default where it would change nothing."""
    for name in names:
        value = getattr(settings, name)
        if value != type(settings).__dataclass_fields__[name].default:
            raise ValueError(f"{name} must not be given {where}, got {value!r}")


@dataclass(frozen=True)
class Continuation:
    """What came of a prompt.

    Attributes:
        method: its name.
        pattern: those that the layers ran, in words.
        prompt_tokens, new_tokens: how many.
        prefill_seconds: until the first new token came; None where none came.
        tokens_per_second: of the new tokens after the first; None where there is none.
        keys_of_prompt, keys_of_new: mean keys of a token of either kind over all layers of the model, swapped or not,
            both paths of a gated one together, counted for this very pattern and seed. The last new token counts,
            though nothing came after it.
        tokens, text: what is new.
        interrupted: by Ctrl-C.
    """

    method: str
    pattern: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float | None
    tokens_per_second: float | None
    keys_of_prompt: float
    keys_of_new: float | None
    tokens: list[int]
    text: str
    interrupted: bool


def encode_prompt(language: LanguageModel, text: str, *, chat: bool = False) -> list[int]:
    """The prompt's tokens, as the tokenizer begins a text; with `chat`, as a user's turn in its chat template."""
    tokenizer = language.tokenizer
    if chat and tokenizer.chat_template is None:
        raise ValueError("chat needs a tokenizer that has a chat template, and the model's has none")
    if chat:
        turn = [{"role": "user", "content": text}]
        encoded: Any = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)
    else:
        encoded = tokenizer(text, verbose=False)
    if not encoded["input_ids"]:
        raise ValueError("prompt must hold at least one token, got none")
    return encoded["input_ids"]


def continue_prompt(
    language: LanguageModel,
    prompt: Sequence[int],
    attention: Attention,
    sampling: Sampling,
    write: Callable[[str], object],
) -> Continuation:
    """Continue `prompt`, handing new text to `write` as it comes. Ctrl-C ends it with what has come so far.

    The model is left as it was found. A few tokens are run first that do not count, so that what a process does once
    is not in the times.

    Raises:
        ValueError: prompt and new tokens do not fit the model's positions, or the model cannot be swapped.
    """
    model, new = language.model, sampling.max_new_tokens
    if language.longest is not None and len(prompt) + new > language.longest:
        raise ValueError(
            f"prompt and max_new_tokens must fit the model's {language.longest} positions, got a prompt of "
            f"{len(prompt)} tokens and {new}"
        )
    preset = attention.preset(len(prompt), new)
    prompt_layers, new_layers = _layers(model, preset)

    ids = torch.tensor([prompt], device=model.device)
    first = ids[:, :8]
    stream = _Stream(language.tokenizer, write)
    interrupted, start = False, 0.0
    with (
        _attending(model, preset, attention.backend),
        _generating(model, sampling.generation_config(model.generation_config)),
        torch.random.fork_rng([model.device] if model.device.type == "cuda" else []),
    ):
        generate: Any = model.generate
        try:
            generate(first, attention_mask=torch.ones_like(first), max_new_tokens=2)
            torch.manual_seed(sampling.seed)
            start = time.perf_counter()
            generate(ids, attention_mask=torch.ones_like(ids), streamer=stream)
        except KeyboardInterrupt:
            interrupted = True
            stream.end()
    times, count = stream.times, len(stream.tokens)
    return Continuation(
        method=attention.method,
        pattern=", ".join(dict.fromkeys(" gated with ".join(map(str, paths)) for paths in prompt_layers)),
        prompt_tokens=len(prompt),
        new_tokens=count,
        prefill_seconds=times[0] - start if times else None,
        tokens_per_second=(count - 1) / (times[-1] - times[0]) if count > 1 else None,
        keys_of_prompt=_mean_keys(prompt_layers, len(prompt)),
        keys_of_new=_mean_keys(new_layers, len(prompt) + count, first=len(prompt)) if count else None,
        tokens=stream.tokens,
        text=stream.text,
        interrupted=interrupted,
    )


def agreeing_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two continuations have in common before they part."""
    parted = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(parted, min(len(first), len(second)))


def render(continuations: Sequence[Continuation]) -> str:
    """The figures of each continuation, a line each under a header."""
    header = ["method", "prompt", "new", "prefill s", "tokens/s", "keys/prompt token", "keys/new token", "pattern"]
    rows = [
        [
            c.method,
            str(c.prompt_tokens),
            str(c.new_tokens),
            _number(c.prefill_seconds, 2),
            _number(c.tokens_per_second, 1),
            _number(c.keys_of_prompt, 1),
            _number(c.keys_of_new, 1),
            c.pattern,
        ]
        for c in continuations
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    pad = [str.ljust, *[str.rjust] * (len(header) - 2), str.ljust]
    lines = (
        "  ".join(p(cell, width) for p, cell, width in zip(pad, row, widths, strict=True)) for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _layers(model: PreTrainedModel, preset: Preset | None) -> tuple[list[_Paths], list[_Paths]]:
    """What each layer of the model runs for the prompt's tokens, and for each new token."""
    config = model.config.get_text_config()
    plans = read(config).layers if has_own_plan(config) else {} if preset is None else preset.plans(config)
    native = [(pattern,) for pattern in native_patterns(config)]
    of_prompt = {i: plan.paths for i, plan in plans.items()}
    of_new = {
        i: (Pattern.full(), *plan.paths[1:]) if plan.decode == "full" else plan.paths for i, plan in plans.items()
    }
    return [of_prompt.get(i, x) for i, x in enumerate(native)], [of_new.get(i, x) for i, x in enumerate(native)]


def _mean_keys(layers: Sequence[_Paths], n: int, first: int | None = None) -> float:
    """Mean keys of the tokens 0 ... n - 1 as a prompt, or of `first` ... n - 1 as tokens that came one by one."""
    counts = [
        keys_per_query(pattern, n, layer=index, first=first or 0, decode=first is not None)
        for index, paths in enumerate(layers)
        for pattern in paths
    ]
    return float(torch.cat(counts).double().sum()) / (len(layers) * (n - (first or 0)))


@contextmanager
def _attending(model: PreTrainedModel, preset: Preset | None, backend: str | None) -> Iterator[None]:
    if preset is None:
        yield
        return
    swap(model, *preset, backend=backend)
    try:
        yield
    finally:
        restore(model)


@contextmanager
def _generating(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """`generate` by `config` alone. An argument would be completed from the checkpoint's own."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


class _Stream(TextStreamer):
    """Hands on the new text, and keeps it, its tokens, and when each token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text, self.tokens, self.times = "", list[int](), list[float]()
        self._write = write

    def put(self, value: Tensor) -> None:
        """Take the prompt, then each new token."""
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            self.tokens += value.tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take text that no further token changes."""
        del stream_end
        self.text += text
        self._write(text)
