// SPDX-License-Identifier: MIT
/// Tokens that see each other and all that heads hold before it is known whether they count.
#pragma once

#include <algorithm>  // std::copy_n, std::min, std::max
#include <limits>     // std::numeric_limits
#include <utility>    // std::pair
#include <vector>

#include "kvmeld/compress/open_heads.hpp"

namespace kvmeld::inline v0::detail {

/// Attends as `tokens` more tokens of one request's heads do, which then have them (`keeps`) or are
/// as they were; their rows, by head.
template <policy P>
std::vector<drafted> attended(open_heads<P>& all, const char* call, const head_selection& chosen,
                              const step_input& in, std::span<float> out, index_t tokens,
                              bool keeps) {
  chosen.check(call, all.kv.heads());
  expects(tokens > 0 && chosen.count() > 0, call, ": expected at least 1 token and head, got ",
          tokens, " and ", chosen.count());
  all.expect_rows(call, chosen, in, out, tokens);
  all.expect_alike(call, chosen);
  const index_t request = all.kv.request_of(chosen[0]);
  const head_ref any = all.kv.head(0);
  const index_t n = chosen.count(), dim = any.dim(), of_v = any.value_dim(),
                own_v = any.own_value_dim(), group = any.group();
  const std::vector<float> q = in.q.all(), k = in.k.all(), v = in.v.all();
  std::vector<drafted> rows(as_size(n));
  std::vector<head_mark> before;
  for (index_t i = 0; i < n; ++i) {
    const index_t h = chosen[i];
    const head_ref head = all.kv.head(h);
    expects(all.kv.request_of(h) == request, call, ": expected heads of one request, got ", request,
            " and ", all.kv.request_of(h));
    expects(all.of(h).draft.tokens == 0, call, ": expected accept first, got a draft of head ", h);
    all.admit(call, h, keeps ? open::prompt : open::draft);
    expects(errc::no_capacity, tokens <= head.capacity() - head.length(), call,
            ": expected room for ", tokens, " tokens, got ", head.capacity() - head.length(),
            " free slots");
    head.expect_pages(head.length(), head.length() + tokens);
    all.kv.expect_own_pages(call, h, head.length(), head.length() + tokens);
    before.push_back(head.mark());
    drafted& d = rows[as_size(i)];
    d.tokens = tokens;
    const auto take = [&](std::vector<float>& to, const std::vector<float>& from, index_t each) {
      for (index_t t = 0; t < tokens; ++t) {
        const auto row = from.begin() + (std::ptrdiff_t{t} * n + i) * each;
        to.insert(to.end(), row, row + each);
      }
      expects(errc::not_finite, all_finite(to.data(), tokens * each), call,
              ": expected finite rows, got NaN or Inf in head ", h);
    };
    take(d.q, q, group * dim), take(d.k, k, dim), take(d.v, v, own_v);
  }
  if (!keeps || !in.positions.empty()) {
    all.expect_positions(call, chosen, in, tokens, false);
  }
  const auto attend = [&] {
    bool finite = true;
    for (index_t i = 0; i < n; ++i) {
      const head_ref head = all.kv.head(chosen[i]);
      const drafted& d = rows[as_size(i)];
      head_state& state = all.of(chosen[i]).state;
      const undo state_too(state);
      const auto key = [&](index_t t) { return d.k.data() + std::ptrdiff_t{t} * dim; };
      if (keeps) {  // drafted tokens are to be as steps, which come one by one
        head.before_keys(tokens, [&](index_t t, float* x) { std::copy_n(key(t), dim, x); });
      }
      for (index_t t = 0; t < tokens; ++t) {
        float* const to = out.data() + (std::ptrdiff_t{t} * n + i) * group * of_v;
        const float* const value = d.v.data() + std::ptrdiff_t{t} * own_v;
        keeps ? head.push_row(key(t), value) : head.push(key(t), value);
        if (!state.rests()) {
          state.extend(all.seen_length(chosen[i]));
        }
        all.policies.with(chosen[i], [&](const auto& p) {
          declared(p).attend(head, state, d.q.data() + std::ptrdiff_t{t} * group * dim, to, {}, {});
        });
        finite = finite && all_finite(to, group * of_v);
      }
    }
    expects(errc::not_finite, finite, call, ": expected finite rows, got NaN or Inf");
  };
  const auto take_back = [&] {
    for (index_t i = 0; i < n; ++i) {
      all.kv.head(chosen[i]).restore(before[as_size(i)]);
    }
  };
  or_undo(attend, take_back);
  if (!keeps) {
    take_back();
  }
  return rows;
}

/// What `compressor::draft_room` says.
template <policy P>
index_t draft_room(const open_heads<P>& all, index_t request) {
  std::int64_t room = std::numeric_limits<index_t>::max();
  for (const index_t h : all.closed("draft_room", request)) {
    const head_ref head = all.kv.head(h);
    room = std::min<std::int64_t>(room, head.capacity() - head.length());
    // A window is cut exactly: attention leaves out what a step would have cut.
    if (!all.policies.is_cut(h) && all.policies.evicts(h)) {
      room = std::min(
          room, std::max<std::int64_t>(all.of(h).limit.trigger_length() - all.seen_length(h), 1));
      // With the token after a division any head may be compressed.
      if (const kvmeld::new_scores scores = all.new_scores(h); scores.every > 0) {
        room = std::min<std::int64_t>(room, scores.every - scores.steps + 1);
      }
    }
  }
  return static_cast<index_t>(room);
}

/// Makes the first `tokens` of a request's draft steps, one after another, and ends it.
template <policy P>
void accept(open_heads<P>& all, index_t request, index_t tokens, workspace_pool& pool) {
  const std::vector<index_t> chosen = all.of_request("accept", request);
  expects(tokens >= 0, "accept: expected at least 0 tokens, got ", tokens);
  const bool begun = all.has_draft(chosen[0]);
  expects(tokens == 0 || begun, "accept: expected a draft, got none");
  for (const index_t h : chosen) {
    const index_t most = all.of(h).draft.tokens;
    expects(tokens <= most || most == 0, "accept: expected at most ", most, " drafted tokens, got ",
            tokens);
    if (begun) {
      all.admit("accept", h, open::draft);
    }
    if (tokens > 0) {
      expects(most > 0 || all.kv.head(h).next_position() == 0,
              "accept: expected a draft of every head of the request, got none of head ", h);
      const seen_head seen = all.seen(h);
      all.policies.with(h, [&](const auto& p) { check_step(p, seen.head(), all.of(h).limit); });
      all.expect_own_pages("accept", h, all.of(h).limit, tokens);
    }
  }
  std::vector<drafted> drafts;
  for (const index_t h : chosen) {
    // What a policy throws ends the draft: its tokens that were reached are not to count again.
    drafts.push_back(all.end_draft(h));
    all.of(h).not_finite = false;
  }
  const head_ref any = all.kv.head(0);
  const index_t each = any.spec().kv_heads;
  std::vector<float> out(as_size(any.group(), any.value_dim()));
  workspace_pool::lease work(pool, 1);
  for (std::ptrdiff_t t = 0; t < tokens; ++t) {
    for (std::size_t first = 0; first < chosen.size(); first += as_size(each)) {
      const head_range layer{chosen[first], each};
      for (index_t i = 0; i < each; ++i) {
        const index_t h = layer.first + i;
        const drafted& d = drafts[first + as_size(i)];
        if (d.tokens > 0 && !all.of(h).not_finite) {
          all.of(h).not_finite = !all.step(h, work[0], d.q.data() + t * any.group() * any.dim(),
                                           d.k.data() + t * any.dim(),
                                           d.v.data() + t * any.own_value_dim(), out.data());
          all.count_measured(h);
        }
      }
      all.evict_late(layer, work, serial{});
    }
    all.divide_again(chosen);
  }
  for (const index_t h : chosen) {
    all.count_measured(h);
  }
  all.expect_finite_steps("accept", chosen);
}

}  // namespace kvmeld::inline v0::detail
