// SPDX-License-Identifier: MIT
/// Decode attention over a compressed cache: softmax with log-mass.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min, std::transform
#include <cmath>      // std::abs, std::log
#include <concepts>   // std::invocable
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/codes.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// Floats that stay in the nearest cache; in blocks all that are swept do.
inline constexpr index_t near_floats = detail::row_floats;
inline constexpr index_t swept_floats = 16384;

/// `q [queries, dim]` as keys in blocks lie: in `buffer` where they are rotated, with `of_mean
/// [queries]`, the products with the mean that keys are held less.
KVMELD_NOINLINE inline const float* queries_of_codes(const head_ref& head, const float* q,
                                                     index_t queries, float* buffer,
                                                     float* of_mean) {
  if (!is_centred(head.type().keys)) {
    return q;
  }
  const index_t dim = head.dim();
  float* const mean = buffer;
  to_floats(row<Eigen::half>{head.key_mean().data()}, dim, mean);
  qk_tile(q, queries, {mean, 1, dim, Eigen::OuterStride<>(dim)}, of_mean, 1, 0);
  std::copy_n(q, std::ptrdiff_t{queries} * dim, buffer);
  for (index_t g = 0; g < queries; ++g) {
    detail::hadamard(buffer + std::ptrdiff_t{g} * dim, dim);
  }
  return buffer;
}

/// Calls `use(tile, slots)` for the rows in half of `newest` slots, of keys or values, where they
/// lie: those that lie one after the other together. `all [rows_in_half, dim]`.
template <class Use>
EIGEN_ALWAYS_INLINE void each_tile_in_half(const head_ref& head, std::span<const index_t> newest,
                                           std::span<Eigen::half> all, index_t dim, float* buffer,
                                           Use use) {
  const storage read = detail::read_as(storage::f16, true);
  const index_t rows = rows_in_half(head.type().newest),
                most = std::max(detail::row_floats / dim, index_t{1});
  const auto bytes = static_cast<std::ptrdiff_t>(row_bytes(storage::f16, dim));
  index_t slot_of[newest_slots::most];
  std::fill_n(slot_of, rows, -1);
  for (const index_t s : newest) {
    slot_of[head.newest_row(head.position(s))] = s;
  }
  for (index_t first = 0, count = 0; first < rows; first += std::max(count, index_t{1})) {
    for (count = 0; first + count < rows && count < most && slot_of[first + count] >= 0;) {
      ++count;
    }
    if (count == 0) {
      continue;
    }
    const head_rows at{reinterpret_cast<std::byte*>(all.data()) + first * bytes, bytes};
    detail::use_rows(
        read, at, count, dim,
        [&] {
          const auto held = [&](index_t i) -> row<any_scalar> {
            return {at.slot(i), sizeof(Eigen::half), storage::f16};
          };
          return detail::load_tile(held, 0, count, dim, buffer);
        },
        [&](const auto& tile) {
          use(tile, std::span<const index_t>(slot_of + first, as_size(count)));
        });
  }
}

/// Products with the keys of `newest` slots: `dots [queries, next]`, of slots from `first` on.
KVMELD_NOINLINE inline void qk_newest(const head_ref& head, std::span<const index_t> newest,
                                      index_t first, const float* q, index_t queries, float* buffer,
                                      float* dots, std::ptrdiff_t next) {
  float products[sweep_group * tile_slots];
  each_tile_in_half(head, newest, head.newest_keys(), head.dim(), buffer,
                    [&](const auto& keys, std::span<const index_t> slots) {
                      qk_tile(q, queries, keys, products, tile_slots);
                      for (index_t g = 0; g < queries; ++g) {
                        for (std::size_t r = 0; r < slots.size(); ++r) {
                          dots[g * next + slots[r] - first] = products[as_size(g, tile_slots) + r];
                        }
                      }
                    });
}
/// Adds their values, by weights `p [queries, next]`.
KVMELD_NOINLINE inline void pv_newest(const head_ref& head, std::span<const index_t> newest,
                                      index_t first, const float* p, std::ptrdiff_t next,
                                      index_t queries, float* buffer, float* out) {
  alignas(detail::vector_bytes) float weights[sweep_group * tile_slots];
  each_tile_in_half(head, newest, head.newest_values(), head.value_dim(), buffer,
                    [&](const auto& values, std::span<const index_t> slots) {
                      for (index_t g = 0; g < queries; ++g) {
                        for (std::size_t r = 0; r < slots.size(); ++r) {
                          weights[as_size(g, tile_slots) + r] = p[g * next + slots[r] - first];
                        }
                      }
                      pv_tile(weights, tile_slots, queries, values, out);
                    });
}

}  // namespace score

