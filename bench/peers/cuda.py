"""PyTorch beside cuda_bench, on the same card by turns: attention of a decode step, and a prompt's column sums.

python3 bench/peers/cuda.py --program build/release/bin/cuda_bench    (PyTorch 2.5 or later; bfloat16, 128 dimensions)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict

import torch
from torch.nn.functional import scaled_dot_product_attention

DIM, GROUP = 128, 4  # of attention; column sums have a query head a key head


def decode(heads, slots, device):
    """One query for each head of a group, over keys and values `[heads, slots, dim]`."""
    random = lambda *shape: torch.randn(*shape, DIM, device=device, dtype=torch.bfloat16)  # noqa: E731
    q, k, v = random(1, heads * GROUP, 1), random(1, heads, slots), random(1, heads, slots)
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)


def column_sums(heads, tokens, device):
    """Matmul, causal softmax and sum, all heads at once: 3 GiB of 32 heads' logits and probabilities."""
    q, k = torch.randn(2, heads, tokens, DIM, device=device, dtype=torch.bfloat16).unbind(0)
    later = torch.ones(tokens, tokens, device=device, dtype=torch.bool).triu(1)

    def work():
        logits = (q @ k.mT).mul_(DIM**-0.5).masked_fill_(later, float("-inf"))
        return logits.softmax(-1, dtype=torch.float32).sum(1)

    return work


def seconds(work):
    """One run alone, with the second level cache full of something else."""
    other = torch.empty(256 << 20, device="cuda", dtype=torch.uint8).fill_(1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    del other
    return 1e-3 * begin.elapsed_time(end)


def ours(program, pattern):
    """{name: seconds} of cuda_bench."""
    unit = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(
            [program, f"--benchmark_filter={pattern}", f"--benchmark_out={out.name}", "--benchmark_out_format=json"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        found = json.load(out)["benchmarks"]
    return {b["name"].removesuffix("/manual_time"): b["real_time"] * unit[b["time_unit"]] for b in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="cuda_bench, as tests/cuda/native builds it")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        sys.exit(77)

    works = {f"attend/heads:{h}/slots:{s}": decode(h, s, "cuda") for h, s in ((64, 2048), (256, 1024), (256, 4096))}
    works["column_scores/heads:32/tokens:4096"] = column_sums(32, 4096, "cuda")
    theirs, own = defaultdict(list), defaultdict(list)
    with torch.inference_mode():
        for name, work in works.items():
            work()
        for _ in range(arguments.rounds):
            for name, work in works.items():
                theirs[name].append(seconds(work))
            for name, taken in ours(arguments.program, "^(attend|column_scores)/").items():
                own[name].append(taken)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bfloat16\n")
    print("| | PyTorch, µs | kvfold, µs | PyTorch / kvfold |")
    print("|---|---|---|---|")
    for name in works:
        peer, mine = statistics.median(theirs[name]), statistics.median(own[name])
        print(f"| {name} | {1e6 * peer:.1f} | {1e6 * mine:.1f} | {peer / mine:.2f} |")


if __name__ == "__main__":
    main()
