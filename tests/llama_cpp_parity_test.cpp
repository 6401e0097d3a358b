// llama.cpp behind the adapter against our own engine, both compressing by the same policy.
#include <catch2/catch.hpp>

#include "support/llama_files.hpp"

namespace {

using namespace test;
using kvfold::llama::mode;

constexpr index_t tokens = 2048, cells = 256, chunk = 64, target = 96;

/// Chunks of `chunk`, and where `singles` 16 single tokens behind every eight of them.
template <class F>
void stream(const std::vector<int>& text, bool singles, F f) {
  std::size_t at = 0;
  for (int i = 0; at < text.size(); ++i) {
    const auto n = std::min<std::size_t>(singles && i % 24 >= 8 ? 1 : chunk, text.size() - at);
    f(std::span(text).subspan(at, n));
    at += n;
  }
}

using logits = std::vector<engine::row_major_matrix>;

/// llama.cpp's own, with every token in a cell.
logits full_cache(twin& models, const std::vector<int>& text, bool singles) {
  auto parameters = exact_parameters(tokens, chunk);
  parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const llama_context_ptr context(llama_init_from_model(models.theirs.get(), parameters));
  logits all;
  index_t position = 0;
  stream(text, singles, [&](std::span<const int> part) {
    all.push_back(decode(context.get(), part, position));
    position += static_cast<index_t>(part.size());
  });
  return all;
}

logits of_our_engine(twin& models, const evaluate::any_policy& p, const std::vector<int>& text) {
  const kvfold::budget limit{.target = target};
  chunked_engine ours(models.ours, p, {limit, limit}, target + chunk);
  logits all;
  stream(text, p.decodes(), [&](std::span<const int> part) { all.push_back(ours.decode(part)); });
  return all;
}

logits of_llama(twin& models, const evaluate::any_policy& p, mode how,
                const std::vector<int>& text) {
  compressed_llama theirs(models.theirs.get(), p, {.how = how, .limits = {{.target = target}}},
                          exact_parameters(cells, chunk));
  logits all;
  stream(text, p.decodes(), [&](std::span<const int> part) { all.push_back(theirs.decode(part)); });
  const auto r = theirs.kv.report();
  CHECK(r.tokens == static_cast<std::int64_t>(text.size()));
  CHECK(r.slots <= target);
  CHECK(r.cells <= target);
  CHECK(r.bytes < r.full_bytes);
  CHECK(llama_n_ctx(theirs.context.get()) == cells);
  CHECK(llama_memory_seq_pos_max(llama_get_memory(theirs.context.get()), 0) == r.tokens - 1);
  return all;
}

}  // namespace

TEST_CASE("llama.cpp: every policy gives the logits of our own engine, in both modes") {
  twin models;
  const auto all = draw_tokens(tokens, models.shape.vocab);
  const logits full[] = {full_cache(models, all, false), full_cache(models, all, true)};
  for (const std::string& name : every_policy_name()) {
    const auto p = policy_named(name);
    // Attention Matching fits nearly as many masses as it has queries: what the two engines round
    // apart grows with every fit. It is held to the first four.
    const std::size_t count = p.name() == "attention_matching" ? 5 * chunk : tokens;
    const std::vector text(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
    const logits ours = of_our_engine(models, p, text),
                 repack = of_llama(models, p, mode::repack, text),
                 own = of_llama(models, p, mode::own_attention, text);
    logits whole = full[p.decodes() ? 1 : 0];
    whole.resize(ours.size());
    const float effect = apart(whole, repack), to_repack = apart(ours, repack),
                to_own = apart(ours, own), modes = apart(repack, own);
    CAPTURE(name, effect, to_repack, to_own, modes);
    CHECK(to_repack < 1e-3F);
    CHECK(to_own < 1e-3F);
    CHECK(modes < 1e-3F);
    CHECK(effect > 1000 * std::max(to_repack, to_own));
  }
}
