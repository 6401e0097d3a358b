// SPDX-License-Identifier: MIT
/// A task of the second table: its samples are read one by one, so that only a few are in memory.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "evaluate/plan.hpp"

namespace evaluate {

/// Of one sample, or their mean: share answered right, or nats.
struct score {
  double after = 0;                   ///< the question after compression
  std::optional<double> inside = {};  ///< the question inside the prompt
};

enum class task_measure {
  points,  ///< share answered right
  nats     ///< a token, above the best predictor; there is no question
};

struct task {
  std::string name;
  task_measure measure = task_measure::points;
  double reading = 0, scoring = 0;  ///< about so many ms a sample; a sample and a contender
  bool from_empty = false;          ///< all is decoded: for those that can
  /// Sample `i`, read by `policies`: a score for each contender.
  std::function<std::vector<score>(index_t i, std::span<const named_policy> policies,
                                   std::span<const contender> contenders)>
      run;
};

/// What came of it.
struct task_outcome {
  std::string name;
  task_measure measure = task_measure::points;
  index_t samples = 0;
  score full;                                 ///< of the full cache
  std::vector<std::optional<score>> entries;  ///< the plan's, group by group; refused: none
};

}  // namespace evaluate
