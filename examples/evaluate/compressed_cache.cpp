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
  if (is_shared(c.budgets) && c.budgets != budget_allocation::profile) {
    const std::vector<index_t> heads = full_heads(kv);
    const auto weights = kvmeld::score_weights(
        c.policy, states.size(), [&](std::size_t i) { return kv.head(heads[i]); },
        [&](std::size_t i) -> kvmeld::head_state& { return states[i]; });
    for (std::size_t i = 0; i < states.size(); ++i) {
      kvmeld::keep_weights(c.policy, weights[i], states[i]);
    }
  }
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
  std::vector<any_policy> decoding(as_size(kv_->heads()), full_cache());
  std::vector<budget> budgets(as_size(kv_->heads()), budget{kv_->capacity() - 1});
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto h = as_size(full[i]);
    decoding[h] = decodes(i) ? c.of_head(i) : full_cache();
    // A head that holds nearly all of its prompt has no room for more than the cache has.
    const index_t most = std::max(0, kv_->capacity() - 1 - slots[i]);
    budgets[h] = {.slots = slots[i], .slack = std::min(c.room, most)};
  }
  meld_ = std::make_unique<compressor>(*kv_, decoding, budgets);
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
  const index_t held = kvmeld::declared(c.policy).evicts() ? std::ranges::max(slots) + 1 : tokens,
                capacity = std::max(held, std::min(shape.window + 1, tokens));
  kv_ = std::make_unique<kvmeld::cache>(shape.attention(),
                                        kvmeld::cache_options{.layers = shape.layers,
                                                              .capacity = capacity,
                                                              .keys = c.storage.keys,
                                                              .values = c.storage.values,
                                                              .newest = c.storage.newest});
  const std::vector<index_t> full = full_heads(*kv_);
  std::vector<any_policy> policies(as_size(kv_->heads()), full_cache());
  std::vector<budget> budgets(as_size(kv_->heads()), budget{capacity - 1});
  for (std::size_t i = 0; i < slots.size(); ++i) {
    policies[as_size(full[i])] = c.of_head(i);
    budgets[as_size(full[i])] = {.slots = slots[i]};
  }
  meld_ = std::make_unique<compressor>(*kv_, policies, budgets);
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
    : kv_(std::make_unique<kvmeld::cache>(other.kv())) {
  std::vector<any_policy> policies;
  std::vector<budget> budgets;
  for (index_t h = 0; h < kv_->heads(); ++h) {
    policies.push_back(other.meld_->policy_of(h));
    budgets.push_back(other.meld_->limit(h));
  }
  meld_ = std::make_unique<compressor>(*kv_, policies, budgets);
  for (index_t h = 0; h < kv_->heads(); ++h) {
    meld_->set_state(h, other.meld_->state(h));
  }
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
