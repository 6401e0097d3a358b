#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A fact in prose, asked in its own words and in others, for `evaluate --prompts`.

python3 bench/prose.py DIR --samples 10 --seed 1     writes DIR/own.jsonl, password.jsonl and pin.jsonl

A context is about 850 tokens of a text with one fact. The three files ask the same contexts.
"""

import argparse
import json
import random
from pathlib import Path

TEXT = Path(__file__).parents[1] / "examples/models/held-out.txt"
ASKED = {
    "own": "What is the secret code of {}?\nAnswer: The secret code of {} is",
    "password": "What does {} use as its password?\nAnswer: The password of {} is",
    "pin": "What is the PIN of {}?\nAnswer: The PIN of {} is",
}


def made_up(draw: random.Random) -> str:
    return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)).capitalize()


def case(text: str, draw: random.Random, sample: int) -> tuple[str, str, str]:
    """The context, and the name and value asked for. All tenths of the depth come in turns."""
    begin = text.index(". ", draw.randrange(len(text) - 4000)) + 2
    part = text[begin : begin + 3480]
    name, value = made_up(draw), str(draw.randrange(10_000, 100_000))
    place = part.find(" ", int((sample % 10 + draw.random()) / 10 * (len(part) - 20)))
    return part[:place] + f" The secret code of {name} is {value}." + part[place:], name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=10, help="lines of each file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", type=Path, default=TEXT)
    options = parser.parse_args()
    text = " ".join(options.text.read_text().split())
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = [case(text, random.Random(f"{options.seed} 1 {i}"), i) for i in range(options.samples)]
    for file, asked in ASKED.items():
        lines = (
            {"context": context, "question": "\n\nQuestion: " + asked.format(name, name), "answers": [value]}
            for context, name, value in cases
        )
        (options.folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
