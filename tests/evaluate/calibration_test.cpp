// SPDX-License-Identifier: MIT
/// A calibration for triattention: made of prompts, written, read, and scored by.
#include "evaluate/calibration.hpp"

#include <algorithm>
#include <catch2/catch.hpp>

#include "engine/model.hpp"
#include "evaluate/compressed_cache.hpp"
#include "oracle/triattention.hpp"
#include "support/tiny_model.hpp"

namespace calibration_test {

using evaluate::index_t;
using test::tiny_model;

/// The tiny model's sizes: two layers of a KV head, two query heads of dim 8 on each.
constexpr int layers = 2, group = 2, dim = 8, pairs = dim / 2, row = dim + pairs;

/// The tokens of prompt `i` that a run with `seed` draws.
std::vector<int> prompt_of(const engine::model& loaded, const tiny_model& files, int seed, int i) {
  const auto text = loaded.tokens.encode(engine::read_file(files.file("text.txt")));
  auto tokens = evaluate::draw_text(text, loaded.tokens.begin(), static_cast<std::uint64_t>(seed),
                                    1, i, 96 + evaluate::decoded_tokens);
  tokens.resize(96);
  return tokens;
}

/// E q and E|q_f| over the queries of prompts of 96 tokens, as they were before RoPE,
/// `[layers][row]` for each query head.
std::vector<std::vector<oracle::vec>> means_of(const std::vector<engine::record>& prompts) {
  std::vector<std::vector<oracle::vec>> all(layers);
  for (std::size_t l = 0; l < layers; ++l) {
    all[l].assign(group, oracle::vec(row, 0.0));
    for (const engine::record& r : prompts) {
      for (int t = 0; t < 96; ++t) {
        for (int g = 0; g < group; ++g) {
          const float* const q = &r.layers[l].q(t, g * dim);
          const oracle::vec x = oracle::rotated(oracle::vec(q, q + dim), -t, {});
          oracle::vec& mean = all[l][static_cast<std::size_t>(g)];
          const double n = 96 * static_cast<double>(prompts.size());
          for (std::size_t i = 0; i < dim; ++i) mean[i] += x[i] / n;
          for (std::size_t f = 0; f < pairs; ++f)
            mean[dim + f] += std::hypot(x[f], x[f + pairs]) / n;
        }
      }
    }
  }
  return all;
}

TEST_CASE("a calibration is the means of the prompts' queries, and scores are by it", "[oracle]") {
  const tiny_model files;
  const auto file = files.file("calibration").string();
  const auto ran = files.run(
      {"--tasks", "error", "--policies", "triattention", "--prompts", "2", "--calibrate", file});
  CHECK_THAT(ran.table, Catch::Contains("calibration  " + file));
  const auto loaded = engine::model::load(files.file(""));
  const auto means = means_of({engine::prefill(loaded.network, prompt_of(loaded, files, 1, 0)),
                               engine::prefill(loaded.network, prompt_of(loaded, files, 1, 1))});
  const auto saved = engine::safetensors_file(file).matrix("queries", layers, group * row);
  for (int l = 0; l < layers; ++l) {
    for (int i = 0; i < group * row; ++i) {
      CHECK(double{saved(l, i)} ==
            Approx(means[static_cast<std::size_t>(l)][static_cast<std::size_t>(i / row)]
                        [static_cast<std::size_t>(i % row)])
                .margin(1e-5));
    }
  }

  // Of another prompt: kept is what the formula keeps by these means.
  auto todo = evaluate::make_plan(files.options({"--policies", "triattention,h2o"}), 3000,
                                  loaded.network.shape());
  REQUIRE(evaluate::load_calibration(todo, file, loaded.network.shape()));
  const auto entries = entries_of(todo);
  REQUIRE(entries.size() == 2);
  CHECK(entries[1]->chosen.of_heads.empty());
  const auto tokens = prompt_of(loaded, files, 2, 0);
  const auto r = engine::prefill(loaded.network, tokens);
  const auto prompt = evaluate::read_whole(loaded.network, todo.policies, tokens, 140);
  auto own = entries[0]->chosen;
  const evaluate::compressed_cache cache(own, prompt);
  own.of_heads.clear();
  const evaluate::compressed_cache uncalibrated(own, prompt);
  int others = 0;
  for (int l = 0; l < layers; ++l) {
    const auto of_layer = static_cast<std::size_t>(l);
    oracle::triattention by_formula;
    for (const oracle::vec& m : means[of_layer]) {
      by_formula.calibrated.push_back({{m.begin(), m.begin() + dim}, {m.begin() + dim, m.end()}});
    }
    oracle::head expected = oracle::make_head(dim, group);
    for (int t = 0; t < 96; ++t) {
      const float *const k = &r.layers[of_layer].k(t, 0), *const v = &r.layers[of_layer].v(t, 0);
      append(expected, {k, k + dim}, {v, v + dim});
    }
    by_formula.evict_to(expected, 40);
    const auto head = cache.kv().head(l), other = uncalibrated.kv().head(l);
    REQUIRE(head.length() == 40);
    std::vector<index_t> kept, by_the_formula, without;
    for (index_t s = 0; s < 40; ++s) {
      kept.push_back(head.position(s)), without.push_back(other.position(s));
      by_the_formula.push_back(expected.slots[static_cast<std::size_t>(s)].position);
    }
    for (auto* positions : {&kept, &by_the_formula, &without}) {
      std::ranges::sort(*positions);
    }
    CHECK(kept == by_the_formula);
    others += kept != without ? 1 : 0;
  }
  CHECK(others > 0);
}

TEST_CASE("a run reads the calibration that another has written, and says so of no file") {
  const tiny_model files;
  const auto file = files.file("calibration").string();
  const auto rows = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--tasks", "error,nll,stream", "--policies", "triattention"});
    const auto ran = files.run(more);
    CHECK((ran.table.find("calibration") != std::string::npos) ==
          (more[0] == "--calibrate" && more[2] == "--seed" && more[3] == "1"));
    return ran.csv;
  };
  const auto plain = rows({"--seed", "2"});
  CHECK(rows({"--calibrate", file, "--seed", "1"}) != plain);  // of other prompts
  const auto before = engine::read_file(file);
  const auto by_file = rows({"--calibrate", file, "--seed", "2"});
  CHECK(engine::read_file(file) == before);
  for (const char* const column : {"attention_error", "nll", "stream_error"}) {
    CHECK(test::fields(by_file[1])[column] != test::fields(plain[1])[column]);
  }
}

