// SPDX-License-Identifier: MIT
/// The policies that are compared, as the command line names them: `h2o`, `snapkv@lookahead`,
/// `fold:share=0.4,ridge=0/q8_0`, in general
/// `name[+massfold][:parameter=value,...][+division][@source[:queries]][/storage]`.
#pragma once

#include <memory>  // std::shared_ptr
#include <stdexcept>
#include <string>
#include <vector>

#include "custom_policy.hpp"
#include "engine/matrix.hpp"
#include "kvmeld/peers.hpp"

namespace evaluate {

using engine::as_size;
using engine::count_of;
using engine::index_t;
using kvmeld::storage;

/// The caller's mistake, as one line: nothing was run.
class usage_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

inline void require(bool ok, const std::string& message) {
  if (!ok) {
    throw usage_error(message);
  }
}

}  // namespace detail

/// A policy of one's own takes part by being named here.
using any_policy = kvmeld::with_policies<kvmeld::any_policy_or_peer, custom::lowest_norm>;

/// Where a policy's reference queries come from: the prompt's own queries, as its paper takes them;
/// the last 32 of them; some spread over the prompt; those of a second reading of the prompt; or
/// the spread ones moved to the positions to come; or scores in place of all of them, by a
/// surrogate.
enum class query_source { own, window, spread, replay, lookahead, surrogate };

/// How budgets are divided between layers and heads; see contender.hpp.
enum class budget_allocation {
  uniform,
  pyramid_kv,
  pyramid_infer,
  d2o,
  d2o_exempt,
  ada_kv,
  duo_attention,
  global,
  composite,
  same_tokens,
  profile
};

/// Are a model's slots shared by all of its heads: by one threshold, over heads or over layers, or
/// by a profile of it?
inline bool is_shared(budget_allocation d) { return d >= budget_allocation::global; }

/// Tokens that ask the model to read a prompt again.
struct replay_words {
  std::vector<int> whole, part;   ///< before all of it, or its beginning; before another part
  std::vector<int> end;           ///< between these and what is read again
  std::vector<int> skipped = {};  ///< a prompt's beginning that is not read again: of a chat's turn
};

/// The policy that scores: of one that folds, the one inside.
inline std::string_view scored_as(const any_policy& policy) {
  return policy.name().substr(0, policy.name().find('+'));
}

class surrogate;

struct named_policy {
  std::string name;
  any_policy policy;
  query_source queries = query_source::own;
  index_t queries_taken = 0;            ///< of its source; 0: 32 of the window, 256 of the others
  kvmeld::future_positions ahead = {};  ///< where foreseen queries go
  budget_allocation budgets = budget_allocation::uniform;
  replay_words words = {};                              ///< of a second reading
  std::shared_ptr<const surrogate> scores = nullptr;    ///< of `query_source::surrogate`
  kvmeld::storage_pair storage = kvmeld::storage::f32;  ///< of keys and values

  /// As it measures a prompt: where heads share the model's slots, `fold` pins by scores.
  any_policy measuring() const;
  /// Does it observe all of a second reading with its keys, as KVzip, and not some of its queries?
  bool observes_replay() const {
    return queries == query_source::replay && queries_taken == 0 &&
           scored_as(policy) == kvmeld::kvzip::name();
  }
};

/// The queries that a policy takes of a prompt by its own wish; `kvzip`: a second reading.
query_source source_of(const any_policy& policy);

/// All of them, with their default parameters and sources, and every division of budgets. `fold`
/// and `kvzip` share the model's slots.
std::vector<named_policy> all_policies();

namespace detail {

std::vector<std::string> split(const std::string& list, char by = ',');

/// Throws `usage_error`.
named_policy parse_policy(const std::string& word);

/// Names with commas between; a word that is no name but `parameter=value` belongs to the policy
/// before it. Throws `usage_error`.
std::vector<named_policy> parse_policies(const std::string& list);

}  // namespace detail

/// The one that all others are compared with.
inline any_policy full_cache() { return kvmeld::full_cache{}; }

/// The policies of heads that share slots: of `policy`, as it is where they do, with as many
/// clusters in all, each head as its errors weigh; none, if there are no errors or clusters.
std::vector<any_policy> share_clusters(const any_policy& policy,
                                       const kvmeld::budget_profile& profile, index_t tokens);

}  // namespace evaluate
