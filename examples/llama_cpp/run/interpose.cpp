// SPDX-License-Identifier: MIT
// The functions of libllama that `kvmeld-run` puts itself in front of. Contexts that are compressed
// are found by their handle; all others, and calls within these functions, go to libllama.
#include <array>
#include <cstring>  // std::memset
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "llama_cpp/run/context.hpp"

namespace kvmeld::llama::run {
namespace {

struct registry {
  std::mutex guard;
  std::map<const void*, std::shared_ptr<context>> contexts;  // by context, and by its memory
  std::map<const llama_batch_ext*, std::vector<program_token>> batches;
  std::set<const llama_model*> empty_models;  // without weights, to measure memory
};
registry& known = *new registry;  // a program may free its contexts after this library's end

/// Null: not compressed, or a call from within.
std::shared_ptr<context> find(const void* handle) {
  if (within::any()) {
    return nullptr;
  }
  const std::lock_guard lock(known.guard);
  const auto found = known.contexts.find(handle);
  return found != known.contexts.end() ? found->second : nullptr;
}

void say(const std::exception& e) { std::fprintf(stderr, "kvmeld-run: %s\n", e.what()); }

/// `f`, within; `failed` where it throws, which is said.
template <class T, class F>
T guarded(T failed, F f) {
  const within here;
  try {
    return f();
  } catch (const std::exception& e) {
    say(e);
    return failed;
  }
}
/// Of a function that can answer nothing: what cannot be done ends the program, as in llama.cpp.
template <class F>
void must(F f) {
  if (!guarded(false, [&] { return f(), true; })) {
    std::abort();
  }
}

/// Refused: a libllama whose parameters lie otherwise than in the headers that this was built with.
void expect_layout() {
  struct returned {
    llama_context_params p;
    std::array<unsigned char, 256> behind;
  };
  static_assert(sizeof(returned) > 16);  // returned through memory, of which the callee knows less
  returned r;
  std::memset(static_cast<void*>(&r), 0x5A, sizeof r);
  r = reinterpret_cast<returned (*)()>(next_of("llama_context_default_params"))();
  const auto& p = r.p;
  expects(p.n_ctx == 512 && p.n_batch == 2048 && p.n_ubatch == 512 && p.n_seq_max == 1 &&
              p.type_k == GGML_TYPE_F16 && p.type_v == GGML_TYPE_F16 && p.cb_eval == nullptr &&
              p.abort_callback == nullptr && p.n_samplers == 0 && p.ctx_other == nullptr,
          "llama.cpp: expected the parameters of ", KVMELD_LLAMA_VERSION, ", got another libllama");
}

std::vector<program_token> tokens_of(const llama_batch& batch) {
  std::vector<program_token> tokens(static_cast<std::size_t>(std::max(batch.n_tokens, 0)));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (batch.seq_id != nullptr && batch.n_seq_id != nullptr) {
      tokens[i].sequences.assign(batch.seq_id[i], batch.seq_id[i] + batch.n_seq_id[i]);
    } else {
      tokens[i].sequences = {0};
    }
    tokens[i].output = batch.logits != nullptr ? batch.logits[i] != 0 : i + 1 == tokens.size();
  }
  return tokens;
}

template <class Run>
std::int32_t decode(context& c, const std::vector<program_token>& tokens, Run run) {
  std::int32_t failed = -1;  // as of a batch that is not valid
  const std::int32_t code = guarded(std::numeric_limits<std::int32_t>::min(), [&] {
    return c.decode(tokens, [&] {
      failed = -3;  // as of a graph that failed
      return run();
    });
  });
  return code == std::numeric_limits<std::int32_t>::min() ? failed : code;
}

void note(llama_batch_ext* batch, std::int32_t index, llama_seq_id s) {
  if (index >= 0) {
    const std::lock_guard lock(known.guard);
    auto& tokens = known.batches[batch];
    tokens.resize(static_cast<std::size_t>(index));
    tokens.push_back({{s}});
  }
}
void note_output(llama_batch_ext* batch, std::int32_t index, bool value) {
  const std::lock_guard lock(known.guard);
  auto& tokens = known.batches[batch];
  if (index >= 0 && index < std::ssize(tokens)) {
    tokens[static_cast<std::size_t>(index)].output = value;
  }
}

// --------------------------------------------------------------------------- states

/// "kvmeldrn", the program's tokens, the number of sequences, and the bytes of each.
constexpr std::string_view file_magic = "kvmeldrn";

template <class T>
void put(std::string& to, T x) {
  to.append(reinterpret_cast<const char*>(&x), sizeof x);
}
/// The next `T` or bytes of `from`. Refused: an end too early.
std::string_view take(std::string_view& from, std::uint64_t bytes) {
  expects(errc::corrupt_file, bytes <= from.size(), "llama_state: expected ", bytes,
          " more bytes, got ", from.size());
  const auto taken = from.substr(0, bytes);
  from.remove_prefix(bytes);
  return taken;
}
template <class T>
T take(std::string_view& from) {
  T x;
  std::memcpy(&x, take(from, sizeof x).data(), sizeof x);
  return x;
}

/// Of all sequences.
std::string save_all(context& c) {
  std::string bytes;
  put(bytes, static_cast<std::uint32_t>(c.sequences()));
  for (llama_seq_id s = 0; s < c.sequences(); ++s) {
    put(bytes, static_cast<std::uint64_t>(c.save(s).size()));
    bytes += c.save(s);
    c.drop_saved(s);
  }
  return bytes;
}
void load_all(context& c, std::string_view bytes) {
  const auto count = take<std::uint32_t>(bytes);
  expects(errc::corrupt_file, count <= static_cast<std::uint32_t>(c.sequences()),
          "llama_state: expected a state of at most ", c.sequences(), " sequences, got ", count);
  c.clear(false);
  for (std::uint32_t s = 0; s < count; ++s) {
    c.load(std::string(take(bytes, take<std::uint64_t>(bytes))), static_cast<llama_seq_id>(s));
  }
}

std::size_t copy_out(const std::string& bytes, std::uint8_t* to, std::size_t room) {
  expects(bytes.size() <= room, "llama_state: expected room for ", bytes.size(), " bytes, got ",
          room);
  std::copy(bytes.begin(), bytes.end(), to);
  return bytes.size();
}

std::size_t write_file(const char* path, const llama_token* tokens, std::size_t count,
                       const std::string& state) {
  std::string bytes(file_magic);
  put(bytes, std::uint64_t{count});
  bytes.append(reinterpret_cast<const char*>(tokens), count * sizeof *tokens);
  bytes += state;
  std::ofstream out(path, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  expects(errc::corrupt_file, out.good(), "llama_state: expected a file that can be written, got '",
          path, "'");
  return bytes.size();
}
/// Its bytes. `peeks`: without room for tokens their number alone, and no state is loaded.
template <class Load>
std::size_t read_file(const char* path, llama_token* tokens, std::size_t room, std::size_t* count,
                      bool peeks, Load load) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream all;
  all << in.rdbuf();
  const std::string bytes = std::move(all).str();
  std::string_view rest = bytes;
  expects(errc::corrupt_file, rest.starts_with(file_magic),
          "llama_state: expected a file that was saved under kvmeld-run, got '", path, "'");
  take(rest, file_magic.size());
  const auto n = take<std::uint64_t>(rest);
  expects(errc::corrupt_file, n <= rest.size() / sizeof *tokens,
          "llama_state: expected a whole file, got ", rest.size(), " bytes for ", n, " tokens");
  const auto read = take(rest, n * sizeof *tokens);
  *count = n;
  if (tokens == nullptr) {
    if (!peeks) {
      load(rest);
    }
  } else {
    expects(n <= room, "llama_state: expected room for ", n, " tokens, got ", room);
    std::memcpy(tokens, read.data(), read.size());
    load(rest);
  }
  return bytes.size();
}

}  // namespace
}  // namespace kvmeld::llama::run

