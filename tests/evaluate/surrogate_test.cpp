// SPDX-License-Identifier: MIT
/// Scores of a surrogate in place of KVzip's: by its formula, of random weights.
#include "evaluate/surrogate.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>

#include "evaluate/compressed_cache.hpp"
#include "evaluate/dataset.hpp"
#include "oracle/linear.hpp"
#include "support/tiny_model.hpp"

namespace surrogate_test {

using evaluate::index_t;
using test::tiny_model;

/// A file in the making, of random numbers.
class weights {
 public:
  oracle::mat matrix(const std::string& name, std::size_t rows, std::size_t columns) {
    oracle::mat all;
    begin(name, fmt::format("{}, {}", rows, columns), rows * columns);
    for (std::size_t i = 0; i < rows; ++i) all.push_back(numbers(columns));
    return all;
  }
  oracle::vec vector(const std::string& name, std::size_t size) {
    begin(name, std::to_string(size), size);
    return numbers(size);
  }
  std::string written(const tiny_model& to, bool finite = true) {
    if (!finite) data_.replace(0, 4, "\xFF\xFF\xFF\xFF");
    std::ofstream(to.file("weights"), std::ios::binary)
        << test::safetensors("{" + tensors_ + "}", data_);
    return to.file("weights").string();
  }

 private:
  void begin(const std::string& name, const std::string& shape, std::size_t size) {
    tensors_ += fmt::format(
        R"({}"{}": {{"dtype": "F32", "shape": [{}], "data_offsets": [{}, {}]}})",
        tensors_.empty() ? "" : ", ", name, shape, data_.size(), data_.size() + 4 * size);
  }
  oracle::vec numbers(std::size_t size) {
    oracle::vec all;
    for (std::size_t i = 0; i < size; ++i) {
      const auto x = static_cast<float>(random_.uniform() - 0.5);
      all.push_back(double{x});
      data_.append(reinterpret_cast<const char*>(&x), sizeof x);
    }
    return all;
  }

