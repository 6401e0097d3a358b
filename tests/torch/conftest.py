# SPDX-License-Identifier: MIT
"""What the tests share: the bundled model, its text, and numbers."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/kvmeld-2m"
sys.path.insert(0, str(ROOT / "examples/torch"))

# Every policy, with a budget that it accepts of 60 tokens.
POLICIES = (
    "full_cache streaming_llm h2o snapkv:window=8 zsmerge d2o kvmerger ems keepkv attention_matching kvzip fold "
    "random tova roco scissorhands:history=16 r_kv key_diff expected_attention triattention centroids compactor cam "
    "dropkv snapkv+massfold:window=8"
).split()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


@pytest.fixture(scope="session")
def text() -> list[int]:
    """Tokens of the held-out book."""
    import sentencepiece

    tokens = sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "tokenizer.model"))
    return tokens.encode((ROOT / "examples/models/held-out.txt").read_text()[20_000:26_000])


@pytest.fixture(scope="session")
def guide() -> str:
    return (ROOT / "docs/how-to/pytorch.md").read_text()


def load(attention: str, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation=attention).eval()


@pytest.fixture(scope="session")
def model():
    return load("kvmeld")


@pytest.fixture(scope="session")
def plain():
    return load("sdpa")
