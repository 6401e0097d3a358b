// SPDX-License-Identifier: MIT
/// Needle cases of which not all fit in memory: batch by batch. All but the last batch are asked
/// before the rows are measured; where all fit, that is none.
#pragma once

#include <span>
#include <vector>

#include "evaluate/dataset.hpp"
#include "evaluate/needle.hpp"

namespace evaluate {

/// As many as take `--memory`: keys and values, once more where a compressed cache decodes, and the
/// queries of both readings. A multiple of `cases_abreast` where that many fit, so that batches do
/// not change what is decoded side by side.
index_t cases_at_once(const options& o, const plan& todo, const engine::config& shape);

/// Reads the cases `needles`; the last batch stays in `m`. What was asked already of each of the
/// plan's entries, group by group. Heads that keep all are found in the first batch.
std::vector<needle_recall> read_cases(dataset& m, const options& o, plan& todo,
                                      const engine::decoder& model, const engine::tokenizer& tokens,
                                      std::span<const needle_text> needles, const workers& on,
                                      progress& bar);

}  // namespace evaluate
