// SPDX-License-Identifier: MIT
/// The decoder against Hugging Face transformers' logits, and its own paths against each other.
#include "engine/decoder.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "engine/prefill.hpp"
#include "engine/test_files.hpp"

namespace decoder_test {

using engine::index_t;
using engine::row_major_matrix;

struct reference {
  engine::decoder model;
  std::vector<int> tokens;
  row_major_matrix logits;

  explicit reference(const std::string& name)
      : model(engine::decoder::load(test::engine_data(name))) {
    const auto json =
        nlohmann::json::parse(engine::read_file(test::engine_data(name) / "reference.json"));
    tokens = json.at("tokens").get<std::vector<int>>();
    const auto rows = json.at("logits").get<std::vector<std::vector<float>>>();
    logits.resize(static_cast<Eigen::Index>(rows.size()), model.shape().vocab);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::size_t i = 0; i < rows[r].size(); ++i) {
        logits(static_cast<Eigen::Index>(r), static_cast<Eigen::Index>(i)) = rows[r][i];
      }
    }
  }
};

float difference(const row_major_matrix& a, const row_major_matrix& b) {
  REQUIRE(a.rows() == b.rows());
  REQUIRE(a.cols() == b.cols());
  return (a - b).cwiseAbs().maxCoeff();
}

/// Attention by the definition, in double, over lists that grow: one a layer.
class growing_lists {
 public:
  explicit growing_lists(const engine::config& shape)
      : shape_(shape), layers_(static_cast<std::size_t>(shape.layers)) {}

  void operator()(index_t layer, const row_major_matrix& q, const row_major_matrix& k,
                  const row_major_matrix& v, row_major_matrix& out) {
    auto& [keys, values] = layers_[static_cast<std::size_t>(layer)];
    for (Eigen::Index t = 0; t < q.rows(); ++t) {
      keys.emplace_back(k.row(t));
      values.emplace_back(v.row(t));
      for (index_t head = 0; head < shape_.heads; ++head) {
        attend(q.row(t).segment(head * shape_.dim, shape_.dim), head / shape_.group() * shape_.dim,
               keys, values, out.row(t).segment(head * shape_.dim, shape_.dim));
      }
    }
  }

 private:
  using rows = std::vector<Eigen::RowVectorXf>;

  void attend(const Eigen::RowVectorXf& q, Eigen::Index column, const rows& keys,
              const rows& values, Eigen::Ref<Eigen::RowVectorXf> out) const {
    double mass = 0;
    Eigen::RowVectorXd sum = Eigen::RowVectorXd::Zero(shape_.dim);
    for (std::size_t s = 0; s < keys.size(); ++s) {
      const double dot = q.cast<double>().dot(keys[s].segment(column, shape_.dim).cast<double>());
      const double weight = std::exp(dot / std::sqrt(shape_.dim));
      mass += weight;
      sum += weight * values[s].segment(column, shape_.dim).cast<double>();
    }
    out = (sum / mass).cast<float>();
  }

  engine::config shape_;
  std::vector<std::pair<rows, rows>> layers_;
};

const char* const models[] = {"llama-f32", "qwen2-bf16", "llama-f16-sharded"};

TEST_CASE("decoder: a prompt's logits are those of transformers") {
  for (const char* name : models) {
    const reference r(name);
    for (const index_t chunk : {256, 7, 1}) {
      const auto made = engine::prefill(r.model, r.tokens, engine::logits_of::all, chunk);
      CAPTURE(name, chunk);
      CHECK(difference(made.logits, r.logits) < 1e-4F);
    }
  }
}

TEST_CASE("decoder: token by token over growing lists, the logits are those of transformers") {
  for (const char* name : models) {
    const reference r(name);
    growing_lists lists(r.model.shape());
    engine::decoder::scratch scratch;
    row_major_matrix logits, all(r.logits.rows(), r.logits.cols());
    for (std::size_t t = 0; t < r.tokens.size(); ++t) {
      const std::span token(&r.tokens[t], 1);
      r.model.forward(scratch, token, static_cast<index_t>(t), lists, logits);
      all.row(static_cast<Eigen::Index>(t)) = logits.row(0);
    }
    CAPTURE(name);
    CHECK(difference(all, r.logits) < 1e-4F);
  }
}

TEST_CASE("decoder: blocks of any size and the last row alone say the same") {
  const reference r("llama-f32");
  const auto whole = engine::prefill(r.model, r.tokens, engine::logits_of::all);
  const auto last = engine::prefill(r.model, r.tokens, engine::logits_of::last, 13);
  CHECK(last.logits.rows() == 1);
  CHECK(difference(last.logits, whole.logits.bottomRows(1)) < 1e-5F);
  REQUIRE(last.layers.size() == whole.layers.size());
  for (std::size_t layer = 0; layer < whole.layers.size(); ++layer) {
    CHECK(difference(last.layers[layer].q, whole.layers[layer].q) < 1e-5F);
    CHECK(difference(last.layers[layer].k, whole.layers[layer].k) < 1e-5F);
    CHECK(difference(last.layers[layer].v, whole.layers[layer].v) < 1e-5F);
  }
}

