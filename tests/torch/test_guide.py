# SPDX-License-Identifier: MIT
"""What docs/how-to/pytorch.md says is run as it stands, with SmolLM2 from a file or else the bundled model."""

import re

import pytest
import torch
from conftest import MODEL, ROOT
from test_real_models import FILE, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer

SMOLLM2 = {"pretrained_model_name_or_path": MODELS, "gguf_file": FILE}


@pytest.fixture
def programs(guide, monkeypatch, tmp_path):
    """The guide's, which ask the hub for nothing and write into a folder of the test's."""
    by_name, tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
    if (MODELS / FILE).exists():
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda _, **x: by_name(**SMOLLM2, **x))
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: tokenizer(**SMOLLM2))
    else:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda _, **x: by_name(MODEL, **x))
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: LlamaTokenizer.from_pretrained(MODEL))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return re.findall(r"```python\n(.*?)```", guide, re.DOTALL)


def test_the_guide_s_programs_run(programs, capsys):
    first, second = programs
    assert len([line for line in first.splitlines() if line]) <= 14
    names: dict = {}
    exec(compile(first, "docs/how-to/pytorch.md", "exec"), names)  # noqa: S102
    prompt, cache = names["prompt"], names["cache"]
    seen = names["tokens"].shape[1] - 1
    heads = sum(len(layer.heads.length) for layer in cache.layers)
    assert seen > prompt.shape[1]
    assert sum(int(layer.heads.length.sum()) for layer in cache.layers) <= max(32, -(-seen // 10)) * heads
    exec(compile(second, "docs/how-to/pytorch.md", "exec"), names)  # noqa: S102
    assert len(capsys.readouterr().out.splitlines()) >= 3 + 2
    kept, one, model = names["cache"], names["out"], names["model"]
    assert kept.get_seq_length() == prompt.shape[1]  # as it was, after all questions
    again = model.generate(names["tokens"], past_key_values=kept, max_new_tokens=12, do_sample=False)
    assert torch.equal(again, one)