// NOLINTBEGIN(readability-identifier-naming): libllama's names
using namespace kvmeld::llama::run;

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

extern "C" {

// --------------------------------------------------------------------------- models and contexts

llama_model* llama_model_load_from_file(const char* path, llama_model_params p) {
  llama_model* const model = KVMELD_NEXT(llama_model_load_from_file)(path, p);
  if (p.no_alloc && model != nullptr) {
    const std::lock_guard lock(known.guard);
    known.empty_models.insert(model);
  }
  return model;
}
void llama_model_free(llama_model* model) {
  {
    const std::lock_guard lock(known.guard);
    known.empty_models.erase(model);
  }
  KVMELD_NEXT(llama_model_free)(model);
}

llama_context* llama_init_from_model(llama_model* model, llama_context_params p) {
  bool leave = within::any() || model == nullptr;
  if (!leave) {
    const std::lock_guard lock(known.guard);
    leave = known.empty_models.contains(model);
  }
  if (leave) {
    return KVMELD_NEXT(llama_init_from_model)(model, p);
  }
  const within here;
  bool stop = true;
  try {
    const settings s = settings::from_environment();
    stop = s.stop;
    expect_layout();
    const auto made = std::make_shared<context>(model, p, s);
    const std::lock_guard lock(known.guard);
    known.contexts[made->get()] = known.contexts[made->memory()] = made;
    return made->get();
  } catch (const std::exception& e) {
    say(e);
  }
  if (stop) {
    std::_Exit(1);
  }
  std::fputs("kvmeld-run: the program goes on with llama.cpp's own cache\n", stderr);
  return KVMELD_NEXT(llama_init_from_model)(model, p);
}
llama_context* llama_new_context_with_model(llama_model* model, llama_context_params p) {
  return llama_init_from_model(model, p);
}
void llama_free(llama_context* ctx) {
  if (const auto c = find(ctx)) {
    const within here;
    const std::lock_guard lock(known.guard);
    known.contexts.erase(c->memory());
    known.contexts.erase(ctx);
    return;  // with the last that holds it
  }
  KVMELD_NEXT(llama_free)(ctx);
}

std::uint32_t llama_n_ctx(const llama_context* ctx) {
  const auto c = find(ctx);
  return c ? c->cells() : KVMELD_NEXT(llama_n_ctx)(ctx);
}
std::uint32_t llama_n_ctx_seq(const llama_context* ctx) {
  const auto c = find(ctx);
  return c ? c->tokens_per_sequence() : KVMELD_NEXT(llama_n_ctx_seq)(ctx);
}

// --------------------------------------------------------------------------- batches

void llama_batch_ext_free(llama_batch_ext* batch) {
  {
    const std::lock_guard lock(known.guard);
    known.batches.erase(batch);
  }
  KVMELD_NEXT(llama_batch_ext_free)(batch);
}
void llama_batch_ext_clear(llama_batch_ext* batch) {
  {
    const std::lock_guard lock(known.guard);
    known.batches[batch].clear();
  }
  KVMELD_NEXT(llama_batch_ext_clear)(batch);
}
std::int32_t llama_batch_ext_add(llama_batch_ext* batch, llama_seq_id s) {
  const std::int32_t i = KVMELD_NEXT(llama_batch_ext_add)(batch, s);
  note(batch, i, s);
  return i;
}
std::int32_t llama_batch_ext_add_token(llama_batch_ext* batch, llama_seq_id s, llama_token id) {
  const std::int32_t i = KVMELD_NEXT(llama_batch_ext_add_token)(batch, s, id);
  note(batch, i, s);
  return i;
}
std::int32_t llama_batch_ext_add_embd(llama_batch_ext* batch, llama_seq_id s, llama_embd embd) {
  const std::int32_t i = KVMELD_NEXT(llama_batch_ext_add_embd)(batch, s, embd);
  note(batch, i, s);
  return i;
}
bool llama_batch_ext_add_seq(llama_batch_ext* batch, std::int32_t index, llama_seq_id s) {
  {
    const std::lock_guard lock(known.guard);
    auto& tokens = known.batches[batch];
    if (index >= 0 && index < std::ssize(tokens)) {
      tokens[static_cast<std::size_t>(index)].sequences.push_back(s);
    }
  }
  return KVMELD_NEXT(llama_batch_ext_add_seq)(batch, index, s);
}
bool llama_batch_ext_set_output_logits(llama_batch_ext* batch, std::int32_t index, bool value) {
  note_output(batch, index, value);
  return KVMELD_NEXT(llama_batch_ext_set_output_logits)(batch, index, value);
}
bool llama_batch_ext_set_output_embd(llama_batch_ext* batch, std::int32_t index, bool value) {
  note_output(batch, index, value);
  return KVMELD_NEXT(llama_batch_ext_set_output_embd)(batch, index, value);
}

std::int32_t llama_decode(llama_context* ctx, llama_batch batch) {
  const auto run = [&] { return KVMELD_NEXT(llama_decode)(ctx, batch); };
  const auto c = find(ctx);
  return c ? decode(*c, tokens_of(batch), run) : run();
}
std::int32_t llama_process(llama_context* ctx, llama_process_type type, llama_batch_ext* batch) {
  const auto run = [&] { return KVMELD_NEXT(llama_process)(ctx, type, batch); };
  const auto c = type == LLAMA_PROCESS_TYPE_DECODE ? find(ctx) : nullptr;
  if (!c) {
    return run();
  }
  std::vector<program_token> tokens;
  {
    const std::lock_guard lock(known.guard);
    tokens = known.batches[batch];
  }
  return decode(*c, tokens, run);
}

// --------------------------------------------------------------------------- memory

void llama_memory_clear(llama_memory_t m, bool data) {
  if (const auto c = find(m)) {
    return must([&] { c->clear(data); });
  }
  KVMELD_NEXT(llama_memory_clear)(m, data);
}
bool llama_memory_seq_rm(llama_memory_t m, llama_seq_id s, llama_pos from, llama_pos to) {
  const auto c = find(m);
  return c ? guarded(false, [&] { return c->remove(s, from, to); })
           : KVMELD_NEXT(llama_memory_seq_rm)(m, s, from, to);
}
void llama_memory_seq_cp(llama_memory_t m, llama_seq_id a, llama_seq_id b, llama_pos from,
                         llama_pos to) {
  if (const auto c = find(m)) {
    return must([&] { c->copy(a, b, from, to); });
  }
  KVMELD_NEXT(llama_memory_seq_cp)(m, a, b, from, to);
}
void llama_memory_seq_keep(llama_memory_t m, llama_seq_id s) {
  if (const auto c = find(m)) {
    return must([&] { c->keep(s); });
  }
  KVMELD_NEXT(llama_memory_seq_keep)(m, s);
}
void llama_memory_seq_add(llama_memory_t m, llama_seq_id s, llama_pos from, llama_pos to,
                          llama_pos delta) {
  if (const auto c = find(m)) {
    return must(
        [&] { delta != 0 ? c->expect_unmoved("llama_memory_seq_add", s, from, to) : void(); });
  }
  KVMELD_NEXT(llama_memory_seq_add)(m, s, from, to, delta);
}
void llama_memory_seq_div(llama_memory_t m, llama_seq_id s, llama_pos from, llama_pos to, int by) {
  if (const auto c = find(m)) {
    return must([&] { by != 1 ? c->expect_unmoved("llama_memory_seq_div", s, from, to) : void(); });
  }
  KVMELD_NEXT(llama_memory_seq_div)(m, s, from, to, by);
}
/// The newest: no token before it can be gone back to.
llama_pos llama_memory_seq_pos_min(llama_memory_t m, llama_seq_id s) {
  return find(m) ? KVMELD_NEXT(llama_memory_seq_pos_max)(m, s)
                 : KVMELD_NEXT(llama_memory_seq_pos_min)(m, s);
}
bool llama_memory_can_shift(llama_memory_t m) {
  return !find(m) && KVMELD_NEXT(llama_memory_can_shift)(m);
}

// --------------------------------------------------------------------------- states

std::size_t llama_state_seq_get_size_ext(llama_context* ctx, llama_seq_id s,
                                         llama_state_seq_flags flags) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0}, [&] { return c->save(s).size(); })
           : KVMELD_NEXT(llama_state_seq_get_size_ext)(ctx, s, flags);
}
std::size_t llama_state_seq_get_data_ext(llama_context* ctx, std::uint8_t* to, std::size_t room,
                                         llama_seq_id s, llama_state_seq_flags flags) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0},
                     [&] {
                       const std::size_t bytes = copy_out(c->save(s), to, room);
                       c->drop_saved(s);
                       return bytes;
                     })
           : KVMELD_NEXT(llama_state_seq_get_data_ext)(ctx, to, room, s, flags);
}
std::size_t llama_state_seq_set_data_ext(llama_context* ctx, const std::uint8_t* from,
                                         std::size_t bytes, llama_seq_id s,
                                         llama_state_seq_flags flags) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0},
                     [&] {
                       return c->load(std::string(reinterpret_cast<const char*>(from), bytes), s);
                     })
           : KVMELD_NEXT(llama_state_seq_set_data_ext)(ctx, from, bytes, s, flags);
}
std::size_t llama_state_seq_get_size(llama_context* ctx, llama_seq_id s) {
  return find(ctx) ? llama_state_seq_get_size_ext(ctx, s, 0)
                   : KVMELD_NEXT(llama_state_seq_get_size)(ctx, s);
}
std::size_t llama_state_seq_get_data(llama_context* ctx, std::uint8_t* to, std::size_t room,
                                     llama_seq_id s) {
  return find(ctx) ? llama_state_seq_get_data_ext(ctx, to, room, s, 0)
                   : KVMELD_NEXT(llama_state_seq_get_data)(ctx, to, room, s);
}
std::size_t llama_state_seq_set_data(llama_context* ctx, const std::uint8_t* from,
                                     std::size_t bytes, llama_seq_id s) {
  return find(ctx) ? llama_state_seq_set_data_ext(ctx, from, bytes, s, 0)
                   : KVMELD_NEXT(llama_state_seq_set_data)(ctx, from, bytes, s);
}
std::size_t llama_state_seq_save_file(llama_context* ctx, const char* path, llama_seq_id s,
                                      const llama_token* tokens, std::size_t count) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0},
                     [&] {
                       const std::size_t bytes = write_file(path, tokens, count, c->save(s));
                       c->drop_saved(s);
                       return bytes;
                     })
           : KVMELD_NEXT(llama_state_seq_save_file)(ctx, path, s, tokens, count);
}
std::size_t llama_state_seq_load_file(llama_context* ctx, const char* path, llama_seq_id s,
                                      llama_token* tokens, std::size_t room, std::size_t* count) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0},
                     [&] {
                       return read_file(
                           path, tokens, room, count, true,
                           [&](std::string_view state) { c->load(std::string(state), s); });
                     })
           : KVMELD_NEXT(llama_state_seq_load_file)(ctx, path, s, tokens, room, count);
}

