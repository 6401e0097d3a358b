// SPDX-License-Identifier: MIT
/// Budgets of all heads of a model by one threshold, and a profile of them for the next prompts.
#pragma once

#include <algorithm>  // std::max_element
#include <cmath>      // std::sqrt
#include <istream>
#include <limits>  // std::numeric_limits
#include <ostream>
#include <span>
#include <string_view>
#include <vector>

#include "kvmeld/compress/layer_budgets.hpp"
#include "kvmeld/detail/bytes.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// Which of `scores [heads, slots]` are not among the `counts [heads]` highest of their head.
inline std::vector<char> below_best(std::span<const float> scores,
                                    std::span<const index_t> counts) {
  const std::size_t slots = scores.size() / counts.size();
  std::vector<char> below(scores.size());
  for (std::size_t h = 0; h < counts.size(); ++h) {
    const auto own = scores.subspan(h * slots, slots);
    const auto of_head = [&](index_t s) { return rank(own[as_size(s)]); };
    const auto count = counts[h], all = static_cast<index_t>(slots);
    if (count <= 0 || count >= all) {
      std::fill_n(below.begin() + static_cast<std::ptrdiff_t>(h * slots), slots, count <= 0);
      continue;
    }
    const search::kth_score last = search::kth_largest(
        all, count, [](index_t) { return false; }, of_head);
    for (index_t s = 0; s < all; ++s) {
      below[h * slots + as_size(s)] = last.below(of_head(s), s) ? 1 : 0;
    }
  }
  return below;
}

/// Adds to each head's budget how many of the `count` highest scores are its own, of all slots but
/// those that `is_out`.
inline void add_best(std::span<const float> scores, index_t count, auto is_out,
                     std::vector<index_t>& budget) {
  if (count == 0) {
    return;
  }
  const auto n = static_cast<index_t>(scores.size()),
             slots = n / static_cast<index_t>(budget.size());
  const auto of_all = [&](index_t i) { return rank(scores[as_size(i)]); };
  const search::kth_score last = search::kth_largest(n, count, is_out, of_all);
  for (index_t i = 0; i < n; ++i) {
    budget[as_size(i / slots)] += is_out(i) || last.below(of_all(i), i) ? 0 : 1;
  }
}

}  // namespace detail

/// One threshold over a model: the `total` highest of `scores [heads, slots]`, those of all heads
/// of all layers, are chosen, and a head gets as many slots as are its own: heads that look things
/// up get many, most get few. No floor; at most `most [heads]` each (at least 0), what is more goes
/// to the others. The counts sum to `total`; ties go to the lower head, then to the lower slot, NaN
/// is last. `scores`: of the slots that may be chosen, so not of the sinks and the latest.
/// O(scores), and one byte for each.
/// Refused: scores of another shape, totals that cannot be reached.
inline std::vector<index_t> global_budgets(std::span<const float> scores, index_t total,
                                           std::span<const index_t> most) {
  const auto heads = most.size();
  expects(heads > 0 && scores.size() % heads == 0 &&
              scores.size() <= as_size(std::numeric_limits<index_t>::max()),
          "global_budgets: expected scores [", heads, ", slots], got ", scores.size(), " numbers");
  const auto slots = static_cast<index_t>(scores.size() / heads);
  std::int64_t all = 0;
  for (const index_t n : most) {
    expects(n >= 0, "global_budgets: expected at least 0 slots per head, got ", n);
    all += std::min(n, slots);
  }
  expects(total >= 0 && total <= all, "global_budgets: expected 0 to ", all, " slots, got ", total);
  std::vector<index_t> budget(heads, 0);
  const std::vector<char> beyond = detail::below_best(scores, most);  // what it may have
  detail::add_best(
      scores, total, [&](index_t i) { return beyond[as_size(i)] != 0; }, budget);
  return budget;
}
/// The same with at most `most` (above 0) for each of `heads`.
inline std::vector<index_t> global_budgets(std::span<const float> scores, index_t heads,
                                           index_t total,
                                           index_t most = std::numeric_limits<index_t>::max()) {
  expects(heads > 0, "global_budgets: expected at least 1 head, got ", heads);
  expects(most > 0, "global_budgets: expected at least 1 slot per head, got ", most);
  return global_budgets(scores, total, std::vector<index_t>(as_size(heads), most));
}

