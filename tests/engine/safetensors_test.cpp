// SPDX-License-Identifier: MIT
/// safetensors: values of every type that is read, and every malformed file by its message.
#include "engine/safetensors.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/test_files.hpp"

namespace safetensors_test {

using test::safetensors;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + R"(": {"dtype": ")" + dtype + R"(", "shape": )" + shape +
         R"(, "data_offsets": )" + offsets + "}";
}

/// Opening (and reading "x [2]" from) this file is refused.
void refuses(const std::string& bytes, std::initializer_list<std::string> words) {
  const test::temporary_folder folder;
  const auto file = folder.write("model.safetensors", bytes);
  test::expect_refusal("model.safetensors", words,
                       [&] { engine::safetensors_file(file).vector("x", 2); });
}

const std::string two_floats = bytes_of<float>({1, 2});

TEST_CASE("safetensors: F32, F16 and BF16 become floats") {
  const test::temporary_folder folder;
  const auto file = folder.write(
      "model.safetensors",
      safetensors("{\"__metadata__\": {\"format\": \"pt\"}, " +
                      entry("a", "F32", "[2, 3]", "[0, 24]") + ", " +
                      entry("b", "F16", "[5]", "[24, 34]") + ", " +
                      entry("c", "BF16", "[4]", "[34, 42]") + ", " +
                      entry("none", "F32", "[0]", "[42, 42]") + ", " +
                      entry("d", "I64", "[1]", "[42, 50]") + "}  ",
                  bytes_of<float>({1, 2, 3, -4, 5e-42F, 6}) +
                      bytes_of<std::uint16_t>({0x3c00, 0xc000, 0x7bff, 0x0001, 0x7c00}) +
                      bytes_of<std::uint16_t>({0x3f80, 0xc049, 0x7f80, 0x0001}) +
                      bytes_of<std::int64_t>({7})));
  const engine::safetensors_file tensors(file);
  CHECK(tensors.contains("a"));
  CHECK_FALSE(tensors.contains("__metadata__"));
  engine::row_major_matrix a(2, 3);
  a << 1, 2, 3, -4, 5e-42F, 6;
  CHECK(tensors.matrix("a", 2, 3) == a);
  engine::row_vector b(5), c(4);
  b << 1, -2, 65504, 0x1p-24F, std::numeric_limits<float>::infinity();
  c << 1, -3.140625F, std::numeric_limits<float>::infinity(), 0x1p-133F;
  CHECK(tensors.vector("b", 5) == b);
  CHECK(tensors.vector("c", 4) == c);
}

TEST_CASE("safetensors: tensors longer than one buffer, at an odd offset") {
  const test::temporary_folder folder;
  std::vector<float> values(5000);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i) / 7;
  }
  const auto file = folder.write("model.safetensors",
                                 safetensors("{" + entry("odd", "U8", "[3]", "[0, 3]") + "," +
                                                 entry("x", "F32", "[5000]", "[3, 20003]") + "}",
                                             "abc" + bytes_of(values)));
  const engine::row_vector x = engine::safetensors_file(file).vector("x", 5000);
  CHECK(std::memcmp(x.data(), values.data(), 20000) == 0);
}

TEST_CASE("safetensors: refuses files that end too soon") {
  refuses("", {"expected at least 8 bytes", "got 0"});
  refuses("1234567", {"expected at least 8 bytes", "got 7"});
  refuses(safetensors("{}", "", 3), {"expected a header of at most 2 bytes", "got 3"});
  refuses(safetensors("{}", "", ~0ULL),
          {"expected a header of at most 2 bytes", "got 18446744073709551615"});
  refuses(safetensors("{}", "", 1ULL << 63),
          {"expected a header of at most 2 bytes", "got 9223372036854775808"});
}

TEST_CASE("safetensors: refuses headers that are no JSON object") {
  refuses(safetensors("", ""), {"JSON object", "not JSON"});
  refuses(safetensors("{\"x\": ", ""), {"JSON object", "not JSON"});
  refuses(safetensors("[1, 2]", ""), {"JSON object", "an array"});
  refuses(safetensors("{\"\xff\": 1}", ""), {"JSON object", "not JSON"});
}

TEST_CASE("safetensors: refuses entries of the wrong form") {
  for (const char* bad :
       {"3", "[]", "{}", R"({"shape": [2], "data_offsets": [0, 8]})",
        R"({"dtype": 1, "shape": [2], "data_offsets": [0, 8]})",
        R"({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]})",
        R"({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]})",
        R"({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]})",
        R"({"dtype": "F32", "shape": [2], "data_offsets": [0]})",
        R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]})",
        R"({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]})",
        R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 1e30]})",
        R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 36893488147419103232]})"}) {
    CAPTURE(bad);
    refuses(safetensors(std::string("{\"x\": ") + bad + "}", two_floats),
            {"\"x\"", "data_offsets", "expected"});
  }
}

