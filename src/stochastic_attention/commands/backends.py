"""List the backends and what each can take here."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Ask each backend's predicate about a whole text and a step of decoding of every kind, on every device here."""
    del args
    import torch

    from ..ops.backends import backend_names, unsupported
    from ..ops.call import Call
    from ..ops.layout import make_layout
    from ..ops.pattern import Pattern

    patterns = {
        "full": Pattern.full(),
        "local": Pattern.local(2),
        "stochastic, sequence": Pattern.stochastic(2),
        "stochastic, prefix": Pattern.stochastic(2, scope="prefix"),
        "union": Pattern.stochastic(2, local=2, sinks=1, correction=0.5),
        "moba": Pattern.moba(2, 2),
    }
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for dtype in ("float32", "bfloat16"):
            x = torch.zeros(1, 1, 4, 8, device=device, dtype=getattr(torch, dtype))
            for label, pattern in patterns.items():
                for use, first in (("whole", 0), ("decode", 3)):
                    places = torch.arange(first, 4, device=device)
                    layout = make_layout(None, places, batch=1, queries=len(places), keys=4, device=x.device)
                    call = Call.checked(x[:, :, first:], x, x, pattern, layout=layout, decode=use == "decode")
                    for backend in backend_names():
                        reason = unsupported(call, backend)
                        print(f"{device:<5} {dtype:<9} {label:<21} {use:<7} {backend:<10} {reason or 'yes'}")
    return 0
