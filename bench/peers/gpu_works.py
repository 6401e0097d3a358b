# SPDX-License-Identifier: MIT
"""What PyTorch offers on a card beside SDPA: works for gpu.py, each by the name of kvmeld's benchmark of the same."""

import functools

import steps
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

DIM = 128


def random(*shape, device="cuda"):
    return torch.randn(*shape, DIM, device=device, dtype=torch.bfloat16)


def graphed(work):
    """A CUDA graph of it: without what Python and launches cost."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, and takes its memory
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay():
        graph.replay()

    replay.reads = work  # its inputs: the graph knows their addresses alone
    return replay


def flex_decode(heads, slots, group, attention=flex_attention, device="cuda"):
    """A decode step's attention with log-mass: FlexAttention's way of a bias that differs from slot to slot."""
    q, k, v = (random(1, n, s, device=device) for n, s in ((heads * group, 1), (heads, slots), (heads, slots)))
    log_mass = torch.rand(heads, slots, device=device)

    def massed(score, _batch, head, _query, slot):
        return score + log_mass[head // group, slot]

    work = functools.partial(attention, q, k, v, score_mod=massed, enable_gqa=group > 1)
    work.wanted = lambda: scaled_dot_product_attention(
        q, k, v, attn_mask=log_mass.repeat_interleave(group, 0)[None, :, None].to(q.dtype), enable_gqa=group > 1
    )
    return work


def check(attention=flex_attention, device="cuda"):
    """FlexAttention with log-mass is SDPA with a bias."""
    work = flex_decode(4, 256, 2, attention, device)
    torch.testing.assert_close(work(), work.wanted(), atol=0.02, rtol=0.02)


def column_sums(heads, tokens, device="cuda"):
    """Matmul, causal softmax and sum, all heads at once: 3 GiB of 32 heads' logits and probabilities."""
    q, k = random(2, heads, tokens, device=device).unbind(0)
    later = torch.ones(tokens, tokens, device=device, dtype=torch.bool).triu(1)

    def work():
        logits = ((q @ k.mT) * DIM**-0.5).masked_fill(later, float("-inf"))
        return logits.softmax(-1, dtype=torch.float32).sum(1)

    return work


def eager_step(kind, heads, slots, device="cuda"):
    """Decode steps as one writes them, one query head a KV head."""
    q, k, v = random(3, heads, 1, device=device).unbind(0)
    with torch.device(device):
        held = kind(random(heads, slots, device=device), random(heads, slots, device=device))

    def work():
        with torch.device(device):
            return held.step(q, k, v)

    return work


def presses(tokens, kept, device="cuda"):
    """kvpress's whose policies have kernels, on one layer of 8 KV heads, queries at hand; {} without kvpress."""
    try:
        import presses as on_cpu
    except ImportError as missing:
        print(f"no presses: {missing}")
        return {}
    with torch.device(device):
        prompt = on_cpu.Prompt(tokens, torch.bfloat16)
        made = on_cpu.works(prompt, kept)
    at = f"heads:{on_cpu.KV_HEADS}/tokens:{tokens}"
    found = {}
    for name, (bench, work) in made.items():
        if name in ("SnapKVPress", "TOVAPress"):
            found[name] = (f"{bench}/{at}", functools.partial(_on, device, work))
    return found


def _on(device, work):
    with torch.device(device):
        return work()


def works():
    """{name: (kvmeld's benchmark, work)}."""
    compiled = torch.compile(flex_attention)
    check(compiled)
    made = {}
    for heads, slots, group in ((64, 2048, 4), (256, 1024, 1), (256, 1024, 4), (256, 4096, 4)):
        at = f"heads:{heads}/slots:{slots}/group:{group}"
        made[f"FlexAttention with log-mass, graphed, {at}"] = (
            f"attend/{at}",
            graphed(flex_decode(heads, slots, group, compiled)),
        )
    sums = column_sums(32, 4096)
    made["column sums, eager"] = ("column_scores/heads:32/tokens:4096/group:1", sums)
    made["column sums, torch.compile"] = ("column_scores/heads:32/tokens:4096/group:1", torch.compile(sums))
    for name, kind in (("h2o", steps.H2O), ("zsmerge", steps.ZSMerge), ("keepkv", steps.KeepKV)):
        made[f"a step of {name}, eager"] = (f"step/{name}/heads:256/slots:1024/group:1", eager_step(kind, 256, 1024))
    return made | presses(4096, 0.25)
