// SPDX-License-Identifier: MIT
/// Tokens of a text whose topic drifts: what was attended to a while ago is attended to no more.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

#include "kvmeld/config.hpp"

namespace bench {

/// A token after another. The topic is forgotten in some 500 of them. A logit on the topic is about
/// `sharpness · sqrt(dim)`, off the topic it is 0 and about `sharpness` to either side.
class topic_stream {
 public:
  std::vector<float> q, k, v;  ///< `[group, dim]`, `[dim]`, `[dim]`

  topic_stream(kvmeld::index_t dim, kvmeld::index_t group, float sharpness)
      : q(static_cast<std::size_t>(group * dim)),
        k(static_cast<std::size_t>(dim)),
        v(k),
        sharpness_(sharpness),
        topic_(k) {}

  void next() {
    for (float& z : topic_) {
      z = 0.998F * z + 0.0632F * normal_(bits_);  // of variance 1
    }
    for (std::size_t i = 0; i < topic_.size(); ++i) {
      k[i] = topic_[i] + 0.5F * normal_(bits_);
      v[i] = topic_[(i + 5) % topic_.size()] + 0.3F * normal_(bits_);
      for (std::size_t at = i; at < q.size(); at += k.size()) {
        q[at] = sharpness_ * topic_[i] + 0.5F * normal_(bits_);
      }
    }
  }

 private:
  std::mt19937 bits_{20261120};
  std::normal_distribution<float> normal_;
  float sharpness_;
  std::vector<float> topic_;
};

}  // namespace bench
