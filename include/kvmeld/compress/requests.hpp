// SPDX-License-Identifier: MIT
/// A compressor's calls on whole requests: drafts, and requests emptied, copied, saved, shrunk.
#pragma once

#include <algorithm>  // std::min, std::max, std::ranges::for_each
#include <deque>
#include <limits>   // std::numeric_limits
#include <utility>  // std::move

#include "kvmeld/compress/head_calls.hpp"
#include "kvmeld/compress/saved_heads.hpp"

namespace kvmeld::inline v0::detail {

/// What `compressor` says of each call is not said again here.
template <policy P>
class request_calls : protected head_calls<P> {
 protected:
  using base = head_calls<P>;
  using base::base;
  using base::kv_, base::heads_, base::of, base::by_policy, base::pins_;
  using typename base::drafted, typename base::leaving, typename base::lease,
      typename base::one_head;

  /// Refused: heads that cannot make a step.
  void expect_tokens(const head_selection& heads, const step_input& in) const {
    this->expect_alike("step", heads);
    for (index_t i = 0; i < heads.count(); ++i) {
      const index_t h = heads[i];
      this->expect_left("step", h);
      by_policy(h, [&](const auto& p) { check_token(p, kv_.head(h)); });
      this->expect_nothing_open("step", h);
      this->expect_own_pages("step", h, of(h).limit, 1);
    }
    this->expect_positions("step", heads, in, 1, true);
  }

  void draft(const head_selection& heads, const step_input& in, std::span<float> out,
             index_t tokens) {
    std::vector<drafted> rows = attended("draft", heads, in, out, tokens, false);
    for (index_t i = 0; i < heads.count(); ++i) {
      this->begin_draft(heads[i], std::move(rows[as_size(i)]));
    }
  }
  void attend(const head_selection& heads, const step_input& in, std::span<float> out,
              index_t tokens) {
    (void)attended("attend", heads, in, out, tokens, true);
  }

  /// Attends as `tokens` more tokens of one request's heads do, which then have them (`keeps`) or
  /// are as they were; their rows, by head.
  std::vector<drafted> attended(const char* call, const head_selection& heads, const step_input& in,
                                std::span<float> out, index_t tokens, bool keeps) {
    heads.check(call, kv_.heads());
    expects(tokens > 0 && heads.count() > 0, call, ": expected at least 1 token and head, got ",
            tokens, " and ", heads.count());
    this->expect_rows(call, heads, in, out, tokens);
    this->expect_alike(call, heads);
    const index_t request = kv_.request_of(heads[0]);
    const head_ref any = kv_.head(0);
    const index_t n = heads.count(), dim = any.dim(), of_v = any.value_dim(),
                  own_v = any.own_value_dim(), group = any.group();
    const std::vector<float> q = in.q.all(), k = in.k.all(), v = in.v.all();
    std::vector<drafted> rows(as_size(n));
    for (index_t i = 0; i < n; ++i) {
      const index_t h = heads[i];
      const head_ref head = kv_.head(h);
      expects(kv_.request_of(h) == request, call, ": expected heads of one request, got ", request,
              " and ", kv_.request_of(h));
      expects(of(h).draft.tokens == 0, call, ": expected accept first, got a draft of head ", h);
      if (keeps) {
        this->expect_no_draft(call, request);
      } else {
        this->expect_no_prompt(call, h);
      }
      this->expect_left(call, h);
      expects(errc::no_capacity, tokens <= head.capacity() - head.length(), call,
              ": expected room for ", tokens, " tokens, got ", head.capacity() - head.length(),
              " free slots");
      head.expect_pages(head.length(), head.length() + tokens);
      kv_.expect_own_pages(call, h, head.length(), head.length() + tokens);
      drafted& d = rows[as_size(i)];
      d.tokens = tokens;
      for (index_t t = 0; t < tokens; ++t) {
        const std::ptrdiff_t row = std::ptrdiff_t{t} * n + i;
        const auto take = [&](std::vector<float>& to, const std::vector<float>& from,
                              index_t each) {
          to.insert(to.end(), from.begin() + row * each, from.begin() + (row + 1) * each);
        };
        take(d.q, q, group * dim), take(d.k, k, dim), take(d.v, v, own_v);
      }
      for (const auto* x : {&d.q, &d.k, &d.v}) {
        expects(errc::not_finite, all_finite(x->data(), static_cast<index_t>(x->size())), call,
                ": expected finite rows, got NaN or Inf in head ", h);
      }
    }
    if (!keeps || !in.positions.empty()) {
      this->expect_positions(call, heads, in, tokens, false);
    }
    bool finite = true;
    std::deque<rows_taken_back> taken_back;
    for (index_t i = 0; i < n; ++i) {
      const head_ref head = kv_.head(heads[i]);
      const drafted& d = rows[as_size(i)];
      head_state& state = of(heads[i]).state;
      const undo state_too(state);
      taken_back.emplace_back(head);
      for (index_t t = 0; t < tokens; ++t) {
        float* const to = out.data() + (std::ptrdiff_t{t} * n + i) * group * of_v;
        head.push(d.k.data() + std::ptrdiff_t{t} * dim, d.v.data() + std::ptrdiff_t{t} * own_v);
        state.extend(head.length() - of(heads[i]).kept.count());
        by_policy(heads[i], [&](const auto& p) {
          declared(p).attend(head, state, d.q.data() + std::ptrdiff_t{t} * group * dim, to, {}, {});
        });
        finite = finite && all_finite(to, group * of_v);
      }
    }
    expects(errc::not_finite, finite, call, ": expected finite rows, got NaN or Inf");
    if (keeps) {
      std::ranges::for_each(taken_back, &rows_taken_back::release);
    }
    return rows;
  }

