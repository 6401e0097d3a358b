# SPDX-License-Identifier: MIT
"""PyTorch and kvpress beside kvmeld, one thread each, by turns; ratios to each one's own attention. See ./run."""

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict

import torch


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ours(program, pattern, *arguments):
    """{benchmark up to its scalar: seconds} of one of kvmeld's programs."""
    done = subprocess.run(
        [program, f"--benchmark_filter={pattern}", "--benchmark_format=json", *arguments],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    unit = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    found = json.loads(done.stdout or '{"benchmarks": []}')["benchmarks"]
    return {b["name"].split("/f32")[0]: b["real_time"] * unit[b["time_unit"]] for b in found}


def table(title, rows, peer_attention, our_attention):
    print(f"\n{title}\n")
    print("| | PyTorch, ms | / its attention | kvmeld, ms | / its attention | PyTorch / kvmeld |")
    print("|---|---|---|---|---|---|")
    for name, peer, own in rows:
        cells = [f"{1e3 * peer:.3g}", f"{peer / peer_attention:.2g}"]
        cells += [f"{1e3 * own:.3g}", f"{own / our_attention:.2g}", f"{peer / own:.2g}"] if own else ["–"] * 3
        print(f"| {name} | {' | '.join(cells)} |")


def by_turns(rounds, theirs, mine):
    """Medians of {name: work} in PyTorch and of what `mine()` returns."""
    times, own = defaultdict(list), defaultdict(list)
    for work in theirs.values():
        work()
    for _ in range(rounds):
        for name, taken in mine().items():
            own[name].append(taken)
        for name, work in theirs.items():
            times[name].append(seconds(work))
    median = lambda x: {name: statistics.median(taken) for name, taken in x.items()}  # noqa: E731
    return median(times), median(own)


def decode(programs, rounds, slots):
    import steps

    steps.check()
    heads, dim, tokens = 32, 128, 10 if slots > 1024 else 40
    torch.manual_seed(0)
    k, v = torch.randn(2, heads, slots, dim).unbind(0)
    q, new_k, new_v = torch.randn(3, heads, 1, dim).unbind(0)
    kinds = {"attention": steps.Attention, "h2o": steps.H2O, "zsmerge": steps.ZSMerge, "keepkv": steps.KeepKV}

    def repeat(one):
        for _ in range(tokens):
            one.step(q, new_k, new_v)

    works = {name: (lambda one=kind(k, v): repeat(one)) for name, kind in kinds.items()}
    pattern = f"^(attend|step/(h2o|zsmerge|keepkv))/f32/slots:{slots}/heads:{heads}/dim:{dim}/group:1/"
    theirs, own = by_turns(
        rounds, works, lambda: ours(f"{programs}/decode_bench", pattern, "--benchmark_min_time=0.1")
    )
    theirs = {name: taken / tokens for name, taken in theirs.items()}
    named = {"attention": "attend", "h2o": "step/h2o", "zsmerge": "step/zsmerge", "keepkv": "step/keepkv"}
    rows = [(name, taken, own.get(named[name])) for name, taken in theirs.items()]
    table(f"One decode step, {heads} heads × {dim}, {slots} slots", rows, theirs["attention"], own["attend"])


def prompt(programs, rounds, tokens):
    import presses

    works = presses.works(presses.Prompt(tokens))
    names = "|".join(sorted({bench for bench, _ in works.values() if bench}))
    pattern = f"^({names})/f32/tokens:{tokens}/heads:{presses.KV_HEADS}/dim:{presses.DIM}/group:4/"
    theirs, own = by_turns(
        rounds,
        {name: work for name, (_, work) in works.items()},
        lambda: ours(f"{programs}/merge_bench", pattern, "--pairs=1"),
    )
    rows = [(name, taken, own.get(works[name][0])) for name, taken in theirs.items()]
    title = f"A prompt of {tokens} tokens to a tenth, {presses.HEADS} query and {presses.KV_HEADS} KV heads × {presses.DIM}"
    table(title, rows, theirs["attention"], own["attention"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", required=True, help="where decode_bench and merge_bench are")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", action="store_true", help="decode steps only")
    parser.add_argument("--prompt", action="store_true", help="prompts only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    both = arguments.decode == arguments.prompt
    with torch.inference_mode():
        if both or arguments.decode:
            for slots in (256, 1024, 4096):
                decode(arguments.programs, arguments.rounds, slots)
        if both or arguments.prompt:
            prompt(arguments.programs, arguments.rounds, 4096)


if __name__ == "__main__":
    main()
