# SPDX-License-Identifier: MIT
"""python -m kvmeld_torch.compare: kvmeld's policies and kvpress's presses on the same prompts.

One row for each method and budget: the relative error of the attention's outputs over the 64 tokens after a prompt,
their nll, needles answered (facts in the prompt, the question after its compression), bytes held at the prompt's end
by all ranks, and of slots and state by the rank that has most, the prompt's time over the full cache's, tokens decoded
a second. Methods read the tokens behind one by one. Under torchrun each rank has some of the model's heads; presses
that need all query heads are left out then.
"""

import argparse
import csv
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from . import measures, ranks
from .measures import BEHIND, FULL, Method, Reading

ROOT = Path(__file__).parents[3]
NAMES = "Aldo Berit Cyrus Dagny Edwin Freya Gideon Hilda Ivor Juno Klaus Livia Magnus Nora".split()
FIELDS = "method budget error nll needles bytes ranks rank_slots rank_state prompt_time tokens_per_s".split()


def tokenizer(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Text to tokens and back: the model's SentencePiece file alone, or what transformers makes of its folder."""
    if (folder / "tokenizer.model").exists() and not (folder / "tokenizer_config.json").exists():
        import sentencepiece

        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return pieces.encode, pieces.decode
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder)
    return lambda text: own.encode(text, add_special_tokens=False), own.decode


def needle_case(encode: Callable, text: list[int], prompt: int, needles: int, seed: int):
    """A prompt with facts in it, a question about one of them, and its answer."""
    draw = random.Random(seed)
    names = draw.sample(NAMES, needles)
    codes = ["".join(draw.choices("0123456789", k=5)) for _ in names]
    facts = [encode(f" The secret code of {name} is {code}. ") for name, code in zip(names, codes)]
    free = prompt - sum(map(len, facts))
    start = draw.randrange(len(text) - free)
    places = sorted(draw.sample(range(free), needles))
    body: list[int] = []
    for begin, end, fact in zip([0, *places], [*places, free], [*facts, []]):
        body += text[start + begin : start + end] + fact
    asked = draw.randrange(needles)
    question = encode(f"\nQuestion: what is the secret code of {names[asked]}? Answer:")
    return body, question, codes[asked]


def row(method: Method, readings: list[Reading], full: list[Reading], needles: float) -> dict:
    """What the table says of a method; `full`: what the full cache reads of the same prompts."""
    return {
        "method": method.name,
        "budget": method.budget,
        "error": mean(measures.error(a, b) for a, b in zip(readings, full)),
        "nll": mean(r.nll for r in readings),
        "needles": needles,
        "bytes": round(mean(r.bytes for r in readings)),
        "ranks": ranks.count(),
        "rank_slots": round(mean(r.rank_bytes[0] for r in readings)),
        "rank_state": round(mean(r.rank_bytes[1] for r in readings)),
        "prompt_time": mean(r.seconds for r in readings) / mean(r.seconds for r in full),
        "tokens_per_s": 1e3 / mean(r.step for r in readings),
    }


@torch.no_grad()
def rows(options: argparse.Namespace) -> list[dict]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(options.model)
    encode, decode = tokenizer(folder)
    text = encode(Path(options.text).read_text()[: 40 * options.prompt * max(options.prompts, 4)])
    load = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if "RANK" in os.environ:
        load["tp_plan"] = "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, **load).eval()
    length = options.prompt + BEHIND + 1
    prompts = [torch.tensor(text[i * length : (i + 1) * length]) for i in range(options.prompts)]
    cases = [needle_case(encode, text, options.prompt, options.needles, seed) for seed in range(options.cases)]
    budgets = [float(b) for b in options.budgets.split(",")]
    methods: list[Method] = [FULL]
    methods += [measures.policy(p, b, encode) for b in budgets for p in options.policies.split(",") if p]
    methods += [measures.press(p, b) for b in budgets for p in options.presses.split(",") if p]
    shown = sys.stderr.isatty() and ranks.is_first()
    progress = tqdm(total=len(methods) * (len(prompts) + len(cases)), disable=not shown, leave=False)
    full, table = [], []
    for method in methods:
        readings = []
        progress.set_description(method.name)
        try:
            for prompt in prompts:
                readings.append(measures.reading(method, model, prompt))
                progress.update()
        except RuntimeError as problem:  # of every rank
            if not method.is_press or ranks.count() == 1:
                raise
            progress.total -= len(prompts) + len(cases)
            if ranks.is_first():
                why = str(problem).splitlines()[0]
                print(f"{method.name} {method.budget:g}: left out on ranks: {why}", file=sys.stderr)
            continue
        full = full or readings
        found = 0
        for body, question, code in cases:
            cache, _, _ = method.prefill(model, torch.tensor([body]))
            answer = method.answer(model, cache, torch.tensor([question]), len(body), 12)
            found += decode(answer).strip().startswith(code)
            progress.update()
        table.append(row(method, readings, full, found / len(cases) if cases else float("nan")))
    progress.close()
    return table


