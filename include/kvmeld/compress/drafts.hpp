// SPDX-License-Identifier: MIT
/// Speculation: drafted tokens that count only once they are accepted.
#pragma once

#include <algorithm>  // std::ranges::find
#include <cmath>      // std::isfinite

#include "kvmeld/compress/compressor_base.hpp"

namespace kvmeld::inline v0::detail {

template <policy P>
class drafting : protected compressor_base<P> {
 protected:
  using base = compressor_base<P>;
  using base::at, base::kv_, base::states_, base::drafts_, base::limits_, base::policy_of;
  using base::base;
  using typename base::drafted, typename base::lease;

  void draft_rows(const head_selection& heads, const step_input& in, std::span<float> out,
                  index_t tokens) {
    this->expect_heads("draft", heads);
    expects(tokens > 0 && heads.count() > 0, "draft: expected at least 1 token and head, got ",
            tokens, " and ", heads.count());
    this->expect_rows("draft", heads, in, out, tokens);
    const index_t request = kv_.request_of(heads[0]);
    auto& drafts = drafts_[at(request)];
    for (index_t i = 0; i < heads.count(); ++i) {
      const index_t h = heads[i];
      expects(kv_.request_of(h) == request, "draft: expected heads of one request, got ", request,
              " and ", kv_.request_of(h));
      for (const drafted& d : drafts) {
        expects(std::ranges::find(d.heads, h) == d.heads.end(),
                "draft: expected accept first, got a second draft of head ", h);
      }
      this->expect_room("draft", h, tokens);
      kv_.head(h).expect_pages(kv_.head(h).length(), kv_.head(h).length() + tokens);
    }
    const head_ref any = kv_.head(0);
    const index_t dim = any.dim(), rows = any.group() * dim;
    drafted d{.heads = {}, .tokens = tokens, .q = {}, .k = {}, .v = {}};
    const auto all_floats = [](const any_span& x) {
      std::vector<float> all(x.size());
      const auto n = static_cast<index_t>(x.size());
      const float* const from = x.floats(0, n, all.data());
      if (from != all.data()) {
        std::copy_n(from, n, all.data());
      }
      return all;
    };
    d.q = all_floats(in.q), d.k = all_floats(in.k), d.v = all_floats(in.v);
    bool finite = true;
    for (index_t i = 0; i < heads.count(); ++i) {
      const index_t h = heads[i];
      d.heads.push_back(h);
      const head_ref head = kv_.head(h);
      head_state& state = states_[at(h)];
      const index_t length = head.length(), next = head.next_position(), measured = state.length();
      for (index_t t = 0; t < tokens; ++t) {
        const std::ptrdiff_t row = std::ptrdiff_t{t} * heads.count() + i;
        head.push(d.k.data() + row * dim, d.v.data() + row * dim);
        state.extend(head.length());
        traits::attend(policy_of(h), head, state, d.q.data() + row * rows, out.data() + row * rows,
                       {}, {});
        for (index_t e = 0; e < rows; ++e) {
          finite = finite && std::isfinite(out[static_cast<std::size_t>(row * rows + e)]);
        }
      }
      head.restore(length, next);
      state.truncate(measured);
    }
    expects(errc::not_finite, finite, "draft: expected finite rows, got NaN or Inf");
    drafts.push_back(std::move(d));
  }

  void accept_rows(index_t request, index_t tokens) {
    this->expect_request("accept", request);
    auto& drafts = drafts_[at(request)];
    expects(tokens >= 0, "accept: expected at least 0 tokens, got ", tokens);
    for (const drafted& d : drafts) {
      expects(tokens <= d.tokens, "accept: expected at most ", d.tokens, " drafted tokens, got ",
              tokens);
      for (const index_t h : d.heads) {
        if (tokens > 0) {
          check_step(policy_of(h), kv_.head(h), limits_[at(h)]);
        }
      }
    }
    expects(tokens == 0 || !drafts.empty(), "accept: expected a draft, got none");
    const index_t dim = kv_.head(0).dim(), rows = kv_.head(0).group() * dim;
    std::vector<float> out(static_cast<std::size_t>(rows));
    lease work(this->pool_, 1);
    for (const drafted& d : drafts) {
      const auto heads = static_cast<index_t>(d.heads.size());
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t i = 0; i < heads; ++i) {
          const index_t h = d.heads[at(i)];
          const std::ptrdiff_t row = std::ptrdiff_t{t} * heads + i;
          try_step(policy_of(h), kv_.head(h), states_[at(h)], work[0], d.q.data() + row * rows,
                   d.k.data() + row * dim, d.v.data() + row * dim, limits_[at(h)], out.data());
        }
      }
    }
    drafts.clear();
  }
};

}  // namespace kvmeld::inline v0::detail