/// AdaKV's budgets of a layer's heads (arXiv 2407.11550): each head's own
/// `floor(floor_alpha · total / heads)` best slots, then the best of all the others until `total`
/// are chosen; ties to the lower head, then to the lower slot, NaN last. `scores [heads, slots]`.
inline std::vector<index_t> ada_budgets(std::span<const float> scores, index_t heads, index_t total,
                                        double floor_alpha = 0.2) {
  expects(heads > 0 && scores.size() % as_size(heads) == 0, "ada_budgets: expected scores [", heads,
          ", slots], got ", scores.size(), " numbers");
  expects(floor_alpha >= 0 && floor_alpha <= 1, "ada_budgets: expected a floor in [0, 1], got ",
          floor_alpha);
  expects(total >= 0 && as_size(total) <= scores.size(), "ada_budgets: expected 0 to ",
          scores.size(), " slots, got ", total);
  const index_t slots = static_cast<index_t>(scores.size()) / heads,
                own = std::min(slots, static_cast<index_t>(floor_alpha * total / heads));
  std::vector<index_t> budget(as_size(heads), own);
  const std::vector<char> others =
      detail::below_best(scores, std::vector<index_t>(as_size(heads), own));
  detail::add_best(
      scores, total - heads * own, [&](index_t i) { return others[as_size(i)] == 0; }, budget);
  return budget;
}

/// How a model's slots are divided between its heads: what `global_budgets` gave on some prompts.
/// On other prompts as good as a threshold of their own, and known before the first layer is read,
/// so that an engine can compress layer by layer. And what the heads' errors weigh, if that was
/// measured: slots that all heads have, as clusters of `fold`, are worth more where it is much.
class budget_profile {
 public:
  /// Of no prompt yet.
  explicit budget_profile(index_t heads) : slots_(as_size(heads)), errors_(slots_.size()) {
    expects(heads > 0, "budget_profile: expected at least 1 head, got ", heads);
  }

  index_t heads() const { return static_cast<index_t>(slots_.size()); }
  /// Slots `[heads]`, summed over the prompts.
  std::span<const std::int64_t> slots() const { return slots_; }
  /// Errors `[heads]`, summed over the prompts.
  std::span<const double> errors() const { return errors_; }
  bool has_errors() const {
    return std::any_of(errors_.begin(), errors_.end(), [](double e) { return e > 0; });
  }
  bool operator==(const budget_profile&) const = default;
  friend void load(std::istream& in, budget_profile& profile);

  /// Counts in the budgets `[heads]` of a prompt. Refused: another number of heads, budgets below
  /// 0.
  void add(std::span<const index_t> budgets) {
    expects(budgets.size() == slots_.size(), "budget_profile: expected budgets of ", slots_.size(),
            " heads, got ", budgets.size());
    for (const index_t b : budgets) {
      expects(b >= 0, "budget_profile: expected budgets of at least 0 slots, got ", b);
    }
    for (std::size_t h = 0; h < slots_.size(); ++h) {
      slots_[h] += budgets[h];
    }
  }

  /// Counts in the errors `[heads]` of a prompt: of each head the square of what it adds wrongly to
  /// the residual stream, relative to that, as `evaluate` measures it. Refused: another number of
  /// heads, errors below 0, NaN and Inf.
  void add_errors(std::span<const double> errors) {
    expects(errors.size() == errors_.size(), "budget_profile: expected errors of ", errors_.size(),
            " heads, got ", errors.size());
    for (const double e : errors) {
      expects(e >= 0 && std::isfinite(e),
              "budget_profile: expected finite errors of at least 0, got ", e);
    }
    for (std::size_t h = 0; h < errors_.size(); ++h) {
      errors_[h] += errors[h];
    }
  }

