"""Facts to find again in long text: one, one among others alike, a number, a chain of variables, many at once."""

from __future__ import annotations

import string
from typing import ClassVar

from .haystack import Draw, HaystackTask, Puzzle, Question

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Facts alike in the same text, one of which is asked for: the others' answers are its distractors.
_ALIKE = 4
_HOPS = 3
_PAIRS, _ASKED = 16, 8

_JOBS = (
    *("baker", "blacksmith", "bookbinder", "carpenter", "cobbler", "gardener", "glazier", "goldsmith", "locksmith"),
    *("mason", "miller", "plumber", "potter", "roofer", "saddler", "shepherd", "tailor", "tanner", "weaver"),
)
_TOWNS = (
    *("Aarhus", "Antwerp", "Bergen", "Bilbao", "Brno", "Cork", "Dresden", "Ghent", "Graz", "Kaunas", "Leeds"),
    *("Lyon", "Malmo", "Nantes", "Odessa", "Porto", "Riga", "Seville", "Tampere", "Turin", "Utrecht", "Zagreb"),
)
_THINGS = (
    *("banjo", "barometer", "blowtorch", "boomerang", "bulldozer", "catamaran", "chandelier", "chisel", "clarinet"),
    *("colander", "compass", "corkscrew", "crowbar", "dinghy", "frisbee", "gramophone", "hacksaw", "hammock"),
    *("harmonica", "harpsichord", "hatstand", "jigsaw", "kaleidoscope", "kayak", "lantern", "lawnmower", "mandolin"),
    *("metronome", "microscope", "motorcycle", "parachute", "periscope", "samovar", "saxophone", "screwdriver"),
    *("sextant", "skateboard", "snowboard", "stethoscope", "surfboard", "tambourine", "teapot", "telescope"),
    *("thermometer", "thimble", "toboggan", "tractor", "trampoline", "tricycle", "trombone", "typewriter"),
    *("wheelbarrow", "xylophone"),
)


def _owners(draw: Draw, count: int) -> list[str]:
    """The beginnings of `count` facts, "The potter from Ghent owns a", no job and no town twice."""
    jobs, towns = draw.random.sample(_JOBS, count), draw.random.sample(_TOWNS, count)
    return [f"The {job} from {town} owns a" for job, town in zip(jobs, towns, strict=True)]


class Needle(HaystackTask):
    """One fact, "The potter from Ghent owns a sextant.", at depths 0, 0.25, 0.5, 0.75 and 1 in turn.

    Asked at the end by its beginning; the alternatives are three things of its kind that the text does not name.
    """

    headline: ClassVar[str] = "acc"

    def _puzzle(self, index: int, draw: Draw) -> Puzzle:
        depth = DEPTHS[index % len(DEPTHS)]
        (owner,) = _owners(draw, 1)
        thing, *others = draw.words(_THINGS, _ALIKE)
        return Puzzle(
            ((depth, f"{owner} {thing}."),), (Question(owner, thing, f"depth={depth:.2f}"),), distractors=tuple(others)
        )


class MultiNeedle(HaystackTask):
    """Four facts as in `Needle`, at depths 0.1, 0.37, 0.63 and 0.9, each asked for in turn; the others distract."""

    headline: ClassVar[str] = "acc"

    def _puzzle(self, index: int, draw: Draw) -> Puzzle:
        owners, things = _owners(draw, _ALIKE), draw.words(_THINGS, _ALIKE)
        depths = [0.1 + 0.8 * place / (_ALIKE - 1) for place in range(_ALIKE)]
        facts = [(depth, f"{owner} {thing}.") for depth, owner, thing in zip(depths, owners, things, strict=True)]
        asked = index % _ALIKE
        question = Question(owners[asked], things.pop(asked), f"depth={depths[asked]:.2f}")
        return Puzzle(tuple(facts), (question,), distractors=tuple(things))


class Passkey(HaystackTask):
    """A number of five digits, "The pass key is 71432. Remember it.", at depths as in `Needle` (arXiv 2305.16300).

    Graded by greedy decoding of every digit. Unlike there, the text is real and names the number once.
    """

    def _puzzle(self, index: int, draw: Draw) -> Puzzle:
        depth = DEPTHS[index % len(DEPTHS)]
        (number,) = draw.numbers(1)
        question = Question("The pass key is", number, f"depth={depth:.2f}")
        return Puzzle(((depth, f"The pass key is {number}. Remember it."),), (question,))


class VariableTracking(HaystackTask):
    """Four chains of assignments, "VAR KDQXW = 71432.", "VAR BNRTZ = VAR KDQXW.", ..., three hops each, interleaved.

    After RULER (arXiv 2404.06654), but the question is for the value of one variable, 0 to 3 hops from it in turn, and
    the alternatives are the values of the other chains.
    """

    headline: ClassVar[str] = "acc"

    def _puzzle(self, index: int, draw: Draw) -> Puzzle:
        names = self._names(draw, _ALIKE * (_HOPS + 1))
        chains = [names[start::_ALIKE] for start in range(_ALIKE)]
        values = draw.numbers(_ALIKE)
        facts = []
        for chain, value in zip(chains, values, strict=True):
            depths = sorted(draw.random.uniform(0.0, 1.0) for _ in chain)
            assigned = [value, *(f"VAR {name}" for name in chain)]
            facts += [
                (depth, f"VAR {name} = {right}.") for depth, name, right in zip(depths, chain, assigned, strict=False)
            ]
        hops = index % (_HOPS + 1)
        asked = draw.random.randrange(_ALIKE)
        question = Question(f"The value of VAR {chains[asked][hops]} is", values.pop(asked), f"hops={hops}")
        return Puzzle(tuple(facts), (question,), distractors=tuple(values))

    def _names(self, draw: Draw, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = "".join(draw.random.sample(string.ascii_uppercase, 5))
            if name not in found:
                found.append(name)
        return found


class AssociativeRecall(HaystackTask):
    """Sixteen facts as in `Needle`, evenly over the text, of which eight are asked for one after the other.

    Multi-query associative recall (arXiv 2312.04927) in words. Graded by greedy decoding, by the quarter of the text
    that the fact stands in.
    """

    def _puzzle(self, index: int, draw: Draw) -> Puzzle:
        del index
        owners, things = _owners(draw, _PAIRS), draw.words(_THINGS, _PAIRS)
        depths = [(place + 0.5) / _PAIRS for place in range(_PAIRS)]
        facts = [(depth, f"{owner} {thing}.") for depth, owner, thing in zip(depths, owners, things, strict=True)]
        asked = draw.random.sample(range(_PAIRS), _ASKED)
        questions = [Question(owners[place], things[place], _quarter(depths[place])) for place in asked]
        return Puzzle(tuple(facts), tuple(questions))


def _quarter(depth: float) -> str:
    low = int(4 * depth) / 4
    return f"depth={low:.2f}-{low + 0.25:.2f}"