TEST_CASE("decoder: several sequences side by side, each at its own position") {
  const reference r("qwen2-bf16");
  // One sequence and the same one again, nine tokens behind.
  constexpr int behind = 9;
  growing_lists ahead(r.model.shape()), after(r.model.shape());
  const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
    row_major_matrix part(1, q.cols());
    for (Eigen::Index t = 0; t < q.rows(); ++t) {
      (t == 0 ? ahead : after)(layer, q.row(t), k.row(t), v.row(t), part);
      out.row(t) = part;
    }
  };
  engine::decoder::scratch scratch;
  row_major_matrix logits;
  for (int t = 0; t < static_cast<int>(r.tokens.size()); ++t) {
    std::vector<int> tokens{r.tokens[static_cast<std::size_t>(t)]};
    std::vector<index_t> positions{t};
    if (t >= behind) {
      tokens.push_back(r.tokens[static_cast<std::size_t>(t - behind)]);
      positions.push_back(t - behind);
    }
    r.model.forward(scratch, tokens, positions, attend, logits);
    CHECK((logits.row(0) - r.logits.row(t)).cwiseAbs().maxCoeff() < 1e-4F);
    if (t >= behind) {
      CHECK((logits.row(1) - r.logits.row(t - behind)).cwiseAbs().maxCoeff() < 1e-4F);
    }
  }
}

TEST_CASE("decoder: two threads may run one model") {
  const reference r("llama-f32");
  const auto expected = engine::prefill(r.model, r.tokens, engine::logits_of::all, 5).logits;
  std::vector<row_major_matrix> made(4);
  std::vector<std::thread> threads;
  for (auto& logits : made) {
    threads.emplace_back(
        [&] { logits = engine::prefill(r.model, r.tokens, engine::logits_of::all, 5).logits; });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& logits : made) {
    CHECK(logits == expected);  // the same bits
  }
}

TEST_CASE("decoder: refuses tokens it does not have") {
  const reference r("llama-f32");
  growing_lists lists(r.model.shape());
  row_major_matrix logits;
  engine::decoder::scratch scratch;
  for (const int token : {-1, 64}) {
    const std::vector<int> tokens{0, token};
    CHECK_THROWS_WITH(
        r.model.forward(scratch, tokens, 0, lists, logits),
        Catch::Contains("expected tokens 0 to 63") && Catch::Contains(std::to_string(token)));
  }
  CHECK_THROWS_WITH(r.model.forward(scratch, {}, 0, lists, logits),
                    Catch::Contains("expected at least 1 token"));
  CHECK_THROWS_WITH(engine::prefill(r.model, {}), Catch::Contains("expected at least 1 token"));
  CHECK_THROWS_WITH(engine::prefill(r.model, r.tokens, engine::logits_of::last, 0),
                    Catch::Contains("expected a chunk of at least 1 token, got 0"));
  CHECK_THROWS_WITH(r.model.forward(scratch, r.tokens, std::vector<index_t>{1, 2}, lists, logits),
                    Catch::Contains("expected 48 positions") && Catch::Contains("got 2"));
}

TEST_CASE("decoder: refuses weights of another shape than config.json says") {
  const test::temporary_folder folder;
  const auto load = [&](const nlohmann::json& fields) {
    folder.copy(test::engine_data("llama-f32"));
    auto config = nlohmann::json::parse(engine::read_file(folder.path() / "config.json"));
    config.update(fields);
    folder.write("config.json", config.dump());
    return [&] { engine::decoder::load(folder.path()); };
  };
  const std::string file = "model.safetensors";
  test::expect_refusal(file, {"embed_tokens", "expected shape [65, 32]", "got [64, 32]"},
                       load({{"vocab_size", 65}}));
  test::expect_refusal(file, {"expected tensor \"", "layers.2."}, load({{"num_hidden_layers", 3}}));
  test::expect_refusal(file, {"expected tensor \"", "q_proj.bias\""},
                       load({{"attention_bias", true}}));
  test::expect_refusal(file, {"k_proj", "expected shape [32, 32]", "got [16, 32]"},
                       load({{"num_key_value_heads", 4}}));
  // Larger than any memory: the shape is compared before anything is allocated.
  test::expect_refusal(file, {"embed_tokens", "2147483647"},
                       load({{"vocab_size", 2147483647}, {"hidden_size", 2147483647}}));
  test::expect_refusal("config.json", {"readable file"},
                       [&] { engine::decoder::load(folder.path() / "nowhere"); });
}

