#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prompts in the manner of RULER (Hsieh et al. 2024, arXiv 2404.06654) for `evaluate --prompts`.

python3 bench/ruler.py DIR --tokens 1000 --samples 20 --seed 1   writes DIR/TASK.jsonl of each task

The tasks are those that lm-evaluation-harness names niah_single_1, niah_multikey_2, niah_multikey_3, ruler_vt,
ruler_cwe and ruler_fwe, by their published definitions in words of our own: what is hidden, how often, what is asked
and how it is scored (`contains`). Lengths are about: a run of up to six letters, a digit and a sign count one token.
"""

import argparse
import json
import random
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOISE = "The meadow is green. The sea is blue. The moon is pale. On we walk. Back we come."


def tokens(text: str) -> int:
    return len(re.findall(r"[^\W\d_]{1,6}|\d|[^\w\s]|_", text))


def filled(most: int, make: Callable[[int], str]) -> str:
    """`make(n)` of the largest n that has no more than `most` tokens. Refused: where there is none."""
    least, above, held = 0, 1, 0
    while (size := tokens(make(above))) <= most:
        if size == held:
            raise ValueError(f"expected at most {size} tokens, for which there are words, got {most}")
        least, above, held = above, 2 * above, size
    if least == 0:
        raise ValueError(f"expected at least {size} tokens, got {most}")
    while above - least > 1:
        middle = (least + above) // 2
        least, above = (middle, above) if tokens(make(middle)) <= most else (least, middle)
    return make(least)


def hidden(draw: random.Random, lines: list[str], facts: list[str]) -> list[str]:
    """The facts, in their order, at random places between the lines."""
    places = sorted(draw.choices(range(len(lines) + 1), k=len(facts)))
    for place, fact in reversed(list(zip(places, facts))):
        lines = [*lines[:place], fact, *lines[place:]]
    return lines


def number_of(key: str, value: str) -> str:
    return f"The special number of {key} is: {value}."


def asked_number(key: str) -> str:
    return f"\nWhat is the special number of {key} in the text above?\nThe special number of {key} is:"


def niah_single_1(draw: random.Random, words: list[str], most: int) -> dict:
    """One word's number in sentences that repeat."""
    key, value, place = draw.choice(words), str(draw.randrange(1_000_000, 10_000_000)), draw.random()

    def text(n: int) -> str:
        lines = [NOISE] * n
        lines.insert(int(place * (n + 1)), number_of(key, value))
        return "A special number is hidden in this text. Remember it.\n" + "\n".join(lines)

    return {"context": filled(most, text), "question": asked_number(key), "answers": [value]}


def multikey(draw: random.Random, most: int, more: Iterator[tuple[str, str]]) -> dict:
    """Nothing but such facts; one of them is asked for."""
    pairs: list[tuple[str, str]] = []

    def text(n: int) -> str:
        pairs.extend(islice(more, max(0, n - len(pairs))))
        lines = [number_of(*p) for p in pairs[:n]]
        return "Special numbers are hidden in this text. Remember them.\n" + "\n".join(lines)

    context = filled(most, text)
    key, value = pairs[draw.randrange(context.count("\n"))]
    return {"context": context, "question": asked_number(key), "answers": [value]}


def niah_multikey_2(draw: random.Random, words: list[str], most: int) -> dict:
    """Keys are two words, values seven digits."""
    keys = [f"{a}-{b}" for a in words[::40] for b in words[1::40]]
    drawn = draw.sample(keys, min(4 * most, len(keys)))
    return multikey(draw, most, ((key, str(draw.randrange(1_000_000, 10_000_000))) for key in drawn))


def niah_multikey_3(draw: random.Random, _words: list[str], most: int) -> dict:
    """Keys and values are UUIDs."""

    def one() -> str:
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))

    return multikey(draw, most, ((one(), one()) for _ in repeat(0)))


def vt(draw: random.Random, _words: list[str], most: int) -> dict:
    """Variable tracking: one chain of four hops in sentences that repeat; all five names are wanted."""
    names = ["".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(5)]
    value, seed = str(draw.randrange(10_000, 100_000)), draw.random()
    facts = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:]))]

    def text(n: int) -> str:
        lines = hidden(random.Random(seed), [NOISE] * n, facts)
        return "Variables are assigned in this text. Keep track of them.\n" + "\n".join(lines)

    question = (
        f"\nWhich variables have the value {value}, directly or by other variables? There are 5 of them.\n"
        f"These variables have the value {value}:"
    )
    return {"context": filled(most, text), "question": question, "answers": names}


def counted(draw: random.Random, words: list[str], begin: str) -> str:
    draw.shuffle(words)
    return begin + " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def cwe(draw: random.Random, words: list[str], most: int) -> dict:
    """Ten words come thirty times each, all others three times."""
    chosen, seed = draw.sample(words, len(words)), draw.random()
    often = max(1, min(30, most // 60))  # of short texts less often

    def text(n: int) -> str:
        listed = chosen[:10] * often + chosen[10 : 10 + n] * max(1, often // 10)
        return counted(random.Random(seed), listed, "Remember which words of this list are most frequent.\n")

    question = "\nWhich are the 10 most frequent words of the list?\nThe 10 most frequent words are:"
    return {"context": filled(most, text), "question": question, "answers": chosen[:10]}


def fwe(draw: random.Random, _words: list[str], most: int) -> dict:
    """Coded words as often as rank^-2 says; the first are dots, the next three are wanted."""
    coded = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(50)]
    coded[0], seed = "...", draw.random()

    def text(n: int) -> str:
        listed = [word for rank, word in enumerate(coded, 1) for _ in range(round(n / rank**2))]
        random.Random(seed).shuffle(listed)
        return "Count how often each coded word of this text occurs; leave the dots out.\n" + " ".join(listed)

    question = "\nWhich are the three most frequent coded words?\nThe three most frequent coded words are:"
    return {"context": filled(most, text), "question": question, "answers": coded[1:4]}


def decoded(case: dict, first: int) -> dict:
    """The same with all but about `first` tokens of the context before the question, which `evaluate` decodes."""
    text, held = case["context"], tokens(case["context"])
    if not 0 < first < held:
        raise ValueError(f"expected --first of 1 to {held - 1} tokens, got {first}")
    at = text.find(" ", len(text) * first // held)
    if at < 0:
        raise ValueError(f"expected a blank behind token {first} of the context, got none")
    return {**case, "context": text[:at], "question": text[at:] + case["question"]}


TASKS = [niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1000, help="of a context, about")
    parser.add_argument("--first", type=int, help="about so many of them are the prompt, the rest is decoded; all")
    parser.add_argument("--samples", type=int, default=20, help="of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", type=Path, default=ROOT / "examples/models/held-out.txt", help="whose words are used")
    options = parser.parse_args()
    words = sorted(set(re.findall(r"\b[a-z]{5,8}\b", options.text.read_text())))
    options.folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        name = task.__name__
        draws = [random.Random(f"{options.seed} {name} {i}") for i in range(options.samples)]
        try:
            cases = [task(draw, words, options.tokens) for draw in draws]
            if options.first is not None:
                cases = [decoded(case, options.first) for case in cases]
        except ValueError as refusal:
            sys.exit(f"ruler.py: {name}: {refusal}")
        (options.folder / f"{name}.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))


if __name__ == "__main__":
    main()
