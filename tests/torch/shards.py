# SPDX-License-Identifier: MIT
"""What test_shards.py runs on every rank: torchrun shards.py FOLDER. Each rank writes what it saw."""

import os
import sys

import torch
import torch.distributed as dist
from conftest import MODEL
from kvmeld_torch import Cache, replay
from transformers import AutoModelForCausalLM
from transformers.utils import logging

CASES = [
    ("full_cache", "even"),
    ("h2o", "even"),
    ("fold", "even"),
    ("fold", "scores"),
    ("snapkv:window=8", "scores"),
    ("zsmerge", "scores"),
    ("attention_matching", "even"),
    ("kvzip", "scores"),
]
LAYERS, STEPS = 4, 12

reduced = []  # elements of every all-reduce of the case


def counted(x, *args, all_reduce=dist.all_reduce, **options):
    reduced.append(x.numel())
    return all_reduce(x, *args, **options)


def refused(*_args, **_options):
    raise AssertionError("expected an all-reduce, got another collective")


def case(model, policy: str, divide: str) -> dict:
    """Logits of a prompt, of decode steps and of a second turn, with what is held then."""
    reduced.clear()
    cache = Cache(policy, budget=0.25, divide=divide)
    torch.manual_seed(2)
    tokens = torch.randint(512, (2, 300))
    mask = torch.ones_like(tokens)
    mask[1, :70] = 0
    logits = []
    parts = [tokens[:, :200], *tokens[:, 200 : 200 + STEPS].split(1, 1), tokens[:, 200 + STEPS :]]
    seen = 0
    with torch.no_grad(), replay(model, lambda words: [len(words)]):
        for part in parts:
            seen += part.shape[1]
            position = (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
            out = model(part, attention_mask=mask[:, :seen], position_ids=position, past_key_values=cache)
            logits.append(out.logits[:, -1])
    heads = [layer.heads for layer in cache.layers]
    return {
        "logits": torch.stack(logits),
        "lengths": torch.stack([h.length.view(2, -1) for h in heads]),  # [layers, batch, KV heads]
        "bytes": cache.nbytes(),
        "reduced": list(reduced),
    }


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    dist.all_reduce = counted
    for name in ("all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter", "all_to_all_single", "send"):
        setattr(dist, name, refused)
    plan = {"tp_plan": "auto"} if "WORLD_SIZE" in os.environ else {}
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="kvmeld", **plan)
    saw = {c: case(model.eval(), *c) for c in CASES}
    torch.save(saw, f"{sys.argv[1]}/{os.environ.get('RANK', 'one')}.pt")
    if plan:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
