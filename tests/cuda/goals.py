# SPDX-License-Identifier: MIT
"""What tests/cuda/native measured, beside the goals, as Markdown: python3 tests/cuda/goals.py FOLDER (of its logs)."""

import collections
import datetime
import json
import pathlib
import shutil
import subprocess
import sys

ATTENTION_US = 257  # causal attention of one layer's prompt, cuDNN, H100; where PyTorch is at hand it is measured


def load(path):
    """JSON, also of a bench that was cut off in the middle of its list."""
    if not path.exists():
        return {}
    text = path.read_text()
    for end in ("", "]}", "}]}"):
        try:
            return json.loads(text.rstrip().rstrip(",") + end)
        except json.JSONDecodeError:
            pass
    return {}


def statuses(path):
    """Of a log of tests: how many have which status, and the lines of those that did not pass."""
    lines = [x for x in path.read_text().splitlines() if x[:1].isalpha()] if path.exists() else []
    count = collections.Counter(x.split()[0] for x in lines)
    return count, [x for x in lines if not x.startswith(("passed", "skipped"))]


class Table:
    def __init__(self):
        self.rows = []

    def add(self, what, shape, measured, goals, digits=2, least=False):
        """Numbers that were measured, each against the most (or the least) that it should be."""
        measured = measured if isinstance(measured, list) else [measured]
        goals = goals if isinstance(goals, list) else [goals] * len(measured)
        said = " / ".join("–" if x is None else f"{x:.{digits}f}" for x in measured)
        reached = [x is not None and (x >= goal if least else x <= goal) for x, goal in zip(measured, goals)]
        met = "not measured" if set(measured) == {None} else "met" if all(reached) else "**missed**"
        if met == "**missed**" and any(reached):
            met = f"met by {sum(reached)} of {len(reached)}"
        wanted = " / ".join(f"{x:g}" for x in (goals if len(set(goals)) > 1 else goals[:1]))
        self.rows.append(f"| {what} | {shape} | {said} | {'≥' if least else '≤'} {wanted} | {met} |")

    def __str__(self):
        return "\n".join(["| what | shape | measured | goal | |", "|---|---|---|---|---|", *self.rows])


