// SPDX-License-Identifier: MIT
// What kvmeld.h declares, by the C++ interface: arguments become spans, exceptions become codes.
#include <algorithm>  // std::ranges::count
#include <array>
#include <atomic>
#include <cstddef>    // offsetof
#include <cstring>    // std::memcpy
#include <exception>  // std::exception_ptr
#include <istream>
#include <memory>  // std::shared_ptr
#include <new>     // std::bad_alloc
#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>
#include <utility>  // std::move, std::forward
#include <variant>
#include <vector>

#include "kvmeld.h"
#include "kvmeld/peers.hpp"

#ifndef KVMELD_C_POLICY  // what a policy's text may name; bench/ compiles a few alone
#define KVMELD_C_POLICY kvmeld::any_policy_or_peer
#endif

namespace {

using namespace kvmeld;
using any = KVMELD_C_POLICY;
using caches = std::variant<cache, strided_cache, paged_cache>;

// --------------------------------------------------------------------------- errors

static_assert(int{KVMELD_CORRUPT_FILE} == 1 + static_cast<int>(errc::corrupt_file));
static_assert(int{KVMELD_K4} == static_cast<int>(storage::k4));
static_assert(int{KVMELD_PAGES_HND} == static_cast<int>(layout::pages_hnd));
static_assert(std::same_as<index_t, std::int32_t>);

kvmeld_code answer(kvmeld_error* error, kvmeld_code code, std::string_view text) {
  if (error != nullptr) {
    constexpr std::size_t room = sizeof error->message - 1;
    std::size_t size = text.size();
    if (size > room) {
      size = room - 3;
      while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0U) == 0x80U) {
        --size;  // no part of a character in UTF-8
      }
    }
    error->code = code;
    std::memcpy(error->message, text.data(), size);
    error->message[size] = '\0';
    if (size < text.size()) {
      std::memcpy(error->message + size, "...", 4);
    }
  }
  return code;
}

