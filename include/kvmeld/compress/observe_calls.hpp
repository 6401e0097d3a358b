// SPDX-License-Identifier: MIT
/// A compressor's `observe`: a step's attention, from an engine that computes its own.
#pragma once

#include <algorithm>  // std::copy_n

#include "kvmeld/compress/head_calls.hpp"
#include "kvmeld/executor.hpp"

namespace kvmeld::inline v0 {

/// One decode step's attention of the heads chosen, from an engine that computes its own.
struct step_attention {
  /// [heads, group, stride] of the softmax that includes the newest token; the first `length` of
  /// each row are read.
  std::span<const float> probabilities = {};
  index_t stride = 0;  ///< 0: the longest of the heads' lengths
  /// [heads, group] of the logits, a sink's among them, natural logarithm
  std::span<const float> log_sum_exp = {};
  any_span query = {};  ///< [heads, group, key_dim] rotated, the newest token's
};

namespace detail {

/// What `compressor` says of it is not said again here.
template <policy P>
class observe_calls : protected head_calls<P> {
 protected:
  using base = head_calls<P>;
  using base::base;
  using base::kv_, base::of, base::by_policy;
  using typename base::lease;

  template <executor E>
  void observe(const head_selection& heads, const step_attention& in, const E& run) {
    heads.check("observe", kv_.heads());
    const index_t group = kv_.head(0).group(), dim = kv_.head(0).dim();
    index_t longest = 0;
    for (index_t i = 0; i < heads.count(); ++i) {
      this->expect_left("observe", heads[i]);
      longest = std::max(longest, kv_.head(heads[i]).length());
    }
    const index_t stride = in.stride > 0 ? in.stride : longest, rows = heads.count() * group;
    expects(stride >= longest, "observe: expected a stride of at least ", longest, ", got ",
            stride);
    const auto expect = [&](const char* what, const any_span& x, index_t each) {
      const std::size_t wanted = as_size(rows, each);
      expects(x.size() == 0 || x.size() == wanted, "observe: expected ", what, " (", wanted,
              " numbers) or none, got ", x.size());
      expects(x.size() == 0 || x.data() != nullptr, "observe: expected ", what, ", got null");
      return x.size() > 0;
    };
    const observation_needs given = {
        expect("probabilities [heads, group, stride]", in.probabilities, stride),
        expect("log_sum_exp [heads, group]", in.log_sum_exp, 1),
        expect("query [heads, group, key_dim]", in.query, dim)};
    for (index_t i = 0; i < heads.count(); ++i) {
      this->expect_given("observe", heads[i], given);
      if (of(heads[i]).sealed > 0) {
        this->expect_given_sealed("observe", heads[i], given);
      }
    }
    lease work(this->pool_, run.workers());
    run(heads.count(), [&](index_t i, index_t worker) {
      const seen_head behind_seal = this->seen(heads[i]);
      const head_ref all = kv_.head(heads[i]);
      workspace& w = work[worker];
      const index_t n = all.length(), first = i * group, sealed = of(heads[i]).sealed;
      observation seen;
      if (given.probabilities) {
        for (index_t r = 0; r < group; ++r) {
          std::copy_n(in.probabilities.data() + as_size(first + r, stride), n,
                      w.attention.data() + as_size(r, n));
        }
        seen.probabilities = std::span(w.attention).first(as_size(group, n));
      }
      if (given.log_sum_exp) {
        seen.log_sum_exp = in.log_sum_exp.subspan(as_size(first), as_size(group));
      }
      if (sealed > 0) {  // without the sinks' share only policies that need neither come here
        const bool whole = given.log_sum_exp || all.spec().sink_logits.empty();
        seen = given.probabilities && whole ? observed_behind(all, sealed, w, seen.log_sum_exp)
                                            : observation();
      }
      if (given.query) {
        seen.query = in.query.floats(std::ptrdiff_t{first} * dim, group * dim, w.input.data());
      }
      by_policy(heads[i], [&](const auto& p) {
        kvmeld::observe(p, behind_seal.head(), of(heads[i]).state, w, seen);
      });
    });
  }
};

}  // namespace detail
}  // namespace kvmeld::inline v0