  /// `total` slots in proportion to the roots of the errors, within [least, most] a head: where a
  /// head's squared error falls as 1 / slots, their sum is least so. Refused: a profile without
  /// errors, totals that cannot be reached.
  std::vector<index_t> by_errors(index_t total, index_t least, index_t most) const {
    expects(has_errors(), "budget_profile: expected errors");
    // A head without any shares what the others cannot take.
    const double some = 1e-9 * std::sqrt(*std::max_element(errors_.begin(), errors_.end()));
    std::vector<double> weights;
    for (const double e : errors_) {
      weights.push_back(std::sqrt(e) + some);
    }
    return proportional_budgets(weights, total, least, most);
  }

  /// `total` slots in the profile's proportions, at most `most` a head; rounded by largest
  /// remainders, ties to the lower head. A profile of one prompt gives that prompt's budgets back.
  /// Refused: a profile of nothing, totals that cannot be reached.
  std::vector<index_t> budgets(index_t total, index_t most) const {
    double sum = 0;
    for (const std::int64_t s : slots_) {
      sum += static_cast<double>(s);
    }
    expects(sum > 0, "budget_profile: expected a profile of at least 1 slot, got an empty one");
    std::vector<double> weights;
    for (const std::int64_t s : slots_) {  // a head without any shares what the others cannot take
      weights.push_back(static_cast<double>(s) + 1e-9 * sum);
    }
    return proportional_budgets(weights, total, 0, most);
  }

 private:
  std::vector<std::int64_t> slots_;
  std::vector<double> errors_;
};

namespace detail {

inline constexpr std::string_view saved_profile_magic = "kvprof\r\n";
inline constexpr std::uint32_t saved_profile_version = 2;

}  // namespace detail

/// Saves a profile: `kvprof\r\n`, u32 version 2, u32 heads, u64 slots of each, f64 errors of each,
/// CRC-32 of all that; little-endian. Refused: a stream that fails.
inline void save(std::ostream& out, const budget_profile& profile) {
  detail::byte_writer to(out);
  to.put_text(detail::saved_profile_magic);
  to.put(detail::saved_profile_version);
  to.put(profile.heads());
  for (const std::int64_t s : profile.slots()) {
    to.put(s);
  }
  for (const double e : profile.errors()) {
    to.put(e);
  }
  to.finish();
}

/// What `save` saved, over a profile of as many heads.
/// Refused, with nothing changed: anything but a profile, another version, another number of heads,
/// counts that cannot be, an end too early, another checksum.
inline void load(std::istream& in, budget_profile& profile) {
  detail::byte_reader from(in);
  expects(errc::corrupt_file,
          from.get_text(detail::saved_profile_magic.size()) == detail::saved_profile_magic,
          "load: expected a saved profile, got other bytes");
  const auto version = from.get<std::uint32_t>();
  expects(errc::corrupt_file, version == detail::saved_profile_version,
          "load: expected a profile of version ", detail::saved_profile_version, ", got ", version);
  const auto heads = from.get<index_t>();
  expects(errc::corrupt_file, heads == profile.heads(), "load: expected a profile of ",
          profile.heads(), " heads, got ", heads);
  budget_profile loaded(heads);
  for (std::int64_t& s : loaded.slots_) {
    s = from.get<std::int64_t>();
    expects(errc::corrupt_file, s >= 0, "load: expected at least 0 slots per head, got ", s);
  }
  for (double& e : loaded.errors_) {
    e = from.get<double>();
    expects(errc::corrupt_file, e >= 0 && std::isfinite(e),
            "load: expected finite errors of at least 0, got ", e);
  }
  from.finish();
  profile = loaded;
}

}  // namespace kvmeld::inline v0