/// Carries out `call`; what it throws becomes a code and a text.
template <class Call>
kvmeld_code answered(kvmeld_error* error, const Call& call) noexcept {
  try {
    call();
    return answer(error, KVMELD_OK, "");
  } catch (const kvmeld::error& e) {
    return answer(error, 1 + static_cast<kvmeld_code>(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return answer(error, KVMELD_NO_MEMORY, "kvmeld: expected memory for the call, got none");
  } catch (const std::exception& e) {
    return answer(error, KVMELD_FAILED, e.what());
  } catch (...) {
    return answer(error, KVMELD_FAILED, "kvmeld: expected no unknown exception, got one");
  }
}

// --------------------------------------------------------------------------- arguments

template <class T>
T& given(const char* call, const char* what, T* x) {
  expects(x != nullptr, call, ": expected ", what, ", got null");
  return *x;
}

/// Sizes of `T` in earlier versions of the header: where the members begin that came later.
template <class T>
constexpr std::array<std::size_t, 0> earlier_sizes{};
template <>
constexpr std::array earlier_sizes<kvmeld_budget>{offsetof(kvmeld_budget, bytes)};

template <class T>
void expect_size(const char* call, const char* what, const T* x) {
  const std::size_t size = given(call, what, x).size;
  expects(size == sizeof(T) || std::ranges::count(earlier_sizes<T>, size) > 0, call, ": expected ",
          what, " with a size of ", sizeof(T), " (sizeof), got ", size);
}

/// A struct that says its size, whole: what an earlier version lacks is 0.
template <class T>
T sized(const char* call, const char* what, const T* x) {
  expect_size(call, what, x);
  T whole{};
  std::memcpy(&whole, x, x->size);
  return whole;
}

/// A struct that says its size, to be written to. None has grown.
template <class T>
T& sized_to(const char* call, const char* what, T* x) {
  static_assert(earlier_sizes<T>.empty());
  expect_size(call, what, x);
  return *x;
}

template <class T>
std::span<T> numbers(const char* call, const char* what, void* data, std::size_t count) {
  expects(reinterpret_cast<std::uintptr_t>(data) % alignof(T) == 0, call, ": expected ", what,
          " aligned to ", alignof(T), " bytes, got others");
  return {static_cast<T*>(data), count};
}

any_span span_of(const char* call, const char* what, const kvmeld_numbers& x) {
  void* const data = const_cast<void*>(x.data);  // any_span only reads
  switch (x.type) {
    case KVMELD_F32:
      return numbers<float>(call, what, data, x.count);
    case KVMELD_F16:
      return numbers<Eigen::half>(call, what, data, x.count);
    case KVMELD_BF16:
      return numbers<Eigen::bfloat16>(call, what, data, x.count);
    default:
      expects(false, call, ": expected ", what, " in KVMELD_F32, F16 or BF16 (0 to 2), got ",
              x.type);
      return {};
  }
}

/// Optional floats; null: none.
std::span<const float> floats(const char* call, const char* what, const float* data,
                              std::size_t count) {
  expects(data != nullptr || count == 0, call, ": expected no count of ", what, " (NULL), got ",
          count);
  return {data, count};
}

template <class E>
E choice(const char* call, const char* what, std::int32_t x, E most) {
  expects(x >= 0 && x <= static_cast<std::int32_t>(most), call, ": expected ", what, " of 0 to ",
          static_cast<std::int32_t>(most), ", got ", x);
  return static_cast<E>(x);
}

template <class T>
T or_default(T x, std::type_identity_t<T> otherwise) {
  return x == 0 ? otherwise : x;
}

rotary rope_of(const kvmeld_attention_spec& s) {
  const auto pairs = choice("attention_spec", "rope", s.rope, std::int32_t{KVMELD_INTERLEAVED});
  expects(
      pairs != KVMELD_NO_ROPE || (s.rope_base == 0 && s.rope_table == nullptr && s.rope_dims == 0 &&
                                  s.rope_last == 0 && s.rope_scaling == 0 && s.rope_factor == 0),
      "attention_spec: expected rope (KVMELD_HALVES or KVMELD_INTERLEAVED) with its base, got "
      "KVMELD_NO_ROPE");
  expects(s.rope_table != nullptr || s.rope_table_count == 0,
          "attention_spec: expected no count of a rope_table (NULL), got ", s.rope_table_count);
  expects(s.rope_table == nullptr || s.rope_base == 0,
          "attention_spec: expected rope_base or rope_table, got both");
  rotary r;
  if (pairs == KVMELD_NO_ROPE) {
    return r;
  }
  const auto pairing =
      pairs == KVMELD_HALVES ? rotary::pairing::halves : rotary::pairing::interleaved;
  if (s.rope_table != nullptr) {
    r = rotary::table({s.rope_table, s.rope_table_count}, pairing);
  } else {
    r = pairs == KVMELD_HALVES ? rotary::halves(s.rope_base) : rotary::interleaved(s.rope_base);
  }
  r = s.rope_dims != 0 ? r.dims(s.rope_dims) : r;
  r = s.rope_last != 0 ? r.last() : r;
  switch (choice("attention_spec", "rope_scaling", s.rope_scaling, std::int32_t{KVMELD_YARN})) {
    case KVMELD_LINEAR:
      return r.linear(s.rope_factor);
    case KVMELD_LLAMA3:
      return r.llama3({.factor = s.rope_factor,
                       .low = or_default(s.rope_low, 1),
                       .high = or_default(s.rope_high, 4),
                       .original_context = or_default(s.rope_context, 8192)});
    case KVMELD_YARN:
      return r.yarn({.factor = s.rope_factor,
                     .original_context = or_default(s.rope_context, 4096),
                     .fast = or_default(s.rope_fast, 32),
                     .slow = or_default(s.rope_slow, 1),
                     .truncate = s.rope_parts_of_pairs == 0});
    default:
      expects(s.rope_factor == 0,
              "attention_spec: expected a rope_scaling with its factor, got "
              "KVMELD_NO_SCALING");
      return r;
  }
}

attention_spec spec_of(const kvmeld_attention_spec& s) {
  attention_spec spec{.kv_heads = s.kv_heads,
                      .group = or_default(s.group, 1),
                      .key_dim = s.key_dim,
                      .value_dim = s.value_dim,
                      .scale = s.scale,
                      .rope = rope_of(s),
                      .soft_cap = s.soft_cap,
                      .window = s.window,
                      .check_finite = s.check_finite != 0};
  (void)spec.checked();  // before so many numbers are read
  const auto of_heads = [&](const float* x) {
    return x == nullptr ? std::vector<float>()
                        : std::vector<float>(x, x + as_size(spec.kv_heads, spec.group));
  };
  spec.sink_logits = of_heads(s.sink_logits), spec.alibi_slopes = of_heads(s.alibi_slopes);
  return spec;
}

/// Refused before anything of an array is read: other counts than 1 or the layers'.
void expect_each(const char* call, const char* what, std::size_t count, index_t layers) {
  expects(count == 1 || (layers > 0 && count == as_size(layers)), call, ": expected ", what,
          " of all layers (1), or of each of ", layers, ", got ", count);
}

std::vector<attention_spec> specs_of(const char* call, const kvmeld_attention_spec* specs,
                                     std::size_t count, index_t layers) {
  expect_each(call, "attention_spec", count, layers);
  std::vector<attention_spec> all;
  for (std::size_t i = 0; i < count; ++i) {
    all.push_back(spec_of(sized(call, "attention_spec", specs + i)));
  }
  return all;
}

cache_extents extents_of(const kvmeld_cache_options& o) {
  return {or_default(o.layers, 1), or_default(o.requests, 1), o.capacity};
}

/// Of a cache over an engine's memory, which says what it holds.
cache_extents extents_of(const char* call, const kvmeld_cache_options* options) {
  const auto o = sized(call, "options", options);
  expects(o.keys == 0 && o.values == 0 && o.newest == 0, call,
          ": expected no keys, values or newest in options (the memory's type says it), got some");
  return extents_of(o);
}

std::vector<rows> rows_of(const char* call, const char* what, const kvmeld_memory* memory,
                          std::size_t count, index_t layers) {
  expect_each(call, what, count, layers);
  std::vector<rows> all;
  for (std::size_t i = 0; i < count; ++i) {
    const kvmeld_memory m = sized(call, what, memory + i);
    const auto how = choice(call, "a layout", m.layout, std::int32_t{KVMELD_STRIDES});
    const strides by_hand{m.layer, m.request, m.head, m.row, m.element, m.page};
    expects(how == KVMELD_STRIDES || by_hand == strides{.element = 0}, call,
            ": expected strides with KVMELD_STRIDES alone, got some with layout ", how);
    const std::variant<layout, strides> lie =
        how == KVMELD_STRIDES ? std::variant<layout, strides>(by_hand) : static_cast<layout>(how);
    const auto add = [&]<class T>(T) {
      all.emplace_back(numbers<T>(call, what, m.data, m.count), lie);
    };
    switch (choice(call, "a type of memory", m.type, storage::q6_0)) {
      case storage::f32:
        add(float{});
        break;
      case storage::f16:
        add(Eigen::half{});
        break;
      case storage::bf16:
        add(Eigen::bfloat16{});
        break;
      case storage::q8_0:
        add(q8_0{});
        break;
      case storage::q4_0:
        add(q4_0{});
        break;
      default:
        add(q6_0{});
    }
  }
  return all;
}

/// The heads of a layer's requests. A list of more than there are has one twice: it is not read.
head_selection heads_of(const char* call, const cache_base& kv, std::int32_t layer,
                        const std::int32_t* requests, std::size_t count) {
  expects(count <= as_size(kv.requests()), call, ": expected at most ", kv.requests(),
          " requests, got ", count);
  return kv.heads(layer, std::span(requests, count));
}

observation_needs needs_of_flags(std::uint32_t flags) {
  expects(flags <= KVMELD_STEP_ATTENDS,
          "compressor_new: expected `given` of KVMELD_PROBABILITIES, KVMELD_LOG_SUM_EXP and "
          "KVMELD_QUERY (0 to 7), got ",
          flags);
  return {(flags & KVMELD_PROBABILITIES) != 0, (flags & KVMELD_LOG_SUM_EXP) != 0,
          (flags & KVMELD_QUERY) != 0};
}

/// The caller's executor; null: on the calling thread.
class callback {
 public:
  callback(const char* call, const kvmeld_executor* on)
      : call_(call), on_(on == nullptr ? kvmeld_executor{} : sized(call, "executor", on)) {
    expects(on == nullptr || on_.run != nullptr, call, ": expected an executor's run, got null");
  }

  index_t workers() const { return on_.run == nullptr ? 1 : on_.workers; }

  template <class F>
  void operator()(index_t count, F f) const {
    if (on_.run == nullptr) {
      serial{}(count, std::move(f));
      return;
    }
    work<F> all{f, count, workers()};
    on_.run(on_.context, count, &work<F>::one, &all);
    if (all.error) {
      std::rethrow_exception(all.error);
    }
    const auto n = static_cast<std::uint64_t>(count);
    expects(all.done == count && all.sum == n * (n - 1) / 2, call_,
            ": expected an executor that calls each of ", count, " items once, on workers 0 to ",
            workers() - 1, ", got ", all.done.load(), " such calls",
            all.done == count ? ", of some items twice" : "");
  }

 private:
  template <class F>
  struct work {
    F& f;
    index_t count, workers;
    std::atomic<index_t> done = 0;
    std::atomic<std::uint64_t> sum = 0;  // of the items: one twice is not another one
    std::atomic<bool> failed = false;
    std::exception_ptr error = {};

    static void one(void* all, std::int32_t i, std::int32_t worker) noexcept {
      work& w = *static_cast<work*>(all);
      if (i < 0 || i >= w.count || worker < 0 || worker >= w.workers) {
        return;  // not counted
      }
      try {
        w.f(i, worker);
      } catch (...) {
        if (!w.failed.exchange(true)) {
          w.error = std::current_exception();
        }
      }
      w.sum += static_cast<std::uint64_t>(i);
      ++w.done;
    }
  };

  const char* call_;
  const kvmeld_executor on_;
};
static_assert(executor<callback>);

// --------------------------------------------------------------------------- streams

class to_callback : public std::streambuf {
 public:
  to_callback(kvmeld_write write, void* context) : write_(write), context_(context) {}

 protected:
  std::streamsize xsputn(const char* data, std::streamsize size) override {
    const auto bytes = static_cast<std::size_t>(size);
    return write_(context_, data, bytes) == bytes ? size : 0;
  }
  int_type overflow(int_type c) override {
    const char one = traits_type::to_char_type(c);
    return xsputn(&one, 1) == 1 ? c : traits_type::eof();
  }

 private:
  kvmeld_write write_;
  void* context_;
};

/// Reads no byte before it is asked for.
class from_callback : public std::streambuf {
 public:
  from_callback(kvmeld_read read, void* context) : read_(read), context_(context) {}

 protected:
  std::streamsize xsgetn(char* to, std::streamsize size) override {
    const auto bytes = static_cast<std::size_t>(size);
    std::size_t got = 0;
    for (std::size_t now = 1; got < bytes && now > 0; got += now) {
      now = read_(context_, to + got, bytes - got);
      now = now <= bytes - got ? now : 0;  // as of a read() that returned -1
    }
    return static_cast<std::streamsize>(got);
  }
  int_type uflow() override {
    char one = 0;
    return xsgetn(&one, 1) == 1 ? traits_type::to_int_type(one) : traits_type::eof();
  }

 private:
  kvmeld_read read_;
  void* context_;
};

}  // namespace

// --------------------------------------------------------------------------- handles

struct kvmeld_cache {
  std::shared_ptr<caches> kv;  // compressors have it too

  cache_base& base() const {
    return std::visit([](auto& c) -> cache_base& { return c; }, *kv);
  }
};

struct kvmeld_compressor {
  std::shared_ptr<caches> kv;
  compressor<any> meld;

  template <class... Arguments>
  kvmeld_compressor(const std::shared_ptr<caches>& cache, auto& concrete, Arguments&&... rest)
      : kv(cache), meld(concrete, std::forward<Arguments>(rest)...) {}

  const cache_base& base() const {
    return std::visit([](auto& c) -> const cache_base& { return c; }, *kv);
  }
};

namespace {

/// A handle, or null if `make` throws.
template <class Handle, class Make>
Handle* made(kvmeld_error* error, const Make& make) {
  Handle* handle = nullptr;
  (void)answered(error, [&] { handle = make(); });
  return handle;
}

template <class Cache>
kvmeld_cache* new_cache(auto&&... arguments) {
  auto kv = std::make_shared<caches>(std::in_place_type<Cache>, arguments...);
  return new kvmeld_cache{std::move(kv)};
}

kvmeld_compressor& own(const char* call, kvmeld_compressor* c) {
  return given(call, "a compressor", c);
}
kvmeld_cache& own(const char* call, kvmeld_cache* c) { return given(call, "a cache", c); }
const kvmeld_compressor& own(const char* call, const kvmeld_compressor* c) {
  return given(call, "a compressor", c);
}
const kvmeld_cache& own(const char* call, const kvmeld_cache* c) {
  return given(call, "a cache", c);
}

step_input input_of(const char* call, const kvmeld_step_input* input) {
  const auto in = sized(call, "in", input);
  expects(in.positions != nullptr || in.position_count == 0, call,
          ": expected no count of positions (NULL), got ", in.position_count);
  return {span_of(call, "q", in.q),
          span_of(call, "k", in.k),
          span_of(call, "v", in.v),
          {in.positions, in.position_count}};
}

/// The head's place in the cache.
index_t head_at(const char* call, const cache_base& kv, std::int32_t layer, std::int32_t request,
                std::int32_t kv_head) {
  expects(kv_head >= 0 && kv_head < kv.kv_heads(), call, ": expected a KV head of 0 to ",
          kv.kv_heads() - 1, ", got ", kv_head);
  return kv.heads(layer, request)[kv_head];
}

void put_bytes(const auto& of, std::size_t* bytes, std::size_t* reserved) {
  if (bytes != nullptr) {
    *bytes = of.bytes();
  }
  if (reserved != nullptr) {
    *reserved = of.reserved_bytes();
  }
}

}  // namespace

// --------------------------------------------------------------------------- caches

#define KVMELD_TEXT_OF(x) #x
#define KVMELD_TEXT(x) KVMELD_TEXT_OF(x)
const char* kvmeld_version() {
  return KVMELD_TEXT(KVMELD_VERSION_MAJOR) "." KVMELD_TEXT(KVMELD_VERSION_MINOR) "." KVMELD_TEXT(
      KVMELD_VERSION_PATCH);
}

kvmeld_cache* kvmeld_cache_new(const kvmeld_attention_spec* specs, size_t spec_count,
                               const kvmeld_cache_options* options, kvmeld_error* error) {
  return made<kvmeld_cache>(error, [&] {
    constexpr const char* call = "cache_new";
    const kvmeld_cache_options o = sized(call, "options", options);
    const cache_extents extents = extents_of(o);
    const auto all = specs_of(call, specs, spec_count, extents.layers);
    return new_cache<cache>(std::span(all),
                            cache_options{.layers = extents.layers,
                                          .requests = extents.requests,
                                          .capacity = extents.capacity,
                                          .keys = choice(call, "keys", o.keys, storage::k4),
                                          .values = choice(call, "values", o.values, storage::k4),
                                          .newest = o.newest});
  });
}

kvmeld_cache* kvmeld_strided_cache_new(const kvmeld_attention_spec* specs, size_t spec_count,
                                       const kvmeld_cache_options* options,
                                       const kvmeld_memory* keys, const kvmeld_memory* values,
                                       size_t memories, kvmeld_error* error) {
  return made<kvmeld_cache>(error, [&] {
    constexpr const char* call = "strided_cache_new";
    const cache_extents extents = extents_of(call, options);
    const auto all = specs_of(call, specs, spec_count, extents.layers);
    const auto k = rows_of(call, "keys", keys, memories, extents.layers),
               v = rows_of(call, "values", values, memories, extents.layers);
    return new_cache<strided_cache>(std::span(all), extents, layer_rows(k), layer_rows(v));
  });
}

kvmeld_cache* kvmeld_paged_cache_new(const kvmeld_attention_spec* specs, size_t spec_count,
                                     const kvmeld_cache_options* options, const kvmeld_memory* keys,
                                     const kvmeld_memory* values, size_t memories,
                                     const kvmeld_page_tables* tables, kvmeld_error* error) {
  return made<kvmeld_cache>(error, [&] {
    constexpr const char* call = "paged_cache_new";
    const cache_extents extents = extents_of(call, options);
    const auto all = specs_of(call, specs, spec_count, extents.layers);
    const auto k = rows_of(call, "keys", keys, memories, extents.layers),
               v = rows_of(call, "values", values, memories, extents.layers);
    const kvmeld_page_tables t = sized(call, "tables", tables);
    return new_cache<paged_cache>(
        std::span(all), extents, layer_rows(k), layer_rows(v),
        page_tables{.pages = {t.pages, t.count}, .slots = t.slots, .stride = t.stride});
  });
}

void kvmeld_cache_free(kvmeld_cache* cache) { delete cache; }

kvmeld_code kvmeld_append(kvmeld_cache* cache, int32_t layer, const int32_t* requests,
                          size_t request_count, kvmeld_numbers k, kvmeld_numbers v, int32_t tokens,
                          kvmeld_error* error) {
  return answered(error, [&] {
    const any_span keys = span_of("append", "keys", k), values = span_of("append", "values", v);
    std::visit(
        [&](auto& kv) {
          kv.append(heads_of("append", kv, layer, requests, request_count), keys, values, tokens);
        },
        *own("append", cache).kv);
  });
}

kvmeld_code kvmeld_commit(kvmeld_cache* cache, int32_t layer, const int32_t* requests,
                          size_t request_count, int32_t tokens, kvmeld_error* error) {
  return answered(error, [&] {
    std::visit(
        [&](auto& kv) {
          kv.commit(heads_of("commit", kv, layer, requests, request_count), tokens);
        },
        *own("commit", cache).kv);
  });
}

kvmeld_code kvmeld_lengths(const kvmeld_cache* cache, int32_t layer, const int32_t* requests,
                           size_t request_count, int32_t* lengths, size_t length_count,
                           kvmeld_error* error) {
  return answered(error, [&] {
    cache_base& kv = own("lengths", cache).base();
    const head_selection heads = heads_of("lengths", kv, layer, requests, request_count);
    expects(length_count == as_size(heads.count()), "lengths: expected lengths [", heads.count(),
            "], got ", length_count);
    for (std::size_t i = 0; i < length_count; ++i) {
      (&given("lengths", "lengths", lengths))[i] = kv.head(heads[static_cast<index_t>(i)]).length();
    }
  });
}

kvmeld_code kvmeld_head_of(const kvmeld_cache* cache, int32_t layer, int32_t request,
                           int32_t kv_head, kvmeld_head* head, kvmeld_error* error) {
  return answered(error, [&] {
    constexpr const char* call = "head_of";
    cache_base& kv = own(call, cache).base();
    kvmeld_head& to = sized_to(call, "head", head);
    const head_ref from = kv.head(head_at(call, kv, layer, request, kv_head));
    const bool strided = !std::holds_alternative<paged_cache>(*cache->kv);
    const head_rows keys = strided ? from.keys_from(0) : head_rows{},
                    values = strided ? from.values_from(0) : head_rows{};
    to = {.size = sizeof to,
          .length = from.length(),
          .capacity = from.capacity(),
          .next_position = from.next_position(),
          .log_mass = from.metadata().log_mass,
          .positions = from.metadata().position,
          .keys = keys.data,
          .values = values.data,
          .key_row = keys.row,
          .value_row = values.row};
  });
}

kvmeld_code kvmeld_free_pages(kvmeld_cache* cache, int32_t layer, int32_t request, int32_t kv_head,
                              int32_t** entries, size_t* count, kvmeld_error* error) {
  return answered(error, [&] {
    constexpr const char* call = "free_pages";
    auto* const kv = std::get_if<paged_cache>(own(call, cache).kv.get());
    expects(errc::unsupported, kv != nullptr, call, ": expected a cache in pages, got another");
    int32_t*& first = given(call, "entries", entries);
    size_t& size = given(call, "count", count);
    const auto free = kv->free_pages(head_at(call, *kv, layer, request, kv_head));
    first = const_cast<int32_t*>(free.data());  // of the caller's own table
    size = free.size();
  });
}

kvmeld_code kvmeld_cache_bytes(const kvmeld_cache* cache, size_t* bytes, size_t* reserved,
                               kvmeld_error* error) {
  return answered(error, [&] { put_bytes(own("cache_bytes", cache).base(), bytes, reserved); });
}

// --------------------------------------------------------------------------- policies, budgets

kvmeld_code kvmeld_needs_of(const char* policy, kvmeld_policy_needs* needs, kvmeld_error* error) {
  return answered(error, [&] {
    kvmeld_policy_needs& to = sized_to("needs_of", "needs", needs);
    const policy_needs from =
        needs_of(make_policy<any>(&given("needs_of", "a policy's text", policy)));
    to = {.size = sizeof to,
          .queries = from.queries,
          .step = (from.step.probabilities ? std::uint32_t{KVMELD_PROBABILITIES} : 0U) |
                  (from.step.log_sum_exp ? std::uint32_t{KVMELD_LOG_SUM_EXP} : 0U) |
                  (from.step.query ? std::uint32_t{KVMELD_QUERY} : 0U),
          .decodes = from.decodes,
          .shares = from.shares,
          .soft_cap = from.attention.soft_cap,
          .sinks = from.attention.sinks,
          .alibi = from.attention.alibi,
          .one_memory = from.attention.one_memory,
          .seals = from.attention.seals,
          .unused = 0};
  });
}

kvmeld_compressor* kvmeld_compressor_new(kvmeld_cache* cache, const char* policy,
                                         const kvmeld_budget* limit, uint32_t given_by_caller,
                                         kvmeld_error* error) {
  return made<kvmeld_compressor>(error, [&] {
    constexpr const char* call = "compressor_new";
    const auto& kv = own(call, cache).kv;
    const kvmeld_budget b = sized(call, "a budget", limit);
    expects(b.unused == 0, call, ": expected a budget with `unused` of 0, got ", b.unused);
    const auto sharing = choice(call, "sharing", b.sharing, std::int32_t{KVMELD_SAME_TOKENS});
    const budget held{.slots = b.slots,
                      .trigger = b.trigger,
                      .slack = b.slack,
                      .most = b.most,
                      .is_shared = sharing >= KVMELD_SHARED,
                      .by_layer = sharing >= KVMELD_SHARED_BY_LAYER,
                      .alike = sharing == KVMELD_SAME_TOKENS,
                      .size = b.bytes};
    const observation_needs step = needs_of_flags(given_by_caller);
    const any p = make_policy<any>(&given(call, "a policy's text", policy));
    return std::visit([&](auto& c) { return new kvmeld_compressor(kv, c, p, held, step); }, *kv);
  });
}

void kvmeld_compressor_free(kvmeld_compressor* compressor) { delete compressor; }

kvmeld_code kvmeld_compressor_bytes(const kvmeld_compressor* compressor, size_t* bytes,
                                    size_t* reserved, kvmeld_error* error) {
  return answered(error,
                  [&] { put_bytes(own("compressor_bytes", compressor).meld, bytes, reserved); });
}

// --------------------------------------------------------------------------- a prompt

kvmeld_code kvmeld_prompt(kvmeld_compressor* compressor, int32_t layer, int32_t request,
                          const kvmeld_queries* from, const kvmeld_executor* executor,
                          kvmeld_error* error) {
  return answered(error, [&] {
    constexpr const char* call = "prompt";
    auto& to = own(call, compressor);
    const kvmeld_queries in = sized(call, "queries", from);
    const head_selection heads = to.base().heads(layer, request);
    kvmeld::queries q(span_of(call, "q", in.q), in.tokens, to.base().spec());
    const auto log_sums = floats(call, "log_sum_exp", in.log_sum_exp, in.log_sum_exp_count),
               norms = floats(call, "hidden_norm", in.hidden_norm, in.hidden_norm_count);
    q = log_sums.data() == nullptr ? q : q.with_log_sum_exp(log_sums);
    q = norms.data() == nullptr ? q : q.with_hidden_norm(norms);
    to.meld.prompt(heads, q, callback(call, executor));
  });
}

kvmeld_code kvmeld_end_prompt(kvmeld_compressor* compressor, int32_t request,
                              const kvmeld_executor* executor, kvmeld_error* error) {
  return answered(error, [&] {
    own("end_prompt", compressor).meld.end_prompt(request, callback("end_prompt", executor));
  });
}

kvmeld_code kvmeld_compress(kvmeld_compressor* compressor, int32_t layer, const int32_t* requests,
                            size_t request_count, int32_t* lengths, size_t length_count,
                            const kvmeld_executor* executor, kvmeld_error* error) {
  return answered(error, [&] {
    auto& of = own("compress", compressor);
    of.meld.compress(heads_of("compress", of.base(), layer, requests, request_count),
                     {lengths, length_count}, callback("compress", executor));
  });
}

// --------------------------------------------------------------------------- tokens

kvmeld_code kvmeld_step(kvmeld_compressor* compressor, int32_t layer, const int32_t* requests,
                        size_t request_count, const kvmeld_step_input* in, float* out,
                        size_t out_count, const kvmeld_executor* executor, kvmeld_error* error) {
  return answered(error, [&] {
    auto& of = own("step", compressor);
    of.meld.step(heads_of("step", of.base(), layer, requests, request_count), input_of("step", in),
                 {out, out_count}, callback("step", executor));
  });
}

kvmeld_code kvmeld_attend(kvmeld_compressor* compressor, int32_t layer, int32_t request,
                          const kvmeld_step_input* in, int32_t tokens, float* out, size_t out_count,
                          kvmeld_error* error) {
  return answered(error, [&] {
    auto& of = own("attend", compressor);
    of.meld.attend(of.base().heads(layer, request), input_of("attend", in), {out, out_count},
                   tokens);
  });
}

kvmeld_code kvmeld_observe(kvmeld_compressor* compressor, int32_t layer, const int32_t* requests,
                           size_t request_count, const kvmeld_step_attention* attention,
                           const kvmeld_executor* executor, kvmeld_error* error) {
  return answered(error, [&] {
    constexpr const char* call = "observe";
    auto& of = own(call, compressor);
    const kvmeld_step_attention in = sized(call, "in", attention);
    of.meld.observe(
        heads_of("observe", of.base(), layer, requests, request_count),
        {.probabilities = floats(call, "probabilities", in.probabilities, in.probability_count),
         .stride = in.stride,
         .log_sum_exp = floats(call, "log_sum_exp", in.log_sum_exp, in.log_sum_exp_count),
         .query = span_of(call, "query", in.query)},
        callback(call, executor));
  });
}

// --------------------------------------------------------------------------- drafts

kvmeld_code kvmeld_draft(kvmeld_compressor* compressor, int32_t layer, int32_t request,
                         const kvmeld_step_input* in, int32_t tokens, float* out, size_t out_count,
                         kvmeld_error* error) {
  return answered(error, [&] {
    auto& of = own("draft", compressor);
    of.meld.draft(of.base().heads(layer, request), input_of("draft", in), {out, out_count}, tokens);
  });
}

kvmeld_code kvmeld_accept(kvmeld_compressor* compressor, int32_t request, int32_t tokens,
                          kvmeld_error* error) {
  return answered(error, [&] { own("accept", compressor).meld.accept(request, tokens); });
}

kvmeld_code kvmeld_draft_room(const kvmeld_compressor* compressor, int32_t request, int32_t* tokens,
                              kvmeld_error* error) {
  return answered(error, [&] {
    const auto& of = own("draft_room", compressor);
    given("draft_room", "tokens", tokens) = of.meld.draft_room(request);
  });
}

// --------------------------------------------------------------------------- requests

kvmeld_code kvmeld_clear(kvmeld_compressor* compressor, int32_t request, kvmeld_error* error) {
  return answered(error, [&] { own("clear", compressor).meld.clear(request); });
}

kvmeld_code kvmeld_copy(kvmeld_compressor* compressor, int32_t to, const kvmeld_compressor* other,
                        int32_t from, kvmeld_error* error) {
  return answered(error, [&] {
    own("copy", compressor).meld.copy(given("copy", "another compressor", other).meld, from, to);
  });
}

kvmeld_code kvmeld_seal(kvmeld_compressor* compressor, int32_t request, int32_t tokens,
                        kvmeld_error* error) {
  return answered(error, [&] { own("seal", compressor).meld.seal(request, tokens); });
}

kvmeld_code kvmeld_pin(kvmeld_compressor* compressor, int32_t request, int32_t first, int32_t count,
                       kvmeld_error* error) {
  return answered(error, [&] { own("pin", compressor).meld.pin(request, first, count); });
}

kvmeld_code kvmeld_shrink(kvmeld_compressor* compressor, int32_t capacity, kvmeld_error* error) {
  return answered(error, [&] {
    auto& of = own("shrink", compressor);
    std::visit([&](auto& kv) { kv.shrink(of.meld, capacity); }, *of.kv);
  });
}

kvmeld_code kvmeld_save(kvmeld_compressor* compressor, int32_t request, kvmeld_write write,
                        void* context, kvmeld_error* error) {
  return answered(error, [&] {
    auto& of = own("save", compressor);
    expects(write != nullptr, "save: expected a function that writes, got null");
    to_callback bytes(write, context);
    std::ostream out(&bytes);
    of.meld.save(out, request);
  });
}

kvmeld_code kvmeld_load(kvmeld_compressor* compressor, int32_t request, kvmeld_read read,
                        void* context, kvmeld_error* error) {
  return answered(error, [&] {
    auto& of = own("load", compressor);
    expects(read != nullptr, "load: expected a function that reads, got null");
    from_callback bytes(read, context);
    std::istream in(&bytes);
    of.meld.load(in, request);
  });
}
