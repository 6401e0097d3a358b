// SPDX-License-Identifier: MIT
/// Plans for pages: those that are only appended to, and those that are kept or freed whole.
#pragma once

#include <algorithm>   // std::ranges::any_of
#include <functional>  // std::greater
#include <numeric>     // std::iota
#include <tuple>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/merge/apply.hpp"

namespace kvmeld::inline v0 {

/// The part of `plan` that is about the new slots, those from `fixed` on. The first `fixed` slots
/// are kept, byte for byte. New slots that `plan` keeps are kept; those that it evicts or merges
/// into a fixed slot are evicted; those that it merges with one another are merged. A new slot
/// that `plan` merges fixed slots into is kept as it is, alone; others merged into it are evicted.
/// The head is longer than `plan` has rows by the fixed slots that `plan` would have removed.
///
/// `fixed = length − 1` decides whether one new token gets a slot; a chunk, or a window of recent
/// slots that the engine still has open, may be decided at once.
void append_only(const merge_plan& plan, const kv_head auto& head, index_t fixed, merge_plan& out) {
  expects(&plan != &out, "append_only: expected two plans, got the same one twice");
  expects(fixed >= 0 && fixed <= plan.length(), "append_only: expected 0 to ", plan.length(),
          " fixed slots, got ", fixed);
  expects(plan.length() == head.length(), "append_only: expected a plan of ", head.length(),
          " slots, got ", plan.length());
  check(plan);
  out.reset(plan.length());
  out.keep(0, {head.metadata().log_mass, as_size(fixed)});
  std::vector<float> keys(as_size(fixed, plan.key_dim())), values(as_size(fixed, plan.value_dim()));
  const auto correct = [&](std::span<const float> of_key, std::span<const float> of_value) {
    keys.insert(keys.end(), of_key.begin(), of_key.end());
    values.insert(values.end(), of_value.begin(), of_value.end());
    keys.resize(as_size(out.rows(), plan.key_dim()));  // no correction: zeros
    values.resize(as_size(out.rows(), plan.value_dim()));
  };
  for (index_t r = 0; r < plan.rows(); ++r) {
    const index_t anchor = plan.anchor(r);
    if (anchor < fixed) {
      continue;
    }
    const auto sources = plan.row(r);
    if (std::ranges::any_of(sources, [&](const merge_source& e) { return e.source < fixed; })) {
      out.keep(anchor, head.log_mass(anchor));
      correct({}, {});
    } else {
      std::ranges::for_each(sources, [&](const merge_source& e) { out.add(e); });
      out.end_row(plan.log_mass(r));
      correct(plan.key_correction(r), plan.value_correction(r));
    }
  }
  if (!plan.key_corrections().empty()) {
    out.correct_keys(keys, plan.key_dim());
  }
  if (!plan.value_corrections().empty()) {
    out.correct_values(values, plan.value_dim());
    out.set_for_rotated_values(plan.for_rotated_values());
  }
  out.set_measured(plan.measured());
}

/// Carries out a plan of whole pages (`whole_pages`) for head `h`, and for those that share its
/// table, by changing the table alone: kept pages move to its front, the others after them, and no
/// key or value is touched. `state[h]`: the `head_state` of head `h`. Refused, with nothing
/// changed: a plan that breaks a page.
template <class State>
void keep_pages(paged_cache& kv, index_t h, const merge_plan& plan, State& state) {
  const page_table table = kv.table(h);
  const index_t slots = table.slots;
  const auto each_sharing = [&](auto use) {
    for (index_t i = 0; i < kv.heads(); ++i) {
      if (kv.share_table(i, h)) {
        use(i);
      }
    }
  };
  check(plan);
  each_sharing([&](index_t i) {
    expects(plan.length() == kv.head(i).length(), "keep_pages: expected a plan of ",
            kv.head(i).length(), " slots, got ", plan.length());
  });
  for (index_t r = 0; r < plan.rows(); ++r) {
    const index_t s = plan.anchor(r);
    expects(!plan.changes_row(r) && s % slots == r % slots &&
                (r % slots == 0 || s == plan.anchor(r - 1) + 1),
            "keep_pages: expected whole pages of ", slots, " unchanged slots, got slot ", s,
            " in row ", r);
  }
  expects(plan.rows() % slots == 0 || plan.anchor(plan.rows() - 1) == plan.length() - 1,
          "keep_pages: expected whole pages of ", slots, " slots, got ", plan.rows(), " rows");
  each_sharing([&](index_t i) {  // of heads that share a table, each has its own log-mass
    const head_ref head = kv.head(i);
    state[i].extend(head.length());
    for (index_t r = 0; r < plan.rows(); ++r) {
      merge::move_metadata(head, state[i], r, plan.anchor(r));
    }
    head.truncate(plan.rows());
    state[i].truncate(plan.rows());
  });
  for (index_t r = 0; r < plan.rows(); r += slots) {  // anchors ascend: never forward
    index_t* const from = table.pages + plan.anchor(r) / slots;
    std::rotate(table.pages + r / slots, from, from + 1);
  }
}

/// `plan`, rounded to whole pages of `slots` slots: the pages in which it keeps most slots stay as
/// they are, all their slots, as many pages as its rows would take; of pages with as many the later
/// one, and the last page, which is being filled, in any case: so fewer slots than rows may be
/// kept, and sinks that are alone in their page may be evicted. For plans that evict. Refused:
/// merges, weights and corrections, which a page cannot keep.
void whole_pages(const merge_plan& plan, const kv_head auto& head, index_t slots, merge_plan& out) {
  expects(slots > 0, "whole_pages: expected pages of at least 1 slot, got ", slots);
  expects(plan.length() == head.length(), "whole_pages: expected a plan of ", head.length(),
          " slots, got ", plan.length());
  check(plan);
  const page_table pages{.slots = slots};
  std::vector<index_t> kept(as_size(pages.taken_by(plan.length())));
  for (index_t r = 0; r < plan.rows(); ++r) {
    expects(!plan.changes_row(r),
            "whole_pages: expected a plan that only evicts, got a merge or correction in row ", r);
    ++kept[as_size(plan.anchor(r) / slots)];
  }
  std::vector<index_t> order(kept.size());
  std::iota(order.begin(), order.end(), index_t{0});
  const auto last = static_cast<index_t>(kept.size()) - 1;
  std::ranges::stable_sort(order, std::greater<>{},
                           [&](index_t p) { return std::tuple(p == last, kept[as_size(p)], p); });
  order.resize(as_size(pages.taken_by(plan.rows())));
  std::ranges::sort(order);
  out.reset(plan.length());
  for (const index_t p : order) {
    const index_t first = p * slots, count = std::min(slots, plan.length() - first);
    out.keep(first, {head.metadata().log_mass + first, as_size(count)});
  }
}

}  // namespace kvmeld::inline v0
