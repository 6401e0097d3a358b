# SPDX-License-Identifier: MIT
"""python -m kvmeld_torch.speed: what the way through PyTorch costs, and what a smaller cache saves.

A decode step through the operator beside the C++ step that it calls, which `examples/torch/run` builds; and, where
--context says so, `model.generate` of a model of random weights.
"""

import argparse
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import quantiles

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from ._library import ops, path
from .cache import Cache
from .heads import Heads, Policy
from .measures import held
from .spec import Spec


def through_operator(policy: str, heads: int, group: int, dim: int, slots: int, steps: int) -> list[float]:
    """Microseconds of every step."""
    cache = Heads.empty(Policy(policy), Spec(group), heads, slots + 1, dim)
    tensors, taken = cache.tensors, []
    q = torch.randn(heads, group, dim)
    target, trigger = ops.budget_within(policy, slots)
    for i in range(slots + steps):
        k, v = torch.randn(2, heads, dim)
        begin = time.perf_counter()
        ops.step(policy, tensors, q, k, v, [target], trigger=[trigger], group=group)
        if i >= slots:
            taken.append(1e6 * (time.perf_counter() - begin))
    return taken


def in_cpp(policy: str, *sizes: int) -> list[float]:
    command = [path().parent / "step_bench", policy, *map(str, sizes)]
    return [float(x) for x in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]


def steps(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # as the C++ step runs
    print(f"{'policy':12} {'heads x group x dim x slots':28} {'C++, us':>9} {'operator':>9} {'ratio':>6}")
    for size in options.sizes.split(","):
        numbers = [int(n) for n in size.split("x")] + [options.steps]
        for policy in options.policies.split(","):
            runs = [(in_cpp(policy, *numbers), through_operator(policy, *numbers)) for _ in range(options.rounds)]
            cpp, operator = (min(quantiles(run[i], n=10)[0] for run in runs) for i in (0, 1))
            print(f"{policy:12} {size:28} {cpp:9.1f} {operator:9.1f} {operator / cpp:6.3f}", flush=True)


class Clock(BaseStreamer):
    """When `generate` has had its prompt, and each of its tokens: seconds."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generation(model, attention: str, prompt: torch.Tensor, cache: Callable, tokens: int) -> list[float]:
    """Of one `generate`: seconds to its first token, milliseconds a step (the best decile), seconds of all, MiB."""
    model.set_attn_implementation(attention)
    past, clock = cache(), Clock()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # no token is padding
        past_key_values=past,
        max_new_tokens=tokens + 1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    begin, first, *_, last = clock.times
    steps = [1e3 * (b - a) for a, b in pairwise(clock.times[1:])]
    return [first - begin, quantiles(steps, n=10)[0], last - begin, sum(held(past)) / 2**20]


def generate(options: argparse.Namespace) -> None:
    layers, hidden, heads, kv_heads = (int(n) for n in options.model.split("x"))
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=options.context + options.tokens,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM._from_config(config).eval()
    prompt = torch.randint(1024, (options.batch, options.context))
    print(f"{'cache':24} {'first token, s':>14} {'step, ms':>9} {'tokens/s':>9} {'all, s':>8} {'MiB':>8}")
    caches = {"sdpa, full": ("sdpa", DynamicCache)} | {
        f"{policy}, {options.budget:g}": ("kvmeld", lambda policy=policy: Cache(policy, options.budget))
        for policy in options.policies.split(",")
        if policy
    }
    for name, (attention, cache) in caches.items():
        first, step, both, size = generation(model, attention, prompt, cache, options.tokens)
        speed = 1e3 * options.batch / step
        print(f"{name:24} {first:14.1f} {step:9.2f} {speed:9.1f} {both:8.1f} {size:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvmeld_torch.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="h2o,tova,fold,zsmerge")
    parser.add_argument("--sizes", default="8x4x128x820,4x2x32x820", help="heads x group x dim x slots, ...")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5, help="of each, in turn: the best one counts")
    parser.add_argument("--context", type=int, default=0, help="generate: tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="generate: decoded behind the first one")
    parser.add_argument("--batch", type=int, default=1, help="generate: sequences")
    parser.add_argument("--budget", type=float, default=0.1, help="generate: Cache's")
    parser.add_argument("--model", default="8x1024x16x4", help="generate: layers x width x heads x KV heads")
    options = parser.parse_args()
    if options.context:
        generate(options)
    else:
        steps(options)


if __name__ == "__main__":
    main()
