# SPDX-License-Identifier: MIT
"""The program of docs/how-to/c-interface.md in Python: consumer.py LIBRARY"""
import ctypes
import sys
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_float, c_int32, c_size_t, c_uint32, c_void_p, sizeof

LAYERS, KV_HEADS, GROUP, DIM, PROMPT, STEPS, SLOTS = 2, 2, 2, 64, 256, 32, 64
QUERY, ROW = KV_HEADS * GROUP * DIM, KV_HEADS * DIM


class Error(ctypes.Structure):
    _fields_ = [("code", c_int32), ("message", c_char * 1020)]


class Numbers(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("count", c_size_t), ("type", c_int32)]


class Sized(ctypes.Structure):
    """Of the structs that say their size: what is not given is 0."""

    def __init__(self, **members):
        super().__init__(size=sizeof(type(self)), **members)


class AttentionSpec(Sized):
    _fields_ = [("size", c_size_t), ("kv_heads", c_int32), ("group", c_int32), ("key_dim", c_int32),
                ("value_dim", c_int32), ("scale", c_float), ("soft_cap", c_float),
                ("sink_logits", POINTER(c_float)), ("alibi_slopes", POINTER(c_float)), ("window", c_int32),
                ("check_finite", c_int32), ("rope", c_int32), ("rope_dims", c_int32), ("rope_last", c_int32),
                ("rope_scaling", c_int32), ("rope_base", c_double), ("rope_table", POINTER(c_double)),
                ("rope_table_count", c_size_t), ("rope_factor", c_double), ("rope_low", c_double),
                ("rope_high", c_double), ("rope_fast", c_double), ("rope_slow", c_double),
                ("rope_context", c_int32), ("rope_parts_of_pairs", c_int32)]


class CacheOptions(Sized):
    _fields_ = [("size", c_size_t)] + [(name, c_int32) for name in
                                       ("layers", "requests", "capacity", "keys", "values", "newest")]


class Budget(Sized):
    _fields_ = [("size", c_size_t)] + [(name, c_int32) for name in
                                       ("slots", "trigger", "slack", "most", "sharing", "unused")]


class Queries(Sized):
    _fields_ = [("size", c_size_t), ("q", Numbers), ("tokens", c_int32), ("log_sum_exp", POINTER(c_float)),
                ("log_sum_exp_count", c_size_t), ("hidden_norm", POINTER(c_float)), ("hidden_norm_count", c_size_t)]


class StepInput(Sized):
    _fields_ = [("size", c_size_t), ("q", Numbers), ("k", Numbers), ("v", Numbers),
                ("positions", POINTER(c_int32)), ("position_count", c_size_t)]


kvmeld = ctypes.CDLL(sys.argv[1])
kvmeld.kvmeld_version.restype = c_char_p
kvmeld.kvmeld_cache_new.restype = kvmeld.kvmeld_compressor_new.restype = c_void_p
kvmeld.kvmeld_append.argtypes = [c_void_p, c_int32, POINTER(c_int32), c_size_t, Numbers, Numbers, c_int32,
                                 POINTER(Error)]
error = Error()


def expect(ok):
    if not ok:
        sys.exit(error.message.decode())


bits = 1


def numbers(count):
    global bits
    array = (c_float * count)()
    for i in range(count):
        bits = (bits * 1664525 + 1013904223) & 0xffffffff
        array[i] = (bits >> 8) / 8388608.0 - 1.0
    return array


def view(array):
    return Numbers(ctypes.cast(array, c_void_p), len(array), 0)


def project(tokens):
    return numbers(tokens * QUERY), numbers(tokens * ROW), numbers(tokens * ROW)


spec = AttentionSpec(kv_heads=KV_HEADS, group=GROUP, key_dim=DIM, rope=1, rope_base=10000)
options = CacheOptions(layers=LAYERS, requests=1, capacity=PROMPT + 1)
budget = Budget(slots=SLOTS, sharing=1)
kv = c_void_p(kvmeld.kvmeld_cache_new(byref(spec), c_size_t(1), byref(options), byref(error)))
expect(kv)
meld = c_void_p(kvmeld.kvmeld_compressor_new(kv, b"fold", byref(budget), c_uint32(7), byref(error)))
expect(meld)

request = c_int32(0)
for layer in range(LAYERS):
    q, k, v = project(PROMPT)
    expect(kvmeld.kvmeld_append(kv, layer, byref(request), 1, view(k), view(v), PROMPT, byref(error)) == 0)
    expect(kvmeld.kvmeld_prompt(meld, layer, request, byref(Queries(q=view(q), tokens=PROMPT)), None, byref(error)) == 0)
expect(kvmeld.kvmeld_end_prompt(meld, request, None, byref(error)) == 0)

total = 0.0
out = (c_float * QUERY)()
for _ in range(STEPS):
    for layer in range(LAYERS):
        q, k, v = project(1)
        step = StepInput(q=view(q), k=view(k), v=view(v))
        expect(kvmeld.kvmeld_step(meld, layer, byref(request), c_size_t(1), byref(step), out, c_size_t(QUERY), None,
                                  byref(error)) == 0)
        for x in out:
            total += x

held = c_size_t()
expect(kvmeld.kvmeld_cache_bytes(kv, byref(held), None, byref(error)) == 0)
print(f"kvmeld {kvmeld.kvmeld_version().decode()}: {PROMPT + STEPS} tokens in {held.value} bytes, outputs {total:.4f}")
kvmeld.kvmeld_compressor_free(meld)
kvmeld.kvmeld_cache_free(kv)