  evaluate::random_source random_{3, 0, 0};
  std::string tensors_, data_;
};

/// What a layer's KV heads score a token, by what attention is given for it.
using scorer = std::function<oracle::vec(const oracle::vec&)>;

/// torch's Linear.
scorer linear(weights& file, const std::string& name, std::size_t out, std::size_t in) {
  const auto weight = file.matrix(name + ".weight", out, in);
  const auto bias = file.vector(name + ".bias", out);
  return [=](const oracle::vec& x) {
    oracle::vec y = oracle::times(weight, x);
    for (std::size_t i = 0; i < out; ++i) y[i] += bias[i];
    return y;
  };
}

/// KVzap: e to a linear layer's or an MLP's output.
scorer kvzap(weights& file, const std::string& name, bool is_mlp) {
  const scorer first = linear(file, name + (is_mlp ? ".0" : ""), is_mlp ? 5 : 2, 16);
  const scorer second = is_mlp ? linear(file, name + ".2", 2, 5) : scorer();
  return [=](const oracle::vec& x) {
    oracle::vec y = first(x);
    if (is_mlp) {
      for (double& v : y) v = v * 0.5 * (1 + std::erf(v / std::sqrt(2.0)));
      y = second(y);
    }
    for (double& v : y) v = std::exp(v);
    return y;
  };
}

/// Fast KVzip's gate of 3 numbers, two query heads on a KV head, 2 learned keys.
scorer gate(weights& file, const std::string& name) {
  const scorer queries = linear(file, name + ".q_proj", 2 * 3, 16);
  const auto key = file.matrix(name + ".k_proj.weight", 3, 16);
  const auto q_norm = file.vector(name + ".q_norm.weight", 3);
  const auto k_norm = file.vector(name + ".k_norm.weight", 3);
  const auto base = file.matrix(name + ".k_base", 2, 3), bias = file.matrix(name + ".b", 1, 2);
  return [=](const oracle::vec& x) {
    const auto normed = [](const oracle::vec& v, const oracle::vec& by) {
      oracle::vec y;
      for (std::size_t i = 0; i < 3; ++i)
        y.push_back(v[i] / std::sqrt(oracle::dot(v, v) / 3 + 1e-6) * by[i]);
      return y;
    };
    const oracle::vec all = queries(x), k = normed(oracle::times(key, x), k_norm);
    double score = 0;
    for (std::size_t g = 0; g < 2; ++g) {
      const oracle::vec q = normed({all[3 * g], all[3 * g + 1], all[3 * g + 2]}, q_norm);
      const double z = oracle::dot(q, k) / std::sqrt(3.0) + bias[0][g];
      double sum = 1;
      for (const oracle::vec& c : base) sum += std::exp(oracle::dot(q, c) / std::sqrt(3.0) - z);
      score += 1 / sum / 2;
    }
    return oracle::vec{score};
  };
}

TEST_CASE("a surrogate scores by its formula, and the best of a head's tokens stay", "[oracle]") {
  const int kind = GENERATE(0, 1, 2);
  CAPTURE(kind);
  const tiny_model files(kind == 2 ? 1 : 2);
  const auto model = engine::decoder::load(files.file(""));
  std::vector<int> tokens;
  for (const char c : engine::read_file(files.file("text.txt")).substr(0, 96)) {
    tokens.push_back(c);
  }
  weights file;
  std::vector<scorer> of_layers;
  for (const std::string name : {"layers.0", "layers.1"}) {
    of_layers.push_back(kind == 2 ? gate(file, name) : kvzap(file, name, kind == 1));
  }
  std::vector<evaluate::named_policy> policies = {
      evaluate::detail::parse_policy("kvzip+equal@surrogate")};
  evaluate::load_surrogate(policies, file.written(files), model.shape());

  const auto r = engine::prefill(model, tokens, engine::logits_of::last, 40, true);
  const auto prompt = evaluate::read_whole(model, policies, tokens, 140);
  const evaluate::compressed_cache cache({.policy = policies[0].policy, .limit = {40}}, prompt);
  const auto heads = static_cast<std::size_t>(model.shape().kv_heads);
  for (std::size_t l = 0; l < 2; ++l) {
    const engine::layer_record& kept = r.layers[l];
    // What is kept is what the layer's values are made of.
    const engine::row_major_matrix values =
        kept.hidden * model.parameters().layers[l].v.weight.transpose();
    CHECK((values - kept.v).cwiseAbs().maxCoeff() < 1e-5F);
    std::vector<std::vector<std::pair<double, index_t>>> ranked(heads);
    for (index_t t = 0; t < 96; ++t) {
      const float* const row = &kept.hidden(t, 0);
      const oracle::vec scores = of_layers[l](oracle::vec(row, row + 16));
      for (std::size_t h = 0; h < heads; ++h) {
        const auto ours = prompt.measured[0].heads[heads * l + h].column(0);
        REQUIRE(ours.size() == 96);
        CHECK(double{ours[static_cast<std::size_t>(t)]} == Approx(scores[h]).epsilon(1e-4));
        ranked[h].emplace_back(t < 4 ? -1e9 : -scores[h], t);  // the sinks stay
      }
    }
    for (std::size_t h = 0; h < heads; ++h) {
      std::ranges::sort(ranked[h]);
      std::vector<index_t> best, held;
      for (std::size_t s = 0; s < 40; ++s) best.push_back(ranked[h][s].second);
      std::ranges::sort(best);
      const auto head = cache.kv().head(static_cast<index_t>(heads * l + h));
      for (index_t s = 0; s < head.length(); ++s) held.push_back(head.position(s));
      std::ranges::sort(held);
      CHECK(held == best);
    }
  }
}

TEST_CASE("a run takes a surrogate's scores in place of a second reading") {
  const tiny_model files;
  weights file;
  linear(file, "layers.0", 1, 16), linear(file, "layers.1", 1, 16);
  const auto ran = files.run({"--tasks", "error,nll,needle,speed", "--policies",
                              "kvzip,kvzip@surrogate,kvzip+massfold@surrogate", "--surrogate",
                              file.written(files)});
  REQUIRE(ran.csv.size() == 4);
  CHECK(test::fields(ran.csv[1])["kl"] != test::fields(ran.csv[2])["kl"]);
  CHECK(test::fields(ran.csv[2])["kl"] != test::fields(ran.csv[3])["kl"]);
  CHECK(!test::fields(ran.csv[2])["needle_after"].empty());
}

TEST_CASE("a surrogate of another model, or for no policy, is refused", "[errors]") {
  const tiny_model files;
  const auto refusal = [&](const std::string& policies, const std::string& file) {
    try {
      files.run({"--tasks", "error", "--policies", policies, "--surrogate", file});
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  const auto with = [&](std::size_t heads, std::size_t hidden, bool finite = true) {
    weights file;
    linear(file, "layers.0", heads, hidden);
    return file.written(files, finite);
  };
  CHECK_THAT(refusal("kvzip@surrogate", ""), Catch::Contains("expected --surrogate with a file"));
  CHECK_THAT(refusal("kvzip@surrogate", with(2, 16)),
             Catch::Contains("tensor \"layers.0.weight\": expected shape [1, 16], got [2, 16]"));
  CHECK_THAT(refusal("kvzip@surrogate", with(1, 12)), Catch::Contains("[1, 16], got [1, 12]"));
  CHECK_THAT(refusal("kvzip@surrogate", with(1, 16, false)),
             Catch::Contains("\"layers.0.weight\": expected finite numbers, got others"));
  CHECK_THAT(refusal("kvzip@surrogate", with(1, 16)),
             Catch::Contains("expected tensor \"layers.1.0.weight\""));
  CHECK_THAT(refusal("kvzip", with(1, 16)),
             Catch::Contains("--surrogate: expected @surrogate among the policies"));
  CHECK_THAT(refusal("h2o@surrogate", with(1, 16)),
             Catch::Contains("--policies: @surrogate: expected kvzip, got h2o"));
}

}  // namespace surrogate_test
