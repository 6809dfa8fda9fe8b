"""Continue a prompt with a method at a budget, beside full attention: text, speed, and the keys read.

The text goes to standard output as it comes, the figures to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import asdict
from pathlib import Path

from . import make_folder, require
from .options import split_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="hub name, folder, .gguf file, or the embedded model"
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to continue")
    prompt.add_argument("--prompt-file", help="a UTF-8 file with the text to continue, as it stands; - is stdin")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    parser.add_argument("--method", default="union", help="as in compare; full is the model as it is")
    parser.add_argument(
        "--budget",
        type=int,
        help="mean keys of a new token in a swapped layer (with --decode full: of a token of the prompt); "
        "needed by every method but full",
    )
    parser.add_argument(
        "--decode",
        default="stochastic",
        help="what new tokens read: the method's keys, which the budget is of (stochastic), or all (full)",
    )
    parser.add_argument("--layers", default="all", help="to swap: all, sliding, full, 'every 4th', or indices: 0,3,5")
    parser.add_argument("--routing-seed", type=int, default=0, help="of methods with chance")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="where to stop at the latest")
    parser.add_argument("--eos", action=argparse.BooleanOptionalAction, default=True, help="stop at the end of text")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token, above 0 draws")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest tokens, up to this mass")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--no-full", action="store_true", help="leave out the run with full attention")
    parser.add_argument("--output", type=Path, help="folder for record.json; none by default")
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--dtype", default="float32", help="of the model: float32, bfloat16 or float16")
    parser.add_argument("--backend", help="of the op; by default the fastest that can")


def run(args: argparse.Namespace) -> int:
    """Continue by the method, then by full attention, and tell the figures of both."""
    require("transformers")
    import torch

    from .. import lm  # noqa: F401  # lets transformers load the models that `sattn train` makes
    from ..evaluation.generation import Attention, Sampling, agreeing_tokens, continue_prompt, encode_prompt, render
    from ..models import load_model
    from ..ops.validation import check_choice, check_device
    from ..records import Environment, Record

    attention = Attention(
        method=args.method,
        budget=args.budget,
        routing_seed=args.routing_seed,
        layers=split_layers(args.layers),
        decode=args.decode,
        backend=args.backend,
    )
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        eos=args.eos,
    )
    check_choice("dtype", args.dtype, ("float32", "bfloat16", "float16"))
    check_device(args.device)
    text = args.prompt if args.prompt is not None else read_text(args.prompt_file)

    if args.output is not None:
        make_folder(args.output)
    language = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    prompt = encode_prompt(language, text, chat=args.chat)
    found = [continue_prompt(language, prompt, attention, sampling, lambda new: print(new, end="", flush=True))]
    print(flush=True)
    if not (args.no_full or args.method == "full" or found[0].interrupted):
        found.append(continue_prompt(language, prompt, Attention(), sampling, lambda _: None))
    print(f"\n{render(found)}", file=sys.stderr)
    results: dict[str, object] = {"continuations": [asdict(continuation) for continuation in found]}
    if len(found) == 2:
        agreeing = agreeing_tokens(found[0].tokens, found[1].tokens)
        print(f"The two texts {agreement(agreeing, *(len(f.tokens) for f in found))}.", file=sys.stderr)
        results["agreeing_tokens"] = agreeing
    if args.output is not None:
        config = {key: value for key, value in vars(args).items() if key not in ("command", "command_line", "output")}
        config["prompt_digest"] = hashlib.sha256(repr(prompt).encode()).hexdigest()[:16]
        Record(args.command_line, config, Environment.current(), results).save(args.output / "record.json")
        print(f"Written: {args.output}/record.json", file=sys.stderr)
    if found[-1].interrupted:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


def agreement(agreeing: int, *lengths: int) -> str:
    """What two texts of so many tokens do that agree in so many of their first."""
    if set(lengths) == {agreeing}:
        return f"agree in all {agreeing} tokens"
    return f"agree up to token {agreeing}" if agreeing else "differ from the first token on"


def read_text(name: str) -> str:
    """The whole of a UTF-8 file, or of standard input where the name is "-"."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt_file must be a UTF-8 file that can be read, got {name!r}: {error}") from None


def split_layers(text: str) -> str | tuple[int, ...]:
    """Indices separated by commas, or a name that `swap` knows."""
    parts = split_list(text)
    return tuple(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else text
