// SPDX-License-Identifier: MIT
/// A policy from its name on the command line:
/// `name[:parameter=value,...][+division][@source[:queries]][/storage]`.
#pragma once

#include <string>
#include <vector>

#include "evaluate/policies.hpp"

namespace evaluate {

namespace detail {

std::vector<std::string> split(const std::string& list, char by = ',');

named_policy parse_policy(const std::string& word);

/// Names with commas between; a word that is no name but `parameter=value` belongs to the policy
/// before it.
std::vector<named_policy> parse_policies(const std::string& list);

}  // namespace detail
}  // namespace evaluate
