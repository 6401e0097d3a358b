// SPDX-License-Identifier: MIT
// Which policies are in colour in the picture by bytes.
#include "evaluate/bytes_picture.hpp"

#include <catch2/catch.hpp>

namespace {

evaluate::row of(const std::string& policy, double error, double kl, double facts) {
  evaluate::row r{};
  r.policy = policy, r.bytes = {1 << 21};
  r.attention_error = {error}, r.kl = {kl}, r.needle_after = {facts};
  return r;
}

}  // namespace

TEST_CASE("the best of every panel come first in the picture by bytes") {
  const std::vector<evaluate::row> rows = {of("second", 0.2, 0.5, 0), of("facts", 0.9, 0.4, 0.6),
                                           of("divergence", 0.8, 0.1, 0), of("error", 0.1, 0.6, 0)};
  const auto script = evaluate::bytes_picture(rows);
  std::size_t before = 0;
  for (const char* const name : {"error", "divergence", "facts", "second"}) {
    CAPTURE(name);
    const auto at = script.find("'" + std::string(name) + "'", before);
    CHECK(at != std::string::npos);
    before = at == std::string::npos ? before : at;
  }
}
