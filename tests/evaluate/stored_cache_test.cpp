// SPDX-License-Identifier: MIT
// A policy's slots in another storage: rows of the table, and the cache that they decode from.
#include <catch2/catch.hpp>
#include <map>
#include <string>
#include <vector>

#include "evaluate/compressed_cache.hpp"
#include "support/tiny_model.hpp"

namespace stored_cache_test {

using test::fields;
using test::tiny_model;

TEST_CASE("slots in another storage are rounded once, and streams decode in it") {
  const tiny_model model;
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "error,stream", "--budgets", "30", "--policies",
                 "h2o,h2o/float32,h2o/half,h2o/bfloat16,h2o/q8_0"});
  REQUIRE(csv.size() == 6);
  std::map<std::string, double> error, stream, bytes;
  for (std::size_t i = 1; i < csv.size(); ++i) {
    auto row = fields(csv[i]);
    const std::string name = row["policy"];
    error[name] = std::stod(row["attention_error"]), bytes[name] = std::stod(row["bytes"]);
    stream[name] = std::stod(row["stream_error"]);
  }
  CHECK((error["h2o/float32"] == error["h2o"] && bytes["h2o/float32"] == bytes["h2o"]));
  for (const std::string name : {"h2o/half", "h2o/bfloat16"}) {
    INFO(name);
    CHECK((error[name] != error["h2o"] && error[name] == Approx(error["h2o"]).epsilon(0.02)));
    CHECK((stream[name] != stream["h2o"] && stream[name] == Approx(stream["h2o"]).epsilon(0.02)));
    // 8 numbers a row of two bytes, and a log-mass, a position and a score.
    CHECK(bytes[name] == bytes["h2o"] * (32 + 12) / (64 + 12));
  }
  // Of 8 numbers a block is filled up to 32.
  CHECK(bytes["h2o/q8_0"] == bytes["h2o"] * (2 * 34 + 12) / (64 + 12));
  CHECK((error["h2o/q8_0"] != error["h2o"] &&
         error["h2o/q8_0"] == Approx(error["h2o"]).epsilon(0.05)));
}

TEST_CASE("a full cache in another storage is a row of its own, compared as any policy is") {
  const tiny_model model;
  for (const std::string order : {"full_cache,full_cache/half,full_cache/bfloat16,h2o",
                                  "full_cache/bfloat16,h2o,full_cache/half,full_cache"}) {
    INFO(order);
    const auto ran = model.run({"--tasks", "error,nll,needle", "--policies", order});
    REQUIRE(ran.csv.size() == 5);
    std::map<std::string, std::map<std::string, std::string>> rows;
    for (std::size_t i = 1; i < ran.csv.size(); ++i) {
      auto row = fields(ran.csv[i]);
      rows[row["policy"]] = row;
    }
    const auto number = [&](const std::string& policy, const char* column) {
      return std::stod(rows[policy][column]);
    };
    CHECK(rows["full_cache/half"]["slots"] == "96");
    CHECK(number("full_cache", "kl") == 0);
    CHECK(number("full_cache", "attention_error") == 0);
    for (const char* column : {"kl", "attention_error", "output_error"}) {
      INFO(column);
      CHECK(number("full_cache/half", column) > 0);
      CHECK(number("full_cache/bfloat16", column) > number("full_cache/half", column));
      CHECK(number("h2o", column) > number("full_cache/bfloat16", column));
    }
    // 8 numbers a row of two bytes, a log-mass and a position.
    CHECK(number("full_cache/half", "bytes") == number("full_cache", "bytes") * (32 + 8) / 72);
  }
}

TEST_CASE("a stored cache is the cache that it was made of, in its storage") {
  kvmeld::cache kv({.kv_heads = 2, .group = 2, .key_dim = 32}, {.capacity = 12});
  std::vector<float> numbers(9 * 32);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i % 7) / 3 - 0.9F;
  }
  kv.append(kvmeld::head_range{1, 1}, numbers, numbers, 9);
  kv.head(1).log_mass(4) = 0.5F;
  using kvmeld::storage;
  for (const auto& [type, off] : {std::pair{kvmeld::storage_pair(storage::f16), 5e-4},
                                  {kvmeld::storage_pair(storage::bf16), 4e-3},
                                  {kvmeld::storage_pair(storage::q8_0), 5e-3},
                                  {kvmeld::storage_pair(storage::q4_0), 0.4},
                                  {{storage::q8_0, storage::q4_0}, 0.4},
                                  {{storage::k6, storage::q4_0}, 0.4}}) {
    auto stored = evaluate::stored(kv, type);
    const auto head = stored.head(1);
    REQUIRE((stored.head(0).length() == 0 && head.length() == 9 && head.next_position() == 9));
    CHECK((head.log_mass(4) == 0.5F && head.position(8) == 8));
    head.push(numbers.data(), numbers.data() + 32);
    double worst = 0;
    for (kvmeld::index_t s = 0; s < 10; ++s) {
      float value[32];
      kvmeld::value_to_floats(head, s, value);
      for (kvmeld::index_t i = 0; i < 32; ++i) {
        const auto number = [&](kvmeld::index_t at) {
          return double{numbers[static_cast<std::size_t>(at + i)]};
        };
        worst = std::max(worst, std::abs(double{head.key(s)[i]} - number(s % 9 * 32)));
        worst = std::max(worst, std::abs(double{value[i]} - number(s == 9 ? 32 : s * 32)));
      }
    }
    CHECK((worst > 0 && worst < off));
    CHECK(stored.bytes() ==
          10 * (kvmeld::row_bytes(type.keys, 32) + kvmeld::row_bytes(type.values, 32) + 8) +
              (kvmeld::is_centred(type.keys) ? 64 : 0));
  }
}

}  // namespace stored_cache_test