def show(table: list[dict]) -> None:
    if table[0]["ranks"] > 1:
        print(f"{table[0]['ranks']} ranks; slots and state of the rank that has most, KiB")
    print(
        f"{'method':26} {'budget':>6} {'error':>6} {'nll':>6} {'needles':>7} {'KiB':>7} {'slots':>7} {'state':>6} "
        f"{'prompt':>7} {'tok/s':>6}"
    )
    for r in table:
        print(
            f"{r['method']:26} {r['budget']:6.2f} {r['error']:6.3f} {r['nll']:6.3f} {100 * r['needles']:6.0f}% "
            f"{r['bytes'] / 1024:7.0f} {r['rank_slots'] / 1024:7.0f} {r['rank_state'] / 1024:6.0f} "
            f"{r['prompt_time']:6.2f}x {r['tokens_per_s']:6.0f}"
        )


def picture(table: list[dict], path: Path) -> None:
    """Error against bytes held: presses are grey. The script is kept beside the SVG."""
    names = list(dict.fromkeys(r["method"] for r in table[1:]))
    lines = [
        "set encoding utf8",
        "set terminal svg size 760,460 font 'Helvetica,13' background '#ffffff'",
        f"set output '{path.name}'",
        "set xlabel 'KiB held at the prompt''s end'; set ylabel 'relative error of attention'",
        "set key outside right; set border linecolor '#555555'; set tics nomirror scale 0.5; set yrange [0:]",
    ]
    for i, name in enumerate(names):
        points = [f"{r['bytes'] / 1024:.1f} {r['error']:.5f}" for r in table if r["method"] == name]
        lines += [f"$m{i} << EOD", *points, "EOD"]
    style = [
        f"$m{i} with linespoints title '{name}' pt 7 ps 0.6" + (" lc '#aaaaaa' dt 2" if name.endswith("Press") else "")
        for i, name in enumerate(names)
    ]
    script = path.with_suffix(".gp")
    script.write_text("\n".join(lines) + "\nplot " + ", ".join(style) + "\n")
    subprocess.run(["gnuplot", script.name], cwd=path.parent, check=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="kvmeld_torch.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ROOT / "examples/models/kvmeld-2m", help="a Hugging Face folder")
    parser.add_argument("--text", default=ROOT / "examples/models/held-out.txt")
    parser.add_argument("--policies", default="fold,snapkv,h2o,expected_attention,tova,streaming_llm")
    parser.add_argument(
        "--presses", default="SnapKVPress,ExpectedAttentionPress,TOVAPress,KeyDiffPress,StreamingLLMPress"
    )
    parser.add_argument("--budgets", default="0.05,0.1,0.2", help="shares of the prompt's tokens")
    parser.add_argument("--prompt", type=int, default=896, help="tokens")
    parser.add_argument("--prompts", type=int, default=4, help="for error and nll")
    parser.add_argument("--cases", type=int, default=20, help="prompts with needles")
    parser.add_argument("--needles", type=int, default=4, help="facts in each, of which one is asked for")
    parser.add_argument("--out", type=Path, default=ROOT / "build/results", help="for compare.csv and compare.svg")
    options = parser.parse_args(arguments)
    if not 1 <= options.needles <= len(NAMES):
        parser.error(f"--needles: expected 1 to {len(NAMES)}, got {options.needles}")
    table = rows(options)
    first = ranks.is_first()
    ranks.leave()
    if not first:
        return
    show(table)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "compare.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(table)
    picture(table, options.out / "compare.svg")


if __name__ == "__main__":
    main()