/// The mass function of all policies but those that share entries: `ℓ_s = scale · q·k_s +
/// log_mass_s`, where a soft cap has changed the product already.
struct log_mass_of {
  const float* log_mass;  ///< `[slots]`; by what it reads alone, which stays in registers
  float scale;            ///< of products q·k

  /// Of the head's slots; read where it lies.
  explicit log_mass_of(const head_ref& head) : log_mass(&head.log_mass(0)), scale(head.scale()) {}

  /// The logit of slot `s`, `dot` its product q·k.
  float operator()(index_t s, float dot) const {
    return detail::multiply_add(scale, dot, log_mass[s]);
  }
};

/// Attention of one KV head's group, one query each, over the slots in use:
///
///     ℓ_s = mass(s, q·k_s)      p = softmax(ℓ)      out = Σ_s p_s v_s
///
/// with the model's soft cap, slopes, window and sinks (`attention_spec`), the queries at the
/// newest position; in one sweep over keys and values for up to 16 query heads; nothing is
/// allocated. Over keys in blocks a query is rounded to 16 bits, by 1/32,767 of its largest
/// number at most, and a sweep has as many queries as 4,096 numbers hold. A mass function that caps
/// logits itself says so: `static constexpr bool caps = true`; one that takes a third argument is
/// given the query, `const float* [dim]`.
/// `q [group, dim]`, `out [group, value_dim]`. On request `probabilities [group, length]` and
/// `log_sum_exp [group]` of `ℓ`. Refused: no slots, null data, spans of another size.
template <class Mass>
requires std::invocable<const Mass&, index_t, float>
void attend(const head_ref& head, const Mass& log_mass, const float* q, float* out,
            std::span<float> probabilities = {}, std::span<float> log_sum_exp = {}) {
  using Eigen::Map;
  const index_t n = head.length(), dim = head.dim(), of_v = head.value_dim(), group = head.group();
  expects(n > 0, "attend: expected at least 1 slot, got an empty head");
  expects(q != nullptr && out != nullptr, "attend: expected q [", group, ", ", dim, "] and out [",
          group, ", ", of_v, "], got null");
  expects(probabilities.empty() || probabilities.size() == as_size(group, n),
          "attend: expected probabilities [", group, ", ", n, "], got ", probabilities.size(),
          " floats");
  expects(log_sum_exp.empty() || log_sum_exp.size() == as_size(group),
          "attend: expected log_sum_exp [", group, "], got ", log_sum_exp.size(), " floats");
  if (head.check_finite()) {
    expect_finite("attend: expected finite q", std::span(q, as_size(group, dim)));
  }
  const auto rows_of = [&](index_t floats) {
    return std::clamp(floats / head.row_dim(), index_t{1}, score::tile_slots);
  };
  const index_t near = rows_of(score::near_floats), rows = rows_of(score::swept_floats);
  alignas(detail::vector_bytes) float buffer[detail::row_floats];
  alignas(detail::vector_bytes) float mass[score::sweep_group][score::tile_slots];
  const float lowest = -std::numeric_limits<float>::infinity();
  // Codes lie side by side in every layout.
  const bool key_codes = in_blocks(head.type().keys), value_codes = in_blocks(head.type().values);
  const storage keys_as = detail::read_as(head.type().keys, head.even_keys()),
                values_as = detail::read_as(head.type().values, head.even_values());
  // What is read where it lies, not from the buffer, is read page by page.
  const bool keys_lie = head.even_keys() && keys_as == head.type().keys,
             values_lie = head.even_values() && values_as == head.type().values;
  const auto in_page = [&](bool lie, index_t s, index_t most) {
    return lie ? std::min(head.rows_from(s), most) : most;
  };
  // Bytes from the `some` rows at `s` to those of the next page; 0: they do not end one.
  const auto follows = [&](bool lie, index_t s, index_t some, auto address) {
    const bool ends = lie && some == head.rows_from(s) && s + some < n;
    return ends ? address(s + some) - address(s) : 0;
  };
  const score::logit_terms terms(head);
  score::rounded_queries rounded;  // only with codes
  const score::newest_slots newest(head);
  const index_t together = key_codes ? score::rounded_queries::most(dim) : score::sweep_group;

  for (index_t g0 = 0; g0 < group; g0 += together) {
    const index_t heads = std::min(together, group - g0);
    // Rows where they lie are read once for so many queries; others, or for more, stay near.
    const auto at_once = [&](bool lie) { return lie && (heads <= 2 || heads == 4) ? rows : near; };
    const float* const queries = q + std::ptrdiff_t{g0} * dim;
    float of_mean[score::sweep_group];  // products with the mean that keys are held less
    if (key_codes) {
      rounded.assign(score::queries_of_codes(head, queries, heads, buffer, of_mean), heads, dim);
    }
    score::softmax<> all[score::sweep_group];
    for (index_t g = 0; g < heads; ++g) {
      all[g] = terms.sink(g0 + g);
    }
    float* const outputs = out + std::ptrdiff_t{g0} * of_v;
    std::fill_n(outputs, std::ptrdiff_t{heads} * of_v, 0.0F);
    for (index_t first = 0; first < n; first += rows) {
      const index_t count = std::min(rows, n - first);
      if (key_codes) {
        const auto in_half = newest.among(first, count);
        score::with_block(head.type().keys, [&]<class Block>(Block) {
          const score::code_rows<Block> keys(
              head, first, count, [&](index_t s) { return head.keys_from(s); }, in_half);
          score::qk_codes(rounded, keys, mass[0], score::tile_slots);
        });
        for (index_t g = 0; g < heads && is_centred(head.type().keys); ++g) {
          Map<Eigen::ArrayXf>(mass[g], count) += of_mean[g];
        }
        if (!in_half.empty()) {
          score::qk_newest(head, in_half, first, queries, heads, buffer, mass[0],
                           score::tile_slots);
        }
      }
      for (index_t i = 0, some = 0; !key_codes && i < count; i += some) {
        some = in_page(keys_lie, first + i, std::min(at_once(keys_lie), count - i));
        const std::ptrdiff_t next =
            follows(keys_lie, first + i, some, [&](index_t s) { return head.keys_from(s).data; });
        detail::use_rows(
            keys_as, head.keys_from(first + i), some, dim,
            [&] { return detail::load_keys(head, first + i, some, buffer); },
            [&](const auto& keys) {
              score::qk_tile(queries, heads, keys, mass[0] + i, score::tile_slots, next);
            });
      }
      for (index_t g = 0; g < heads; ++g) {
        if (terms.caps() && !requires { Mass::caps; }) {
          std::fill(mass[g] + count, mass[g] + score::padded(count), 0.0F);
          terms.cap_products(score::aligned_block(mass[g], score::padded(count)));
        }
        const float* const dots = mass[g];
        float logit[score::tile_slots];
        for (index_t i = 0; i < count; ++i) {
          if constexpr (std::invocable<const Mass&, index_t, float, const float*>) {
            logit[i] = log_mass(first + i, dots[i], queries + std::ptrdiff_t{g} * dim);
          } else {
            logit[i] = log_mass(first + i, dots[i]);
          }
        }
        std::copy_n(logit, count, mass[g]);
        if (terms.by_place()) {
          terms.place(head, g0 + g, head.next_position() - 1, first, count, mass[g]);
        }
        if (!probabilities.empty()) {
          std::copy_n(mass[g], count, probabilities.data() + std::ptrdiff_t{g0 + g} * n + first);
        }
        std::fill(mass[g] + count, mass[g] + score::padded(count), lowest);
        score::aligned_block block(mass[g], score::padded(count));
        Map<Eigen::VectorXf>(outputs + std::ptrdiff_t{g} * of_v, of_v) *= all[g].take(block);
      }
      if (value_codes) {
        const auto in_half = newest.among(first, count);
        score::with_block(head.type().values, [&]<class Block>(Block) {
          const score::code_rows<Block> values(
              head, first, count, [&](index_t s) { return head.values_from(s); }, in_half);
          score::pv_codes(mass[0], score::tile_slots, heads, values, of_v, outputs);
        });
        if (!in_half.empty()) {
          score::pv_newest(head, in_half, first, mass[0], score::tile_slots, heads, buffer,
                           outputs);
        }
      }
      for (index_t i = 0, some = 0; !value_codes && i < count; i += some) {
        some = in_page(values_lie, first + i, std::min(at_once(values_lie), count - i));
        const std::ptrdiff_t next = follows(values_lie, first + i, some,
                                            [&](index_t s) { return head.values_from(s).data; });
        detail::use_rows(
            values_as, head.values_from(first + i), some, of_v,
            [&] { return detail::load_values(head, first + i, some, buffer); },
            [&](const auto& values) {
              score::pv_tile(mass[0] + i, score::tile_slots, heads, values, outputs, next);
            });
      }
    }
    for (index_t g = 0; g < heads; ++g) {
      float* const output = outputs + std::ptrdiff_t{g} * of_v;
      Map<Eigen::VectorXf>(output, of_v) /= all[g].sum;
      if (head.rotates_values()) {
        detail::hadamard(output, of_v);
      }
      if (!log_sum_exp.empty()) {
        log_sum_exp[as_size(g0 + g)] = all[g].log_sum_exp();
      }
      if (!probabilities.empty()) {
        float* p = probabilities.data() + std::ptrdiff_t{g0 + g} * n;
        for (index_t first = 0; first < n; first += score::tile_slots) {
          const index_t count = std::min(score::tile_slots, n - first);
          std::copy_n(p + first, count, mass[0]);
          std::fill(mass[0] + count, mass[0] + score::padded(count), lowest);
          score::aligned_block block(mass[0], score::padded(count));
          // Not below the log-sum-exp: it is rounded when logits are large.
          block = (block - all[g].max).exp() / all[g].sum;
          std::copy_n(mass[0], count, p + first);
        }
      }
    }
  }
}