std::size_t llama_state_get_size(llama_context* ctx) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0}, [&] { return save_all(*c).size(); })
           : KVMELD_NEXT(llama_state_get_size)(ctx);
}
std::size_t llama_state_get_data(llama_context* ctx, std::uint8_t* to, std::size_t room) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0}, [&] { return copy_out(save_all(*c), to, room); })
           : KVMELD_NEXT(llama_state_get_data)(ctx, to, room);
}
std::size_t llama_state_set_data(llama_context* ctx, const std::uint8_t* from, std::size_t bytes) {
  const auto c = find(ctx);
  return c ? guarded(std::size_t{0},
                     [&] {
                       load_all(*c, {reinterpret_cast<const char*>(from), bytes});
                       return bytes;
                     })
           : KVMELD_NEXT(llama_state_set_data)(ctx, from, bytes);
}
bool llama_state_save_file(llama_context* ctx, const char* path, const llama_token* tokens,
                           std::size_t count) {
  const auto c = find(ctx);
  return c ? guarded(false, [&] { return write_file(path, tokens, count, save_all(*c)) > 0; })
           : KVMELD_NEXT(llama_state_save_file)(ctx, path, tokens, count);
}
bool llama_state_load_file(llama_context* ctx, const char* path, llama_token* tokens,
                           std::size_t room, std::size_t* count) {
  const auto c = find(ctx);
  return c ? guarded(false,
                     [&] {
                       return read_file(path, tokens, room, count, false,
                                        [&](std::string_view state) { load_all(*c, state); }) > 0;
                     })
           : KVMELD_NEXT(llama_state_load_file)(ctx, path, tokens, room, count);
}

// Their older names.
std::size_t llama_get_state_size(llama_context* ctx) { return llama_state_get_size(ctx); }
std::size_t llama_copy_state_data(llama_context* ctx, std::uint8_t* to) {
  return llama_state_get_data(ctx, to, std::numeric_limits<std::size_t>::max());
}
std::size_t llama_set_state_data(llama_context* ctx, const std::uint8_t* from) {
  return llama_state_set_data(ctx, from, std::numeric_limits<std::size_t>::max());
}
bool llama_load_session_file(llama_context* ctx, const char* path, llama_token* tokens,
                             std::size_t room, std::size_t* count) {
  return llama_state_load_file(ctx, path, tokens, room, count);
}
bool llama_save_session_file(llama_context* ctx, const char* path, const llama_token* tokens,
                             std::size_t count) {
  return llama_state_save_file(ctx, path, tokens, count);
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
