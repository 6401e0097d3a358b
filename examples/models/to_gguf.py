#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A Hugging Face folder of a llama (config.json, one model.safetensors, tokenizer.model) as GGUF, for llama.cpp.

    to_gguf.py FOLDER OUT.gguf [--type f32|f16]

Only numpy and gguf are needed. The SentencePiece model goes in with its pieces, scores and kinds, so that llama.cpp
tokenises as SentencePiece does; a folder without one becomes a model whose tokens are bytes.
"""
import argparse
import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np


class Safetensors:
    """Tensors of one file, in float32."""

    def __init__(self, path: Path):
        self.raw = path.read_bytes()
        (length,) = struct.unpack("<Q", self.raw[:8])
        self.header = json.loads(self.raw[8 : 8 + length])
        self.header.pop("__metadata__", None)
        self.begin = 8 + length

    def __call__(self, name: str) -> np.ndarray:
        entry = self.header[name]
        first, last = entry["data_offsets"]
        kinds = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
        if entry["dtype"] not in kinds:
            sys.exit(f"{name}: expected BF16, F16 or F32, got {entry['dtype']}")
        kind = np.dtype(kinds[entry["dtype"]])
        x = np.frombuffer(self.raw, kind, (last - first) // kind.itemsize, self.begin + first)
        if entry["dtype"] == "BF16":  # the upper half of a float: exact
            x = (x.astype(np.uint32) << 16).view(np.float32)
        return x.astype(np.float32).reshape(entry["shape"])


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: bytes):
    """(number, value) of a protobuf message: enough of the format to read SentencePiece models."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            sys.exit(f"tokenizer.model: expected a SentencePiece model, got wire type {kind}")
        yield key >> 3, value


def add_tokenizer(out: gguf.GGUFWriter, path: Path, vocab: int) -> None:
    out.add_tokenizer_model("llama")  # SentencePiece
    if not path.exists():
        if vocab != 256:
            sys.exit(f"expected {path} or a vocabulary of 256 bytes, got none and {vocab} tokens")
        byte = gguf.TokenType.BYTE
        out.add_token_list(["\u2581" if b == 32 else f"<0x{b:02X}>" for b in range(256)])
        out.add_token_scores([0.0] * 256)
        out.add_token_types([gguf.TokenType.NORMAL if b == 32 else byte for b in range(256)])
        out.add_add_bos_token(False)
        out.add_add_eos_token(False)
        out.add_add_space_prefix(False)
        return
    pieces, scores, kinds = [], [], []
    prefix, bpe, special = True, False, {40: 0, 41: 1, 42: 2, 43: -1}  # unk, bos, eos, pad: defaults
    for number, value in fields(path.read_bytes()):
        if number == 1:  # pieces
            piece = dict(fields(value))
            pieces.append(piece[1].decode("utf-8"))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, 1))  # the same numbers in GGUF
        elif number == 2:  # trainer_spec
            for n, v in fields(value):
                bpe = bpe or (n == 3 and v == 2)
                if n in special:
                    special[n] = v if v < 1 << 31 else v - (1 << 64)
        elif number == 3:  # normalizer_spec
            prefix = dict(fields(value)).get(3, 1) != 0
    if not bpe:
        sys.exit(f"{path}: expected a BPE model; llama.cpp merges as BPE does")
    for i in range(len(pieces), vocab):  # rows of the embedding that no piece has
        pieces.append(f"<unused{i}>")
        scores.append(0.0)
        kinds.append(int(gguf.TokenType.UNUSED))
    out.add_token_list(pieces)
    out.add_token_scores(scores)
    out.add_token_types(kinds)
    out.add_add_bos_token(False)
    out.add_add_eos_token(False)
    out.add_add_space_prefix(prefix)
    for number, add in ((40, out.add_unk_token_id), (41, out.add_bos_token_id), (42, out.add_eos_token_id)):
        if special[number] >= 0:
            add(special[number])


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns elements (2i, 2i + 1) of this architecture's heads, Hugging Face (i, i + d/2)."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--type", choices=("f32", "f16"), default="f32")
    a = arguments.parse_args()
    c = json.loads((a.folder / "config.json").read_text())
    if c["model_type"] != "llama" or c.get("rope_scaling") or c.get("attention_bias"):
        sys.exit("config.json: expected a llama without rope_scaling and attention_bias")
    tensor = Safetensors(a.folder / "model.safetensors")
    heads, kv_heads = c["num_attention_heads"], c.get("num_key_value_heads", c["num_attention_heads"])
    dim = c.get("head_dim", c["hidden_size"] // heads)
    out = gguf.GGUFWriter(a.out, "llama")
    out.add_name(a.folder.resolve().name)
    out.add_vocab_size(c["vocab_size"])
    out.add_context_length(c.get("max_position_embeddings", 2048))
    out.add_embedding_length(c["hidden_size"])
    out.add_block_count(c["num_hidden_layers"])
    out.add_feed_forward_length(c["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(dim)
    out.add_value_length(dim)
    out.add_rope_dimension_count(dim)
    out.add_rope_freq_base(c.get("rope_theta", 10000.0))
    out.add_layer_norm_rms_eps(c["rms_norm_eps"])
    half = a.type == "f16"
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    add_tokenizer(out, a.folder / "tokenizer.model", c["vocab_size"])

    def add(name: str, w: np.ndarray) -> None:
        out.add_tensor(name, w.astype(np.float16) if half and w.ndim > 1 else w)

    add("token_embd.weight", tensor("model.embed_tokens.weight"))
    add("output_norm.weight", tensor("model.norm.weight"))
    if not c.get("tie_word_embeddings"):
        add("output.weight", tensor("lm_head.weight"))
    for layer in range(c["num_hidden_layers"]):
        source, to = f"model.layers.{layer}.", f"blk.{layer}."
        add(to + "attn_q.weight", interleaved(tensor(source + "self_attn.q_proj.weight"), heads))
        add(to + "attn_k.weight", interleaved(tensor(source + "self_attn.k_proj.weight"), kv_heads))
        for name, theirs in (
            ("attn_norm", "input_layernorm"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            add(f"{to}{name}.weight", tensor(f"{source}{theirs}.weight"))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main()