/// Attention with log-mass.
inline void attend(const head_ref& head, const float* q, float* out,
                   std::span<float> probabilities = {}, std::span<float> log_sum_exp = {}) {
  attend(head, log_mass_of(head), q, out, probabilities, log_sum_exp);
}

/// Refused: a log-sum-exp that is not of this head's attention, as the last of its tokens' queries
/// shows: in another base, without log-mass or a sink. What a storage of few bits rounds is not
/// seen.
template <class Query>
void expect_log_sum_exp(const char* call, const head_ref& head, const query_view<Query>& own) {
  if (own.log_sum_exp == nullptr || own.count == 0) {
    return;
  }
  const index_t group = head.group(), dim = head.dim(), last = own.count - 1;
  std::vector<float> q(as_size(group, dim)), out(as_size(group, head.value_dim()));
  std::vector<float> measured(as_size(group));
  for (index_t g = 0; g < group; ++g) {
    std::transform(own.at(g, last), own.at(g, last) + dim, q.data() + std::ptrdiff_t{g} * dim,
                   [](Query x) { return static_cast<float>(x); });
  }
  attend(head, q.data(), out.data(), {}, measured);
  for (index_t g = 0; g < group; ++g) {
    const float wanted = measured[as_size(g)], got = own.log_sum(g, last);
    expects(!(std::abs(got - wanted) > 0.5F + 0.1F * std::abs(wanted)), call,
            ": expected a log-sum-exp near ", wanted,
            " (natural logarithm) of the last query, got ", got);
  }
}

}  // namespace kvmeld::inline v0
