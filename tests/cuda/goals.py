"""What tests/cuda/native measured, beside the goals, as Markdown: python3 tests/cuda/goals.py FOLDER (of its logs)."""

import collections
import datetime
import json
import pathlib
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

    def add(self, what, shape, measured, goal, digits=2, least=False):
        """A measured number against the most (or the least) that it should be; without a goal it stands there alone."""
        if measured is None:
            said, met = "–", "not measured"
        else:
            said = f"{measured:.{digits}f}"
            met = "" if goal is None else "met" if (measured >= goal if least else measured <= goal) else "**missed**"
        wanted = "" if goal is None else f"{'≥' if least else '≤'} {goal:g}"
        self.rows.append(f"| {what} | {shape} | {said} | {wanted} | {met} |")

    def __str__(self):
        return "\n".join(["| what | shape | measured | goal | |", "|---|---|---|---|---|", *self.rows])


def main():
    folder = pathlib.Path(sys.argv[1])
    bench, peers = load(folder / "bench.json"), load(folder / "peers.json")
    found = {b["name"].split("/iterations")[0]: b for b in bench.get("benchmarks", []) if not b.get("error_occurred")}
    context = bench.get("context", {})

    def of(name, counter="median_us"):
        return found.get(name, {}).get(counter)

    def ratio(name, beside, scale=1.0):
        a, b = of(name), of(beside) if isinstance(beside, str) else beside
        return a / b / scale if a and b else None

    table = Table()
    goals = {(256, 4096): (0.87, 0.94), (256, 1024): (0.76, 0.84), (64, 2048): (0.62, 0.69)}
    for (heads, slots), (dirty, clean) in goals.items():
        for group in (1, 4, 8):
            at = f"heads:{heads}/slots:{slots}/group:{group}"
            shape = f"{heads} × {slots}, group {group}"
            table.add("`attend`, of copy, dirty L2", shape, of(f"attend/{at}", "of_copy"), dirty, least=True)
            table.add("`attend`, of copy, clean L2", shape, of(f"attend_clean/{at}", "of_copy"), clean, least=True)
            flash = peers.get("decode", {}).get(at, {}).get("flash")
            if flash:
                table.add("`attend` / PyTorch's flash decode", shape, ratio(f"attend/{at}", flash), 1)
    most = {"d2o": (1.3,) * 3, "keepkv": (1.3,) * 3, "kvmerger": (1.5,) * 3, "fold": (1.5,) * 3, "ems": (1.8,) * 3}
    for policy in ("streaming_llm", "h2o", "tova", "snapkv", "zsmerge", "d2o", "keepkv", "kvmerger", "fold", "ems"):
        bounds = most.get(policy, (1.1, 1.1, 1.15))
        for (heads, slots), groups in {(256, 1024): (1, 4, 8), (64, 2048): (4,), (256, 4096): (4,)}.items():
            for group in groups:
                at = f"heads:{heads}/slots:{slots}/group:{group}"
                if slots == 1024 or policy not in ("kvmerger", "fold"):
                    bound = bounds[(1, 4, 8).index(group)]
                    measured = ratio(f"step/{policy}/{at}", f"attend/{at}")
                    table.add(f"`step` of `{policy}` / `attend`", f"{heads} × {slots}, group {group}", measured, bound)
    prompt = "32 heads × 4096"
    table.add("`column_scores`, µs", prompt, of("column_scores/heads:32/tokens:4096"), 480, 0)
    table.add("… log-sum-exp given, µs", prompt, of("column_scores_given/heads:32/tokens:4096"), 240, 0)
    table.add("… the last 32 queries, µs", prompt, of("column_scores_window/heads:32/tokens:4096"), 32, 0)
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
    for heads, slots in ((64, 2048), (256, 1024), (256, 4096)):
        at = f"heads:{heads}/slots:{slots}"
        table.add("`apply`, half of the rows move, of copy", f"{heads} × {slots}", of(f"apply/{at}", "of_copy"), 0.7, least=True)
        table.add("`match`, of mma.sync", f"{heads} × {slots}", of(f"match/{at}", "of_mma"), 0.45, least=True)
    table.add("`apply`, a row takes in 3,073 others, µs", "8 × 4096", of("apply_long_row/heads:8/slots:4096"), 50, 0)
    table.add("`select`, µs", "256 × 4096", of("select/heads:256/slots:4096"), 20, 0)
    table.add("a plan of `h2o`, scores given, µs", "8 × 4096 → 1024", of("plan/h2o/heads:8/tokens:4096"), 60, 0)

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if context else ""
    print(f"{card or 'no device'}, {datetime.date.today()}: copy {float(context.get('copy_GB/s', 0)):,.0f} GB/s, ", end="")
    print(f"mma.sync {float(context.get('mma_TFLOP/s', 0)):.0f} TFLOP/s; causal attention of a layer's prompt {layer:.0f} µs.")
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
