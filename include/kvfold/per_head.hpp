/// What may be one for all heads, or one per head; and what does not fit together.
#pragma once

#include <span>
#include <type_traits>  // std::remove_const_t

#include "kvfold/policy.hpp"
#include "kvfold/state.hpp"

namespace kvfold {

namespace detail {

template <class T>
inline constexpr bool is_span = false;
template <class T, std::size_t N>
inline constexpr bool is_span<std::span<T, N>> = true;

/// One for all heads, or one per head.
template <class T>
const auto& for_head(const T& one_or_many, index_t h) {
  if constexpr (is_span<T>) {
    return one_or_many[static_cast<std::size_t>(h)];
  } else {
    return one_or_many;
  }
}

template <class T>
void expect_per_head(const char* what, const T& one_or_many, index_t heads) {
  if constexpr (is_span<T>) {
    expects(one_or_many.size() == static_cast<std::size_t>(heads), what, ": one for each of ",
            heads, " heads expected, ", one_or_many.size(), " came");
  }
}

inline void expect_size(const char* what, std::span<const float> x, index_t heads, index_t group,
                        index_t dim) {
  const auto wanted = static_cast<std::size_t>(heads) * static_cast<std::size_t>(group) *
                      static_cast<std::size_t>(dim);
  expects(x.size() == wanted, what, " of ", wanted, " floats expected, ", x.size(), " came");
  expects(x.data() != nullptr, what, " of ", wanted, " floats expected, null came");
}

/// A state that `make_state` would make for this policy and head.
template <policy P>
void expect_state(const P& p, const kv_head auto& head, const head_state& state) {
  expects(state.capacity() >= head.capacity(), p.name(), ": a state for ", head.capacity(),
          " slots expected, one for ", state.capacity(), " came");
  const index_t columns = traits::column_count(p);
  const std::size_t memory = traits::memory(p, head.dim(), head.group(), state.memory_capacity());
  expects(state.columns() == columns && state.memory().size() == memory, p.name(), ": a state of ",
          columns, " columns and ", memory, " floats expected, one of ", state.columns(), " and ",
          state.memory().size(), " came");
}

template <class Query>
void expect_finite(const query_view<Query>& queries, index_t group, index_t dim) {
  for (index_t i = 0; i < queries.count; ++i) {
    for (index_t g = 0; g < group; ++g) {
      kvfold::expect_finite("compress: queries", queries.at(g, i), dim);
    }
  }
}

inline void expect_workers(const char* what, const state& state, index_t workers) {
  expects(workers > 0 && workers <= state.workers(), what, ": 1 to ", state.workers(),
          " workers expected, as the state was made for, ", workers, " came");
}

}  // namespace detail

/// A policy for all heads, or a `std::span` of policies with one per head.
template <class T>
concept policies = policy<T> ||
    (detail::is_span<T>&& policy<std::remove_const_t<typename T::value_type>>);
/// A budget for all heads, or a `std::span<const budget>` with one per head.
template <class T>
concept budgets = std::same_as<T, budget> || detail::is_span<T>;

}  // namespace kvfold
