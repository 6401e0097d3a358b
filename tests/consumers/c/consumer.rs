// SPDX-License-Identifier: MIT
//! The program of docs/how-to/c-interface.md in Rust, without crates.
use std::ffi::{c_char, c_void, CStr};
use std::ptr::{null, null_mut};

const LAYERS: i32 = 2;
const KV_HEADS: usize = 2;
const GROUP: usize = 2;
const DIM: usize = 64;
const PROMPT: usize = 256;
const STEPS: usize = 32;
const QUERY: usize = KV_HEADS * GROUP * DIM;
const ROW: usize = KV_HEADS * DIM;

#[repr(C)]
struct Error {
    code: i32,
    message: [c_char; 1020],
}

#[repr(C)]
struct Numbers {
    data: *const c_void,
    count: usize,
    kind: i32,
}

#[repr(C)]
struct AttentionSpec {
    size: usize,
    kv_heads: i32,
    group: i32,
    key_dim: i32,
    value_dim: i32,
    scale: f32,
    soft_cap: f32,
    sink_logits: *const f32,
    alibi_slopes: *const f32,
    window: i32,
    check_finite: i32,
    rope: i32,
    rope_dims: i32,
    rope_last: i32,
    rope_scaling: i32,
    rope_base: f64,
    rope_table: *const f64,
    rope_table_count: usize,
    rope_factor: f64,
    rope_low: f64,
    rope_high: f64,
    rope_fast: f64,
    rope_slow: f64,
    rope_context: i32,
    rope_parts_of_pairs: i32,
}

#[repr(C)]
struct CacheOptions {
    size: usize,
    layers: i32,
    requests: i32,
    capacity: i32,
    keys: i32,
    values: i32,
    newest: i32,
}

// As in an earlier header, without `bytes`: the library takes its size.
#[repr(C)]
struct Budget {
    size: usize,
    slots: i32,
    trigger: i32,
    slack: i32,
    most: i32,
    sharing: i32,
    unused: i32,
}

#[repr(C)]
struct Queries {
    size: usize,
    q: Numbers,
    tokens: i32,
    log_sum_exp: *const f32,
    log_sum_exp_count: usize,
    hidden_norm: *const f32,
    hidden_norm_count: usize,
}

#[repr(C)]
struct StepInput {
    size: usize,
    q: Numbers,
    k: Numbers,
    v: Numbers,
    positions: *const i32,
    position_count: usize,
}

#[link(name = "kvmeld")]
extern "C" {
    fn kvmeld_version() -> *const c_char;
    fn kvmeld_cache_new(specs: *const AttentionSpec, count: usize, options: *const CacheOptions, error: *mut Error)
        -> *mut c_void;
    fn kvmeld_cache_free(cache: *mut c_void);
    fn kvmeld_cache_bytes(cache: *const c_void, bytes: *mut usize, reserved: *mut usize, error: *mut Error) -> i32;
    fn kvmeld_append(cache: *mut c_void, layer: i32, requests: *const i32, count: usize, k: Numbers, v: Numbers,
        tokens: i32, error: *mut Error) -> i32;
    fn kvmeld_compressor_new(cache: *mut c_void, policy: *const c_char, budget: *const Budget, given: u32,
        error: *mut Error) -> *mut c_void;
    fn kvmeld_compressor_free(compressor: *mut c_void);
    fn kvmeld_prompt(compressor: *mut c_void, layer: i32, request: i32, queries: *const Queries,
        executor: *const c_void, error: *mut Error) -> i32;
    fn kvmeld_end_prompt(compressor: *mut c_void, request: i32, executor: *const c_void, error: *mut Error) -> i32;
    fn kvmeld_step(compressor: *mut c_void, layer: i32, requests: *const i32, count: usize, input: *const StepInput,
        out: *mut f32, out_count: usize, executor: *const c_void, error: *mut Error) -> i32;
}

fn view(x: &[f32]) -> Numbers {
    Numbers { data: x.as_ptr().cast(), count: x.len(), kind: 0 }
}

/// In place of a model: pseudo-random rows.
struct Model {
    bits: u32,
}

impl Model {
    fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| {
                self.bits = self.bits.wrapping_mul(1664525).wrapping_add(1013904223);
                (self.bits >> 8) as f32 / 8388608.0 - 1.0
            })
            .collect()
    }
    fn project(&mut self, tokens: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        (self.numbers(tokens * QUERY), self.numbers(tokens * ROW), self.numbers(tokens * ROW))
    }
}

fn main() {
    let mut error = Error { code: 0, message: [0; 1020] };
    let e: *mut Error = &mut error;
    let expect = |ok: bool| {
        if !ok {
            panic!("{}", unsafe { CStr::from_ptr((*e).message.as_ptr()) }.to_string_lossy());
        }
    };
    unsafe {
        let mut spec: AttentionSpec = std::mem::zeroed(); // 0 is a default
        spec.size = std::mem::size_of::<AttentionSpec>();
        (spec.kv_heads, spec.group, spec.key_dim) = (KV_HEADS as i32, GROUP as i32, DIM as i32);
        (spec.rope, spec.rope_base) = (1, 10000.0);
        let mut options: CacheOptions = std::mem::zeroed();
        options.size = std::mem::size_of::<CacheOptions>();
        (options.layers, options.requests, options.capacity) = (LAYERS, 1, PROMPT as i32 + 1);
        let mut budget: Budget = std::mem::zeroed();
        budget.size = std::mem::size_of::<Budget>();
        (budget.slots, budget.sharing) = (64, 1);

        let kv = kvmeld_cache_new(&spec, 1, &options, e);
        expect(!kv.is_null());
        let meld = kvmeld_compressor_new(kv, b"fold\0".as_ptr().cast(), &budget, 7, e);
        expect(!meld.is_null());

        let mut model = Model { bits: 1 };
        let request = 0;
        for layer in 0..LAYERS {
            let (q, k, v) = model.project(PROMPT);
            let tokens = PROMPT as i32;
            expect(kvmeld_append(kv, layer, &request, 1, view(&k), view(&v), tokens, e) == 0);
            let mut queries: Queries = std::mem::zeroed();
            queries.size = std::mem::size_of::<Queries>();
            (queries.q, queries.tokens) = (view(&q), tokens);
            expect(kvmeld_prompt(meld, layer, request, &queries, null(), e) == 0);
        }
        expect(kvmeld_end_prompt(meld, request, null(), e) == 0);

        let mut sum = 0.0;
        let mut out = [0.0_f32; QUERY];
        for _ in 0..STEPS {
            for layer in 0..LAYERS {
                let (q, k, v) = model.project(1);
                let mut step: StepInput = std::mem::zeroed();
                step.size = std::mem::size_of::<StepInput>();
                (step.q, step.k, step.v) = (view(&q), view(&k), view(&v));
                expect(kvmeld_step(meld, layer, &request, 1, &step, out.as_mut_ptr(), QUERY, null(), e) == 0);
                for x in out {
                    sum += f64::from(x);
                }
            }
        }

        let mut bytes = 0;
        expect(kvmeld_cache_bytes(kv, &mut bytes, null_mut(), e) == 0);
        let version = CStr::from_ptr(kvmeld_version()).to_string_lossy();
        println!("kvmeld {version}: {} tokens in {bytes} bytes, outputs {sum:.4}", PROMPT + STEPS);
        kvmeld_compressor_free(meld);
        kvmeld_cache_free(kv);
    }
}
