# SPDX-License-Identifier: MIT
"""A real model: `bash .ci/models.sh smollm2` fetches it, KVMELD_MODELS says where it is."""

import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from kvmeld_torch import Cache
from test_memory import held
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODELS = Path(os.environ.get("KVMELD_MODELS", ROOT / "build/models"))
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

FACTS = {
    "Anna": "marmalade", "Boris": "telescope", "Clara": "umbrella", "David": "harmonica", "Elena": "pineapple",
    "Felix": "cathedral", "Greta": "butterfly", "Henry": "chocolate", "Irene": "lighthouse", "Jonas": "accordion",
}  # fmt: skip


@pytest.fixture(scope="module")
def real():
    """A model and its tokenizer."""
    pytest.importorskip("gguf")
    if not (MODELS / FILE).exists():
        pytest.skip(f"{FILE} is fetched by .ci/models.sh smollm2")
    from_file = {"pretrained_model_name_or_path": MODELS, "gguf_file": FILE}
    model = AutoModelForCausalLM.from_pretrained(**from_file, attn_implementation="kvmeld", dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(**from_file)


def context() -> str:
    """Ten facts in a book."""
    book = (ROOT / "examples/models/held-out.txt").read_text()[20_000:23_600]
    parts = [book[at : at + 360] for at in range(0, len(book), 360)]
    facts = [f" The secret word of {name} is {word}. " for name, word in FACTS.items()]
    return "".join(x for both in zip(parts, facts) for x in both)


def answers(model, tokenizer, new_cache) -> list[str]:
    """The first word about each fact."""
    found = []
    for name in FACTS:
        tokens = torch.tensor([tokenizer.encode(f"{context()}\n\nThe secret word of {name} is")])
        out = model.generate(tokens, past_key_values=new_cache(), max_new_tokens=6, do_sample=False)
        found.append(tokenizer.decode(out[0, tokens.shape[1] :]).split()[0])
    return found


def test_answers_about_ten_facts_are_the_full_cache_s_at_30_percent(real):
    wanted = answers(*real, DynamicCache)
    assert sum(a.strip(".") in FACTS.values() for a in wanted) >= 8
    assert answers(*real, lambda: Cache("fold", 0.3)) == wanted


@pytest.mark.parametrize("rows", [None, "half", "k6v4"])
def test_a_tenth_of_the_bytes_of_3000_tokens_is_what_is_allocated(real, rows):
    model, tokenizer = real
    tokens = torch.tensor([tokenizer.encode((ROOT / "examples/models/held-out.txt").read_text()[:20_000])])[:, :3000]
    cache = Cache("fold", bytes=0.1, rows=rows)
    slots = []
    for new in (1, 40):
        tokens = model.generate(tokens, past_key_values=cache, max_new_tokens=new, do_sample=False, eos_token_id=None)
        share = 0.1 * cache.get_seq_length() * 30 * 3 * 2 * 64 * 2  # layers, KV heads, numbers of a token, 16 bits
        assert 0.95 * share < cache.nbytes() <= held(cache) <= 1.3 * share, held(cache) / share
        slots += cache.slots()
    assert slots[0] < slots[1]