def main():
    folder = pathlib.Path(sys.argv[1])
    bench, peers = load(folder / "bench.json"), load(folder / "peers.json")
    found = {b["name"].split("/iterations")[0]: b for b in bench.get("benchmarks", []) if not b.get("error_occurred")}
    context = bench.get("context", {})

    def of(name, counter="median_us"):
        return found.get(name, {}).get(counter)

    def each(names, counter):
        return [of(x, counter) for x in names]

    def ratio(name, beside):
        a, b = of(name), of(beside) if isinstance(beside, str) else beside
        return a / b if a and b else None

    table = Table()
    at = "heads:{}/slots:{}/group:{}".format
    groups = (1, 4, 8)
    goals = {(256, 4096): (0.87, 0.94), (256, 1024): (0.76, 0.84), (64, 2048): (0.62, 0.69)}
    for (heads, slots), (dirty, clean) in goals.items():
        names, shape = [at(heads, slots, g) for g in groups], f"{heads} × {slots}, groups 1 / 4 / 8"
        for how, bench_name, goal in (("dirty", "attend", dirty), ("clean", "attend_clean", clean)):
            shares = each([f"{bench_name}/{x}" for x in names], "of_copy")
            table.add(f"`attend`, of copy, {how} L2", shape, shares, goal, least=True)
        beside = [ratio(f"attend/{x}", peers.get("decode", {}).get(x, {}).get("flash")) for x in names]
        table.add("`attend` / PyTorch's flash decode", shape, beside, 1)
    # Of a step, or where slots merge by plans, of the mean over a cycle from one eviction to the next.
    most = {"d2o": [1.3] * 3, "keepkv": [1.3] * 3, "kvmerger": [1.5] * 3, "fold": [1.5] * 3, "ems": [1.8] * 3}
    for policy in ("streaming_llm", "h2o", "tova", "snapkv", "zsmerge", "d2o", "keepkv", "kvmerger", "fold", "ems"):
        step = lambda *shape: ratio(f"step/{policy}/{at(*shape)}", f"attend/{at(*shape)}")  # noqa: B023, E731
        bounds = most.get(policy, [1.1, 1.1, 1.15])
        what = f"`step` of `{policy}` / `attend`" + ", over its cycle" * (policy in most)
        table.add(what, "256 × 1024, groups 1 / 4 / 8", [step(256, 1024, g) for g in groups], bounds)
        if policy not in most:  # those free many slots at once: the mean of a whole round, of one shape
            table.add(what, "64 × 2048 / 256 × 4096, group 4", [step(64, 2048, 4), step(256, 4096, 4)], bounds[1])
    for shape, at in (("32 heads × 4096", "heads:32/tokens:4096/group:1"), ("8 × 4 heads, 4096", "heads:8/tokens:4096/group:4")):
        table.add("`column_scores`, µs", shape, of(f"column_scores/{at}"), 480, 0)
        table.add("… log-sum-exp given, µs", shape, of(f"column_scores_given/{at}"), 240, 0)
        table.add("… the last 32 queries, µs", shape, of(f"column_scores_window/{at}"), 32, 0)
    layer = peers.get("prompt", {}).get("8", {}).get("cudnn", ATTENTION_US)
    layers = peers.get("prompt", {}).get("256", {}).get("cudnn", 32 * ATTENTION_US)
    bounds = {"streaming_llm": 0.15, "snapkv": 0.3, "keepkv": 5, "fold": 6}
    for policy in ("streaming_llm", "snapkv", "tova", "h2o", "d2o", "zsmerge", "kvmerger", "ems", "keepkv", "fold"):
        measured = ratio(f"compress/{policy}/heads:8/tokens:4096", layer)
        bound = bounds.get(policy, 2.5)
        table.add(f"`compress` of `{policy}` / causal attention", "8 × 4 heads, 4096 → 1024", measured, bound)
    for policy, bound in {"snapkv": 0.1, "h2o": 1.9, "zsmerge": 1.9, "fold": 1.5}.items():
        measured = ratio(f"compress/{policy}/heads:256/tokens:4096", layers)
        table.add(f"`compress` of `{policy}` / causal attention", "256 × 4 heads, 4096 → 1024", measured, bound)
    names = [f"heads:{h}/slots:{s}" for h, s in ((64, 2048), (256, 1024), (256, 4096))]
    shape = "64 × 2048 / 256 × 1024 / 256 × 4096"
    moved, matched = each([f"apply/{x}" for x in names], "of_copy"), each([f"match/{x}" for x in names], "of_mma")
    table.add("`apply`, half of the rows move, of copy", shape, moved, 0.7, least=True)
    table.add("`match`, of mma.sync", shape, matched, 0.45, least=True)
    table.add("`apply`, a row takes in 3,073 others, µs", "8 × 4096", of("apply_long_row/heads:8/slots:4096"), 50, 0)
    table.add("`select`, µs", "256 × 4096", of("select/heads:256/slots:4096"), 20, 0)
    table.add("a plan of `h2o`, scores given, µs", "8 × 4096 → 1024", of("plan/h2o/heads:8/tokens:4096"), 60, 0)

    card = context.get("card", "no device")
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        card += ", driver " + subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    copy, products = (float(context.get(x, 0)) for x in ("copy_GB/s", "mma_TFLOP/s"))
    print(f"{card}, {datetime.date.today()}: copy {copy:,.0f} GB/s, mma.sync {products:.0f} TFLOP/s, ", end="")
    print(f"causal attention of a layer's prompt {layer:.0f} µs.")
    for name, log in (("Tests", "tests.txt"), ("Sanitizers", "sanitizers.txt")):
        count, wrong = statuses(folder / log)
        print(f"{name}: {', '.join(f'{n} {status}' for status, n in sorted(count.items())) or 'none ran'}.")
        for line in wrong:
            print(f"- {line}")
    failed = [b for b in bench.get("benchmarks", []) if b.get("error_occurred")]
    for b in failed:
        print(f"- {b['name']}: {b['error_message']}")
    print(f"\n{table}")


if __name__ == "__main__":
    main()
