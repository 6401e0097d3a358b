# SPDX-License-Identifier: MIT
"""PyTorch beside cuda_bench, on the same card by turns: SDPA by backend, and what gpu_works.py has.

python3 bench/peers/gpu.py --program build/release/bin/cuda_bench    (PyTorch 2.5 or later; bfloat16, 128 dimensions)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict

import gpu_works
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DIM, GROUP = 128, 4


def decode(heads, slots, group, device):
    """One query for each head of a group, over keys and values `[heads, slots, dim]`."""
    random = lambda *shape: torch.randn(*shape, DIM, device=device, dtype=torch.bfloat16)  # noqa: E731
    q, k, v = random(1, heads * group, 1), random(1, heads, slots), random(1, heads, slots)
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)


def causal(heads, tokens, device):
    """Causal attention of a prompt, `GROUP` query heads a key head."""
    random = lambda h: torch.randn(1, h, tokens, DIM, device=device, dtype=torch.bfloat16)  # noqa: E731
    q, k, v = random(heads * GROUP), random(heads), random(heads)
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


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


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def by_backend(work, rounds):
    """{backend: median µs}, of those that take it."""
    taken = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                work(), work()
                taken[name] = 1e6 * statistics.median(seconds(work) for _ in range(rounds))
        except RuntimeError as refused:
            print(f"{name}: {str(refused).splitlines()[0]}", file=sys.stderr)
    return taken


def ours(program, pattern):
    """{name: median µs} of cuda_bench."""
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(
            [program, f"--benchmark_filter={pattern}", f"--benchmark_out={out.name}", "--benchmark_out_format=json"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        found = json.load(out)["benchmarks"]
    return {b["name"].split("/iterations")[0]: b["median_us"] for b in found if "median_us" in b}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="cuda_bench, as tests/cuda/native builds it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where PyTorch's figures go, in µs, for tests/cuda/goals.py")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        sys.exit(77)

    shapes = [f"heads:{h}/slots:{s}/group:{g}" for h, s in ((64, 2048), (256, 1024), (256, 4096)) for g in (1, 4, 8)]
    decoded, own = {name: defaultdict(list) for name in shapes}, defaultdict(list)
    others, taken_by, prompts = {}, defaultdict(list), {}
    with torch.inference_mode():
        others = gpu_works.works()
        benches = "|".join(sorted({bench for bench, _ in others.values()} | {f"attend/{name}" for name in shapes}))
        for _ in range(arguments.rounds):
            for name in shapes:
                work = decode(*(int(x.split(":")[1]) for x in name.split("/")), "cuda")
                for backend, taken in by_backend(work, 7).items():
                    decoded[name][backend].append(taken)
            for name, (_, work) in others.items():
                work()
                taken_by[name].append(1e6 * statistics.median(seconds(work) for _ in range(3)))
            for name, taken in ours(arguments.program, f"^({benches})").items():
                own[name].append(taken)
        for heads in (8, 256):
            prompts[heads] = by_backend(causal(heads, 4096, "cuda"), 7)
    flash = {n: {b: statistics.median(t) for b, t in by.items()} for n, by in decoded.items()}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            peers = {name: statistics.median(taken) for name, taken in taken_by.items()}
            json.dump({"decode": flash, "prompt": prompts, "others": peers}, out, indent=1)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bfloat16, medians in µs\n")
    print("| | flash | cuDNN | kvmeld | faster of them / kvmeld |")
    print("|---|---|---|---|---|")
    for name, by in flash.items():
        mine = statistics.median(own[f"attend/{name}"]) if own[f"attend/{name}"] else float("nan")
        them = [by.get(b, float("nan")) for b in BACKENDS]
        print(f"| attend/{name} | {them[0]:.1f} | {them[1]:.1f} | {mine:.1f} | {min(by.values()) / mine:.2f} |")
    print("\n| | PyTorch | kvmeld | PyTorch / kvmeld |\n|---|---|---|---|")
    for name, (bench, _) in others.items():
        theirs, mine = statistics.median(taken_by[name]), statistics.median(own[bench] or [float("nan")])
        print(f"| {name} | {theirs:.1f} | {mine:.1f} | {theirs / mine:.2f} |")
    print()
    for heads, by in prompts.items():
        print(f"causal attention, {heads} × {GROUP} heads × 4096: {by}")


if __name__ == "__main__":
    main()
