#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write the small models of tests/data/engine/: random decoders with their logits, as Hugging Face transformers computes
them, and tokenizers with their tokens, as SentencePiece's own Python package computes them.

    python3 -m venv venv && venv/bin/pip install torch==2.6.0 transformers==4.46.3 safetensors==0.4.5 numpy==1.26.4 \
        sentencepiece==0.2.0
    OMP_NUM_THREADS=1 venv/bin/python make_engine_reference.py

A decoder comes as config.json, safetensors and reference.json {tokens, logits [tokens, vocab]}. Weights are rounded to the
type they are stored in first; the logits are then computed in float32. A tokenizer comes as tokenizer.model and
reference.json [{text, tokens, fragment}].
"""
import io, json, math, pathlib, random

import sentencepiece
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

FOLDER = pathlib.Path(__file__).parent / "engine"
TOKENS = 48
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=64, max_position_embeddings=128, attn_implementation="eager")
# Its wavelengths lie on both sides of what a context of 32 holds: some stay, some blend, some stretch.
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


def shards(tensors, count):
    """Tensors dealt out in turn."""
    return [{n: tensors[n] for n in list(tensors)[i::count]} for i in range(count)]


def write(name, model, dtype, files=1):
    torch.manual_seed(sum(map(ord, name)))
    for p in model.parameters():  # norms and biases too: all-ones and all-zeros hide mistakes
        noise = torch.randn_like(p)
        p.data = noise / math.sqrt(p.shape[1]) * 1.5 if p.dim() == 2 else (p.data + 0.3 * noise)
        p.data = p.data.to(dtype).float()
    tokens = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS))
    with torch.no_grad():
        logits = model.eval()(tokens).logits[0]
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.config.tie_word_embeddings
    tensors = {n: p.to(dtype).contiguous() for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
        parts = shards(tensors, files)
        for file, part in zip(names, parts):
            save_file(part, folder / file, {"format": "pt"})
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
                 "weight_map": {n: file for file, part in zip(names, parts) for n in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    config = model.config.to_dict()
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    kept = ["architectures", "model_type", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings",
            "attention_bias", "mlp_bias", "head_dim", "use_sliding_window", "sliding_window", "torch_dtype", *SHAPE]
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps({k: config[k] for k in kept if k in config}, indent=1) + "\n")
    rows = ",\n".join("[" + ", ".join(f"{x:.6f}" for x in row) + "]" for row in logits.tolist())
    (folder / "reference.json").write_text(f'{{"tokens": {tokens[0].tolist()},\n"logits": [\n{rows}]}}\n')
    print(f"{name}: {sum(t.nbytes for t in tensors.values())} bytes, logits up to {logits.abs().max():.2f}")


TEXTS = ["", " ", "\n", "a", " a", "a ", "the sea", " the  sea ", "the sea.\nThe\n\n  old man \n", "\n\nwent 1234 times\n",
         "caf\u00e9 \u4f60\u597d \U0001f600", "tab\tand\rreturn", "no\u00a0break", "\u2581 is a space in pieces"]


def write_tokenizer(name, **options):
    draw = random.Random(1)
    words = "the old man and sea went home again saying nothing of ships 12 345 that came in at night.".split()
    sentences = [" ".join(draw.choices(words, k=12)).capitalize() for _ in range(200)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, minloglevel=2,
                                             normalization_rule_name="identity", num_threads=1, **options)
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    whole = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    fragment = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    fragment.override_normalizer_spec(add_dummy_prefix=False, remove_extra_whitespaces=False)
    rows = [json.dumps(dict(text=t, tokens=whole.encode(t), fragment=fragment.encode(t))) for t in TEXTS]
    (folder / "reference.json").write_text("[" + ",\n".join(rows) + "]\n")
    print(f"{name}: {len(model.getvalue())} bytes")


def main():
    # as Llama 2's; as the bundled model's; as SentencePiece's own defaults
    write_tokenizer("tokenizer-prefix", model_type="bpe", vocab_size=340, byte_fallback=True, remove_extra_whitespaces=False)
    write_tokenizer("tokenizer-newline", model_type="bpe", vocab_size=340, byte_fallback=True, remove_extra_whitespaces=False,
                    add_dummy_prefix=False, user_defined_symbols=["\n"], split_digits=True)
    write_tokenizer("tokenizer-default", model_type="unigram", vocab_size=60)

    torch.set_num_threads(1)
    llama = LlamaConfig(**SHAPE, head_dim=8, rms_norm_eps=1e-5, rope_theta=100.0, rope_scaling=LLAMA3, tie_word_embeddings=False)
    write("llama-f32", LlamaForCausalLM(llama), torch.float32)
    qwen2 = Qwen2Config(**SHAPE, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)
    write("qwen2-bf16", Qwen2ForCausalLM(qwen2), torch.bfloat16)
    # heads * head_dim is not hidden_size here, and attention_bias gives o a bias as well
    biased = LlamaConfig(**SHAPE | dict(num_key_value_heads=1), head_dim=6, rms_norm_eps=1e-5, attention_bias=True,
                         tie_word_embeddings=False)
    write("llama-f16-sharded", LlamaForCausalLM(biased), torch.float16, files=2)


if __name__ == "__main__":
    main()
