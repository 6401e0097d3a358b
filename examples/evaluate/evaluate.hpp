// SPDX-License-Identifier: MIT
/// The main job: every policy at every budget, as a table, a CSV file and pictures.
#pragma once

#include <ostream>

#include "evaluate/options.hpp"

namespace evaluate {

/// Writes the table to `out`, progress to `err`. 0: all is done; 130: Ctrl-C came, and the rows
/// done by then are kept. Throws `usage_error` before anything is run.
int run(const options& o, std::ostream& out, std::ostream& err);

}  // namespace evaluate
