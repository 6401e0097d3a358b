// SPDX-License-Identifier: MIT
#include "evaluate/compressed_cache.hpp"

#include <algorithm>  // std::min, std::ranges::max
#include <utility>    // std::move

#include "kvmeld/compress/shared_slots.hpp"

namespace evaluate {

namespace {

/// Brings all heads of a prompt's full layers in `kv` to `slots` `[full layers · KV heads]`;
/// `states` are what the prompt was measured as.
void compress(const contender& c, const prompt& p, kvmeld::cache& kv,
              std::span<kvmeld::head_state> states, std::span<const index_t> slots) {
  kvmeld::workspace work;
  work.reserve(kv.head(0));
  const std::vector<index_t> heads = full_heads(kv);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (!c.keeps_all(i)) {
      const index_t h = heads[i];
      const std::size_t layer = i / as_size(kv.kv_heads());
      const auto& chosen = p.measured[c.index].chosen[layer];
      const row_major_matrix& own = p.own[layer];
      const auto queries =
          chosen ? chosen->view()
                 : kvmeld::prompt_queries(own.data(), static_cast<index_t>(own.rows()),
                                          kv.kv_heads(), kv.spec().group, kv.spec().key_dim);
      kvmeld::compress(c.of_head(i), kv.head(h), states[i], work, budget{slots[i]},
                       queries.of(h % kv.kv_heads()));
    }
  }
}

/// Does it divide the slots that heads share again while it decodes?
bool shares_in_decode(const contender& c) {
  return (c.budgets == budget_allocation::global || c.budgets == budget_allocation::composite) &&
         c.of_heads.empty() && c.policy.visit([](const auto& p) {
           if constexpr (requires { p.rescores(); }) {
             return p.rescores();
           } else {
             return false;
           }
         });
}

}  // namespace

kvmeld::cache stored(kvmeld::cache& kv, const kvmeld::storage_pair& type) {
  std::vector<kvmeld::attention_spec> specs;
  for (index_t layer = 0; layer < kv.layers(); ++layer) {
    specs.push_back(kv.spec(layer));
  }
  kvmeld::cache to(specs, {.layers = kv.layers(),
                           .capacity = kv.capacity(),
                           .keys = type.keys,
                           .values = type.values,
                           .newest = type.newest});
  for (index_t h = 0; h < kv.heads(); ++h) {
    kvmeld::detail::copy_slots(kv.head(h), to.head(h));
  }
  return to;
}

std::vector<kvmeld::head_state> states_of(const contender& c, const prompt& p, kvmeld::cache& kv) {
  auto states = p.measured[c.index].heads;
  c.policy.visit([&](const auto& one) {
    if constexpr (requires { one.rank_to_share(kv.head(0), states[0]); }) {
      const std::vector<index_t> heads = full_heads(kv);
      for (std::size_t i = 0; i < heads.size() && one.share_slots > 0; ++i) {
        one.rank_to_share(kv.head(heads[i]), states[i]);
      }
    }
  });
  return states;
}

compressed_cache::compressed_cache(const contender& c, const prompt& p)
    : kv_(std::make_unique<kvmeld::cache>(p.cache())) {
  auto states = states_of(c, p, *kv_);
  const std::vector<index_t> full = full_heads(*kv_);
  const std::size_t each = as_size(kv_->kv_heads());
  for (std::size_t i = 0; c.budgets == budget_allocation::same_tokens && i < full.size();
       i += each) {
    kvmeld::average_scores(kv_->kv_heads(), [&](index_t head) -> kvmeld::head_state& {
      return states[i + as_size(head)];
    });
  }
  const auto slots = allocate_slots(c, *kv_, states);
  compress(c, p, *kv_, states, slots);
  if (c.storage != storage::f32) {
    *kv_ = stored(*kv_, c.storage);
  }
  // Behind a method for prompts alone, all that comes is kept.
  const auto decodes = [&](std::size_t i) {
    return kvmeld::declared(c.policy).supports_decode() && !c.keeps_all(i);
  };
  std::vector<any_policy> decoding;
  std::vector<budget> budgets;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    decoding.push_back(decodes(i) ? c.of_head(i) : full_cache());
    // A head that holds nearly all of its prompt has no room for more than the cache has.
    const index_t most = std::max(0, kv_->capacity() - 1 - slots[i]);
    budgets.push_back({.slots = slots[i], .slack = std::min(c.room, most)});
  }
  compress_by(c, std::move(decoding), budgets);
  for (index_t layer = 0; layer < kv_->layers(); ++layer) {
    if (kv_->spec(layer).window > 0) {
      meld_->compress(kv_->heads(layer, 0));  // to the window
    }
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (decodes(i)) {
      meld_->set_state(full[i], std::move(states[i]));
    }
  }
}