TEST_CASE("safetensors: refuses offsets that cannot be") {
  const auto x = [](const std::string& shape, const std::string& offsets) {
    return safetensors("{" + entry("x", "F32", shape, offsets) + "}", two_floats);
  };
  refuses(x("[2]", "[8, 0]"), {"\"x\"", "expected ascending", "got [8, 0]"});
  refuses(x("[2]", "[4, 12]"), {"\"x\"", "8 bytes of data", "got [4, 12]"});
  refuses(x("[2]", "[18446744073709551608, 18446744073709551615]"), {"\"x\"", "8 bytes of data"});
  refuses(x("[3]", "[0, 8]"), {"\"x\"", "shape [3] of F32", "got data_offsets [0, 8]"});
  refuses(x("[4294967296, 4294967296]", "[0, 0]"), {"shape [4294967296, 4294967296]"});
  refuses(x("[4611686018427387905]", "[0, 4]"), {"shape [4611686018427387905]"});
  refuses(x("[1]", "[4, 8]"), {"expected offset 0", "got 4", "hole"});
  refuses(x("[1]", "[0, 4]"), {"expected 4 bytes of tensors", "got 8"});
  refuses(safetensors("{" + entry("x", "F32", "[2]", "[0, 8]") + "," +
                          entry("y", "F32", "[1]", "[4, 8]") + "}",
                      two_floats),
          {"\"y\"", "expected offset 8", "got 4", "overlap"});
  refuses(safetensors("{" + entry("x", "F32", "[2]", "[0, 8]") + "}", two_floats.substr(0, 7)),
          {"\"x\"", "7 bytes of data"});
}

TEST_CASE("safetensors: refuses tensors that are not what is asked for") {
  refuses(safetensors("{" + entry("y", "F32", "[2]", "[0, 8]") + "}", two_floats),
          {"expected tensor \"x\""});
  refuses(safetensors("{" + entry("x", "F32", "[1, 2]", "[0, 8]") + "}", two_floats),
          {"\"x\"", "expected shape [2]", "got [1, 2]"});
  refuses(safetensors("{" + entry("x", "I32", "[2]", "[0, 8]") + "}", two_floats),
          {"\"x\"", "expected dtype F32, F16 or BF16", "got I32"});
  refuses(safetensors("{" + entry("x", "Q5_NEW", "[2]", "[0, 8]") + "}", two_floats),
          {"\"x\"", "expected dtype F32, F16 or BF16", "got Q5_NEW"});
}

TEST_CASE("safetensors: refuses what is no regular file") {
  const test::temporary_folder folder;
  test::expect_refusal("missing", {"readable file", "No such file"},
                       [&] { engine::safetensors_file(folder.path() / "missing"); });
  test::expect_refusal(folder.path().string(), {"regular file"},
                       [&] { engine::safetensors_file(folder.path()); });
}

TEST_CASE("safetensors: broken at random, a file is refused or read, never worse") {
  const auto good = engine::read_file(test::engine_data("llama-f32") / "model.safetensors");
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), sizeof header);
  std::mt19937 draw(1);
  const test::temporary_folder folder;
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    std::string bytes = good.substr(0, round % 3 == 0 ? draw() % good.size() : good.size());
    for (std::size_t i = 0; i < 1 + draw() % 4; ++i) {
      const auto at = draw() % (8 + header);
      if (at < bytes.size()) {
        bytes[at] = round % 2 == 0 ? static_cast<char>(draw()) : "0123456789,[]{}\""[draw() % 16];
      }
    }
    const auto file = folder.write("model.safetensors", bytes);
    try {
      engine::safetensors_file(file).matrix("lm_head.weight", 64, 32);
    } catch (const engine::format_error&) {
      ++refused;
    }
  }
  CHECK(refused > 200);
}

TEST_CASE("checkpoint: an index names shards and tensors that must be there") {
  const test::temporary_folder folder;
  const auto index = [&](const std::string& text) {
    folder.write("model.safetensors.index.json", text);
  };
  const auto shard = "{" + entry("x", "F32", "[2]", "[0, 8]") + "}";
  folder.write("a.safetensors", safetensors(shard, two_floats));
  const auto refuses_index = [&](std::initializer_list<std::string> words) {
    test::expect_refusal("model.safetensors.index.json", words,
                         [&] { engine::checkpoint(folder.path()).vector("y", 2); });
  };
  index(R"({"weight_map": {"x": "a.safetensors"}})");
  CHECK(engine::checkpoint(folder.path()).vector("x", 2)(1) == 2);
  refuses_index({"expected tensor \"y\" in a shard"});
  index(R"({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}})");
  refuses_index({"expected tensor \"y\" in shard \"a.safetensors\""});
  index(R"({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})");
  refuses_index({"expected shard \"b.safetensors\" in the same folder"});
  for (const char* shard_name :
       {R"("../a.safetensors")", R"("/a.safetensors")", R"("")", "3", R"("..")"}) {
    CAPTURE(shard_name);
    index(std::string(R"({"weight_map": {"y": )") + shard_name + "}}");
    refuses_index({"\"y\"", "expected a file name", shard_name});
  }
  index(R"({"weight_map": ["x"]})");
  refuses_index({"weight_map", "expected an object", "an array"});
  index("{}");
  refuses_index({"expected \"weight_map\""});
  index("nothing");
  refuses_index({"JSON object", "not JSON"});
  folder.write("a.safetensors", "short");
  index(R"({"weight_map": {"x": "a.safetensors"}})");
  test::expect_refusal("a.safetensors", {"8 bytes"}, [&] { engine::checkpoint(folder.path()); });
}

TEST_CASE("checkpoint: refuses a folder without weights") {
  const test::temporary_folder folder;
  test::expect_refusal(folder.path().string(), {"model.safetensors", "index.json", "got neither"},
                       [&] { engine::checkpoint(folder.path()); });
}

}  // namespace safetensors_test