TEST_CASE("a calibration of another model, or for no policy, is refused", "[errors]") {
  const tiny_model files;
  const auto refusal = [&](const std::string& file, std::vector<std::string> more) {
    more.insert(more.end(), {"--tasks", "error", "--calibrate", file});
    try {
      files.run(more);
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  const auto none = files.file("none").string();
  CHECK_THAT(refusal(none, {"--policies", "h2o"}),
             Catch::Contains("expected triattention on its own queries once, got 0"));
  CHECK_THAT(refusal(none, {"--policies", "triattention@window"}),
             Catch::Contains("expected triattention on its own queries once, got 0"));
  CHECK_THAT(refusal(none + "/file", {"--policies", "triattention"}),
             Catch::Contains("expected a file in a folder that exists, got '" + none));
  CHECK_THAT(
      refusal(none, {"--policies", "triattention,triattention/half"}),
      Catch::Contains(
          "--calibrate: to make the file, expected triattention on its own queries once, got 2"));
  std::ofstream(files.file("ask.jsonl")) << R"({"context":"a","question":"b","answers":["c"]})";
  CHECK_THAT(
      refusal(none, {"--policies", "triattention", "--prompts", files.file("ask.jsonl").string()}),
      Catch::Contains("for prompts of others: expected an existing file, got '" + none));
  CHECK(!std::filesystem::exists(none));

  const auto write = [&](int rows, float x) {
    const std::string header =
        fmt::format(R"({{"queries":{{"dtype":"F32","shape":[{},24],"data_offsets":[0,{}]}}}})",
                    rows, rows * 24 * 4);
    const std::vector<float> numbers(static_cast<std::size_t>(rows) * 24, x);
    const auto bytes =
        std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * 4);
    std::ofstream(files.file("written"), std::ios::binary) << test::safetensors(header, bytes);
    return files.file("written").string();
  };
  CHECK_THAT(refusal(write(3, 1), {"--policies", "triattention"}),
             Catch::Contains("tensor \"queries\": expected shape [2, 24], got [3, 24]"));
  CHECK_THAT(refusal(write(2, NAN), {"--policies", "triattention"}),
             Catch::Contains("tensor \"queries\": expected finite numbers, got others"));
  CHECK_THAT(refusal(write(2, 1), {"--policies", "h2o"}),
             Catch::Contains("--calibrate: expected triattention among the policies"));
}

}  // namespace calibration_test