TEST_CASE("rotation: turns as kvmeld::rotary does") {
  const auto rope = kvmeld::rotary::halves(100).llama3({.original_context = 32});
  constexpr index_t dim = 12, heads = 3;
  const std::vector<index_t> positions{0, 1, 77, 1000, 5};
  const auto tokens = static_cast<Eigen::Index>(positions.size());
  row_major_matrix x = row_major_matrix::Random(tokens, heads * dim);
  row_major_matrix expected = x;
  for (Eigen::Index t = 0; t < tokens; ++t) {
    for (index_t head = 0; head < heads; ++head) {
      rope.rotate(kvmeld::row<float>{&expected(t, head * dim)}, dim,
                  positions[static_cast<std::size_t>(t)]);
    }
  }
  engine::rotation turns;
  turns.prepare(rope, dim, positions);
  turns.apply(x);
  CHECK(difference(x, expected) < 1e-4F);  // angles in float: 1000 rad to 6e-5
}

TEST_CASE("causal_attention: the definition, with and without a past") {
  constexpr index_t heads = 6, kv_heads = 2, dim = 4, all = 150;
  engine::config shape;
  shape.layers = 1;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.dim = dim;
  const row_major_matrix q = 3 * row_major_matrix::Random(all, heads * dim);
  const row_major_matrix k = 3 * row_major_matrix::Random(all, kv_heads * dim);
  const row_major_matrix v = row_major_matrix::Random(all, kv_heads * dim);
  row_major_matrix expected(all, heads * dim);
  growing_lists{shape}(0, q, k, v, expected);
  for (const index_t first : {0, 1, 64, 149}) {
    const auto made =
        engine::causal_attention(q.bottomRows(all - first), k, v, shape.attention(0), first);
    CAPTURE(first);
    CHECK(difference(made, expected.bottomRows(all - first)) < 1e-5F);
  }
  // Logits in the thousands: the maximum is subtracted.
  const auto sharp = engine::causal_attention(1000 * q, k, v, shape.attention(0), 0);
  CHECK(sharp.allFinite());
}

TEST_CASE("causal_attention: a window and a cap, against three loops") {
  constexpr index_t dim = 4, all = 150, window = 70;
  const row_major_matrix q = 3 * row_major_matrix::Random(all, 2 * dim);
  const row_major_matrix k = 3 * row_major_matrix::Random(all, dim);
  const row_major_matrix v = row_major_matrix::Random(all, dim);
  const kvmeld::attention_spec spec{
      .kv_heads = 1, .group = 2, .key_dim = dim, .scale = 2, .soft_cap = 5, .window = window};
  row_major_matrix expected = row_major_matrix::Zero(all, 2 * dim);
  for (Eigen::Index t = 0; t < all; ++t) {
    for (Eigen::Index h = 0; h < 2; ++h) {
      double sum = 0;
      for (Eigen::Index s = std::max<Eigen::Index>(0, t - window + 1); s <= t; ++s) {
        const double product = q.row(t).segment(h * dim, dim).dot(k.row(s));
        const double mass = std::exp(5 * std::tanh(2 * product / 5));
        expected.row(t).segment(h * dim, dim) += static_cast<float>(mass) * v.row(s);
        sum += mass;
      }
      expected.row(t).segment(h * dim, dim) /= static_cast<float>(sum);
    }
  }
  for (const index_t first : {0, 1, 64, 149}) {
    const auto made = engine::causal_attention(q.bottomRows(all - first), k, v, spec, first);
    CAPTURE(first);
    CHECK(difference(made, expected.bottomRows(all - first)) < 1e-4F);
  }
}

TEST_CASE("causal_attention: refuses shapes that do not fit") {
  const row_major_matrix q = row_major_matrix::Zero(3, 8), k = row_major_matrix::Zero(5, 4);
  const auto attend = [&](index_t heads, index_t kv_heads, index_t dim, index_t first) {
    return engine::causal_attention(
        q, k, k, {.kv_heads = kv_heads, .group = heads / kv_heads, .key_dim = dim}, first);
  };
  CHECK(attend(4, 2, 2, 2).isZero());
  CHECK_THROWS_WITH(attend(4, 2, 4, 2), Catch::Contains("expected q [3, 16]"));
  CHECK_THROWS_WITH(attend(4, 2, 2, 3), Catch::Contains("expected k and v [6, 4], got [5, 4]"));
  CHECK_THROWS_WITH(attend(4, 1, 2, 2), Catch::Contains("expected k and v [5, 2]"));
}

}  // namespace decoder_test