compressed_cache::compressed_cache(const contender& c, const engine::config& shape,
                                   index_t tokens) {
  const auto slots = allocate_slots(c, tokens, shape.full_heads());
  const bool bounded = kvmeld::declared(c.policy).evicts() && !shares_in_decode(c);
  const index_t held = bounded ? std::ranges::max(slots) + 1 : tokens,
                capacity = std::max(held, std::min(shape.window + 1, tokens));
  kv_ = std::make_unique<kvmeld::cache>(shape.attention(),
                                        kvmeld::cache_options{.layers = shape.layers,
                                                              .capacity = capacity,
                                                              .keys = c.storage.keys,
                                                              .values = c.storage.values,
                                                              .newest = c.storage.newest});
  std::vector<any_policy> policies;
  std::vector<budget> budgets;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    policies.push_back(c.of_head(i));
    budgets.push_back({.slots = slots[i]});
  }
  compress_by(c, std::move(policies), budgets);
}

void compressed_cache::compress_by(const contender& c, std::vector<any_policy> of_heads,
                                   const std::vector<budget>& budgets) {
  if (shares_in_decode(c)) {
    policies_ = {c.policy};
    budgets_ = {c.budgets == budget_allocation::composite
                    ? budget::shared_by_layer(c.limit.slots, c.room)
                    : budget::shared(c.limit.slots, c.room)};
  } else {
    policies_.assign(as_size(kv_->heads()), full_cache());
    budgets_.assign(as_size(kv_->heads()), budget{kv_->capacity() - 1});
    const std::vector<index_t> full = full_heads(*kv_);
    for (std::size_t i = 0; i < full.size(); ++i) {
      policies_[as_size(full[i])] = std::move(of_heads[i]);
      budgets_[as_size(full[i])] = budgets[i];
    }
  }
  meld_ = std::make_unique<compressor>(*kv_, policies_, budgets_);
}

std::size_t compressed_cache::bytes() const {
  std::size_t sum = 0;
  for (const index_t h : full_heads(*kv_)) {
    const index_t slots = kv_->head(h).length();
    sum += kvmeld::head_bytes(kv_->type(), kv_->spec().key_dim, kv_->spec().value_dim, slots) +
           as_size(slots) * (sizeof(float) + sizeof(index_t)) + meld_->state(h).bytes();
  }
  return sum;
}

compressed_cache::compressed_cache(const compressed_cache& other)
    : kv_(std::make_unique<kvmeld::cache>(other.kv())),
      policies_(other.policies_),
      budgets_(other.budgets_),
      meld_(std::make_unique<compressor>(*kv_, policies_, budgets_)) {
  meld_->copy(*other.meld_, 0, 0);
}

const row_major_matrix& compressed_decoder::next(int token) {
  compressed_decoder* const self = this;
  next(std::span(&self, 1), std::span(&token, 1), scratch_, logits_);
  return logits_;
}

void compressed_decoder::next(std::span<compressed_decoder* const> decoders,
                              std::span<const int> tokens, engine::decoder::scratch& work,
                              row_major_matrix& logits) {
  work.positions.clear();
  for (compressed_decoder* const d : decoders) {
    work.positions.push_back(d->position_++);
  }
  const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
    const auto row = [](auto& m, std::size_t i) {
      return std::span(m.row(static_cast<Eigen::Index>(i)).data(), as_size(m.cols()));
    };
    for (std::size_t i = 0; i < decoders.size(); ++i) {
      compressed_cache& cache = decoders[i]->cache_;
      cache.meld().step(cache.kv().heads(layer, 0), {row(q, i), row(k, i), row(v, i)}, row(out, i));
    }
  };
  decoders.front()->model_.forward(work, tokens, work.positions, attend, logits);
}

}  // namespace evaluate
