// SPDX-License-Identifier: MIT
#include "evaluate/surrogate.hpp"

#include <algorithm>  // std::max
#include <cmath>      // std::erf, std::sqrt
#include <memory>     // std::make_shared
#include <string>

#include "engine/error.hpp"
#include "engine/safetensors.hpp"

namespace evaluate {

surrogate::surrogate(const std::filesystem::path& file, const engine::config& shape) {
  const engine::safetensors_file from(file);
  const auto finite = [&](const std::string& name, auto numbers) {
    if (!numbers.allFinite()) {
      throw engine::format_error(file, "tensor \"", name,
                                 "\": expected finite numbers, got others");
    }
    return numbers;
  };
  const auto matrix = [&](const std::string& name, index_t out, index_t in) {
    return finite(name, from.matrix(name, out, in));
  };
  const auto vector = [&](const std::string& name, index_t size) {
    return finite(name, from.vector(name, size));
  };
  const auto linear = [&](const std::string& name, index_t out, index_t in) {
    return engine::linear{matrix(name + ".weight", out, in), vector(name + ".bias", out)};
  };
  const auto rows = [&](const std::string& name) { return std::max(1, from.rows(name)); };
  layers_.resize(as_size(shape.layers));
  for (const index_t l : shape.full_layers()) {
    const std::string name = "layers." + std::to_string(l), first = name + ".0", q = name + ".q_";
    layer& of = layers_[as_size(l)];
    if (from.contains(name + ".weight")) {
      of.out = linear(name, shape.kv_heads, shape.hidden);
    } else if (from.contains(q + "proj.weight")) {
      const index_t size = rows(q + "norm.weight"),
                    learned = rows(name + ".k_base") / shape.kv_heads;
      of.q = linear(q + "proj", shape.heads * size, shape.hidden);
      of.k.weight = matrix(name + ".k_proj.weight", shape.kv_heads * size, shape.hidden);
      of.q_norm = vector(q + "norm.weight", size);
      of.k_norm = vector(name + ".k_norm.weight", size);
      of.base = matrix(name + ".k_base", shape.kv_heads * learned, size);
      of.bias = matrix(name + ".b", shape.kv_heads, shape.group());
    } else {
      of.in = linear(first, rows(first + ".weight"), shape.hidden);
      of.out = linear(name + ".2", shape.kv_heads, rows(first + ".weight"));
    }
  }
}

row_major_matrix surrogate::operator()(index_t l, const row_major_matrix& hidden) const {
  const layer& of = layers_[as_size(l)];
  if (of.out.weight.size() == 0) {
    return gated(of, hidden);
  }
  row_major_matrix inner = hidden, log_scores;
  if (of.in.weight.size() > 0) {
    of.in(hidden, inner);
    inner = inner.unaryExpr([](float x) { return x / 2 * (1 + std::erf(x / std::sqrt(2.0F))); });
  }
  of.out(inner, log_scores);
  return log_scores.array().exp();
}

row_major_matrix surrogate::gated(const layer& gate, const row_major_matrix& hidden) {
  const Eigen::Index size = gate.q_norm.size(), heads = gate.bias.rows(), group = gate.bias.cols(),
                     learned = gate.base.rows() / heads;
  const auto normed = [&](const auto& x, const engine::row_vector& weight) {
    return (x.array() / std::sqrt(x.squaredNorm() / static_cast<float>(size) + 1e-6F) *
            weight.array())
        .matrix()
        .eval();
  };
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  row_major_matrix q, k, scores = row_major_matrix::Zero(hidden.rows(), heads);
  gate.q(hidden, q), gate.k(hidden, k);
  for (Eigen::Index t = 0; t < hidden.rows(); ++t) {
    for (Eigen::Index h = 0; h < heads; ++h) {
      const engine::row_vector key = normed(k.row(t).segment(h * size, size), gate.k_norm);
      for (Eigen::Index g = 0; g < group; ++g) {
        const engine::row_vector query =
            scale * normed(q.row(t).segment((h * group + g) * size, size), gate.q_norm);
        const float z = key.dot(query) + gate.bias(h, g);
        const auto of_learned = gate.base.middleRows(h * learned, learned) * query.transpose();
        scores(t, h) += 1 / (1 + (of_learned.array() - z).exp().sum()) / static_cast<float>(group);
      }
    }
  }
  return scores;
}

void load_surrogate(std::vector<named_policy>& policies, const std::filesystem::path& file,
                    const engine::config& shape) {
  std::shared_ptr<const surrogate> loaded;
  for (named_policy& p : policies) {
    if (p.queries == query_source::surrogate) {
      detail::require(!file.empty(), "--policies: @surrogate: expected --surrogate with a file");
      loaded = loaded ? loaded : std::make_shared<const surrogate>(file, shape);
      p.scores = loaded;
    }
  }
  detail::require(loaded || file.empty(), "--surrogate: expected @surrogate among the policies");
}

}  // namespace evaluate