  index_t draft_room(index_t request) const {
    this->expect_between("draft_room", request);
    std::int64_t room = std::numeric_limits<index_t>::max();
    for (const index_t h : this->heads_of("draft_room", request)) {
      const head_ref head = kv_.head(h);
      room = std::min<std::int64_t>(room, head.capacity() - head.length());
      // A window is cut exactly: attention leaves out what a step would have cut.
      if (!this->is_cut(h) && by_policy(h, [](const auto& p) { return declared(p).evicts(); })) {
        const std::int64_t own = head.length() - of(h).kept.count();
        room = std::min(room, std::max<std::int64_t>(of(h).limit.trigger_length() - own, 1));
      }
    }
    return static_cast<index_t>(room);
  }

  void accept(index_t request, index_t tokens) {
    const auto heads = this->heads_of("accept", request);
    expects(tokens >= 0, "accept: expected at least 0 tokens, got ", tokens);
    const bool open = this->has_draft(request);
    expects(tokens == 0 || open, "accept: expected a draft, got none");
    for (const index_t h : heads) {
      const index_t most = of(h).draft.tokens;
      expects(tokens <= most || most == 0, "accept: expected at most ", most,
              " drafted tokens, got ", tokens);
      if (open) {
        this->expect_left("accept", h);
      }
      if (tokens > 0) {
        expects(most > 0 || kv_.head(h).next_position() == 0,
                "accept: expected a draft of every head of the request, got none of head ", h);
        const seen_head seen = this->seen(h);
        by_policy(h, [&](const auto& p) { check_step(p, seen.head(), of(h).limit); });
        this->expect_own_pages("accept", h, of(h).limit, tokens);
      }
    }
    const head_ref any = kv_.head(0);
    const index_t each = any.spec().kv_heads;
    std::vector<float> out(as_size(any.group(), any.value_dim()));
    lease work(this->pool_, 1);
    std::vector<drafted> drafts;
    for (const index_t h : heads) {
      // What a policy throws ends the draft: its tokens that were reached are not to count again.
      drafts.push_back(std::move(of(h).draft));
      of(h).draft.tokens = drafts.back().tokens;
      this->end_draft(h);
      of(h).not_finite = false;
    }
    for (std::size_t first = 0; first < heads.size(); first += as_size(each)) {
      const head_range layer{heads[first], each};
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t i = 0; i < each; ++i) {
          const drafted& d = drafts[first + as_size(i)];
          if (d.tokens > 0 && !of(layer.first + i).not_finite) {
            of(layer.first + i).not_finite =
                !this->step_head(layer.first + i, kv_.head(layer.first + i), work[0],
                                 d.q.data() + std::ptrdiff_t{t} * any.group() * any.dim(),
                                 d.k.data() + std::ptrdiff_t{t} * any.dim(),
                                 d.v.data() + std::ptrdiff_t{t} * any.own_value_dim(), out.data());
          }
        }
        this->evict_late(layer, work, serial{});
      }
    }
    this->count_tokens(heads);
    this->expect_finite_steps("accept", heads);
  }

  void clear(index_t request) {
    for (const index_t h : this->heads_of("clear", request)) {
      kvmeld::clear(kv_.head(h), of(h).state);
      this->hold_to(h, this->decode_limit(h, this->slots_of(h)), {});
      of(h).compressed = of(h).gathered = 0;
      kv_.count_pages(h);
    }
    pins_[as_size(request)].clear();
  }

  void copy(const request_calls& all, index_t from, index_t to) {
    const bool own = &all == this;
    expects(own || all.kv_.per_request() == kv_.per_request(), "copy: expected ", kv_.per_request(),
            " heads per request, got ", all.kv_.per_request());
    const auto source = all.heads_of("copy", from), target = this->heads_of("copy", to);
    all.expect_between("copy", from);
    if (own && from == to) {
      return;
    }
    or_recount(target, [&] {
      for (std::size_t i = 0; i < source.size(); ++i) {
        const index_t a = source[i], b = target[i];
        const head_ref x = all.kv_.head(a);
        if (!own) {
          expect_same(all, a, b);
        }
        expect_copy(x, all.of(a).state, kv_.head(b), of(b).state);
        kv_.expect_own_pages("copy", b, 0, x.length(), own ? a : -1);
      }
    });
    for (std::size_t i = 0; i < source.size(); ++i) {
      const index_t a = source[i], b = target[i];
      kvmeld::copy(all.kv_.head(a), all.of(a).state, kv_.head(b), of(b).state);
      this->hold_to(b, all.of(a).limit, all.of(a).kept, all.of(a).goes_on);
      of(b).compressed = all.of(a).compressed, of(b).gathered = all.of(a).gathered;
      kv_.count_pages(b);
    }
    pins_[as_size(to)] = all.pins_[as_size(from)];
  }
  /// Refused: head `a` of another compressor that this one could not go on with as head `b`.
  void expect_same(const request_calls& all, index_t a, index_t b) const {
    attention_spec theirs = all.kv_.head(a).spec();
    const attention_spec& ours = kv_.head(b).spec();
    theirs.check_finite = ours.check_finite;
    expects(theirs == ours, "copy: expected the attention of head ", b,
            " (its attention_spec), got another in head ", a);
    expects(declared(all.policy_of(a)) == declared(this->policy_of(b)),
            "copy: expected a request of ", this->policy_of(b).name(),
            " with the same parameters, got one of ", all.policy_of(a).name(), " in head ", a);
    expects(all.alike(a) == this->alike(b),
            "copy: expected requests whose layers keep the same tokens in both or in none, got one "
            "of each");
    const index_t sealed = all.of(a).kept.sealed;
    expects(sealed % kv_.head(b).page_slots() == 0,
            "copy: expected sealed slots in whole pages of ", kv_.head(b).page_slots(), ", got ",
            sealed, " in head ", a);
    this->expect_room("copy", b, all.of(a).kept, all.of(a).limit);
  }

  /// What heads are held to, with a checksum, then the heads.
  void save(std::ostream& out, index_t request) {
    this->expect_between("save", request);
    byte_writer limits(out);
    saved_request heads{*this, this->heads_of("save", request)};
    this->gather("save", heads.list);
    this->expect_alike("save", heads.list);
    for (const index_t h : heads.list) {
      expects(!this->awaits_pins(h), "save: expected all pinned tokens, got some to come");
      if (of(h).kept.sealed > 0) {
        limits.put(-of(h).kept.sealed);
      }
      if (of(h).kept.pinned > 0) {
        limits.put(index_t{0}), limits.put(of(h).kept.pinned);
      }
      limits.put(of(h).limit.slots);
      limits.put(of(h).limit.trigger);
    }
    limits.finish();
    save_heads(out, heads);
  }
  void load(std::istream& in, index_t request) {
    saved_request heads{*this, this->heads_of("load", request)};
    byte_reader from(in);
    for (const index_t h : heads.list) {
      const index_t capacity = kv_.head(h).capacity();
      auto slots = from.get<index_t>();
      expects(errc::corrupt_file, slots >= -capacity, "load: expected at most ", capacity,
              " sealed slots, got ", -std::int64_t{slots});
      kept_slots kept{.sealed = std::max(-slots, index_t{0})};
      slots = slots < 0 ? from.get<index_t>() : slots;
      if (slots == 0) {
        kept.pinned = from.get<index_t>(), slots = from.get<index_t>();
        expects(errc::corrupt_file, kept.pinned > 0 && kept.pinned <= capacity,
                "load: expected 1 to ", capacity, " pinned slots, got ", kept.pinned);
      }
      heads.kept.push_back(kept);
      const auto trigger = from.get<index_t>();
      heads.limits.push_back({slots, trigger});
      if (this->is_cut(h)) {
        expects(errc::corrupt_file, slots == this->slots_of(h) && trigger == 0,
                "load: expected a window of ", this->slots_of(h), " tokens without a trigger, got ",
                slots, " and ", trigger);
      } else {
        expects(errc::corrupt_file, slots > 0 && slots <= capacity && trigger >= 0,
                "load: expected a limit of 1 to ", capacity, " slots, got ", slots);
      }
    }
    from.finish();
    or_recount(heads.list, [&] { load_heads(in, heads); });
    for (std::size_t i = 0; i < heads.list.size(); ++i) {
      this->hold_to(heads.list[i], heads.limits[i], heads.kept[i]);
      one_head& one = of(heads.list[i]);
      one.gathered = kv_.head(heads.list[i]).next_position();
      one.compressed = one.gone > 0 ? one.gathered : index_t{0};
    }
    pins_[as_size(request)] = pins_of(heads);
  }

  void shrink(auto& kv, index_t capacity) {
    expects(kv_.is(&kv), "shrink: expected the cache that is compressed, got another");
    for (index_t r = 0; r < kv_.requests(); ++r) {
      this->expect_between("shrink", r);
    }
    std::int64_t least = 1;
    for (index_t h = 0; h < kv_.heads(); ++h) {
      least = std::max<std::int64_t>({least, kv_.head(h).length(), of(h).state.length(),
                                      this->least_capacity(h, of(h).limit, of(h).kept)});
    }
    expects(errc::no_capacity, capacity >= least, "shrink: expected a capacity of at least ", least,
            " slots (those in use, and the budgets), got ", capacity);
    kv.shrink(capacity);
  }

 private:
  /// Rows appended in a scope are taken back at its end, whatever a policy throws in it.
  class rows_taken_back {
   public:
    explicit rows_taken_back(const head_ref& head)
        : head_(head), length_(head.length()), next_position_(head.next_position()) {}
    rows_taken_back(const rows_taken_back&) = delete;
    rows_taken_back& operator=(const rows_taken_back&) = delete;
    ~rows_taken_back() {
      if (length_ >= 0) {
        head_.restore(length_, next_position_);
      }
    }
    void release() { length_ = -1; }

   private:
    head_ref head_;
    index_t length_, next_position_;
  };

  /// Carries out `call`. Where it refuses, the pages of `heads` are counted anew: checks count them
  /// as in use.
  void or_recount(const std::vector<index_t>& heads, const auto& call) {
    or_undo(call, [&] { this->count_pages(heads); });
  }

  /// The tokens of a request's pinned slots.
  auto pins_of(const auto& heads) const {
    std::vector<index_t> positions;
    for (const index_t h : heads.list) {
      const kept_slots& kept = of(h).kept;
      for (index_t s = kept.sealed; s < kept.count(); ++s) {
        positions.push_back(kv_.head(h).position(s));
      }
    }
    std::ranges::sort(positions);
    std::vector<typename base::token_span> spans;
    for (const index_t p : positions) {
      if (spans.empty() || p > spans.back().end) {
        spans.push_back({p, p + 1});
      }
      spans.back().end = std::max(spans.back().end, p + 1);
    }
    return spans;
  }

  /// One request's heads, as they are saved.
  struct saved_request {
    request_calls& all;
    std::vector<index_t> list;
    std::vector<kept_slots> kept = {};
    std::vector<budget> limits = {};

    index_t count() const { return static_cast<index_t>(list.size()); }
    head_ref head(index_t i) const { return all.kv_.head(list[as_size(i)]); }
    head_state& state(index_t i) const { return all.of(list[as_size(i)]).state; }
    /// The head whose tokens head `i` must have: its layer's first, or its own.
    index_t like(index_t i) const {
      return all.alike(list[as_size(i)]) ? i - i % head(i).spec().kv_heads : i;
    }
    void expect_fits(index_t i, index_t length, index_t measured) const {
      const kept_slots& own = kept[as_size(i)];
      expects(errc::corrupt_file,
              std::int64_t{own.sealed} + own.pinned <= length - measured &&
                  own.sealed % head(i).page_slots() == 0,
              "load: expected at most ", length - measured,
              " sealed and pinned slots, the former in whole pages of ", head(i).page_slots(),
              ", got ", own.sealed, " and ", own.pinned);
      if (own.sealed > 0 || own.pinned > 0) {
        all.by_policy(list[as_size(i)], [](const auto& p) { expect_seals("load: ", p); });
        all.expect_room("load", list[as_size(i)], own, limits[as_size(i)]);
      }
      head(i).expect_pages(0, length);
      all.kv_.expect_own_pages("load", list[as_size(i)], 0, length);
    }
  };
};

}  // namespace kvmeld::inline v0::detail
