// SPDX-License-Identifier: MIT
/// `--surrogate`: scores that were trained to be KVzip's, of a token's hidden states alone. They
/// are read from a file of safetensors, with tensors `layers.l.…` of each full layer `l`.
#pragma once

#include <filesystem>
#include <vector>

#include "engine/weights.hpp"
#include "evaluate/policies.hpp"

namespace evaluate {

using engine::row_major_matrix;

/// `h` is what a layer's attention is given for a token.
/// KVzap (arXiv 2601.07891): the score is e to a linear layer's output, `weight [KV heads, hidden]`
/// and `bias`, or to that of an MLP with GELU between `0` and `2`; kvpress's names.
/// Fast KVzip (arXiv 2601.17668), where the file has `q_proj`: a gate's output, with learned keys
/// c_s and numbers b_g of each KV head, and q_g and k of few numbers D, each behind its RMSNorm
/// (1e-6):
///   z_g = q_g·k / √D + b_g,   score = mean over the group of 1 / (1 + Σ_s exp(q_g·c_s / √D − z_g))
/// The authors' names; `k_base` is `[KV heads · s, D]`, `b` `[KV heads, group]`.
class surrogate {
 public:
  /// Throws `engine::format_error`: no such file or tensors, another model's, numbers that are not
  /// finite.
  surrogate(const std::filesystem::path& file, const engine::config& shape);

  /// Scores in layer `l` of tokens `hidden [tokens, hidden]`, at least 0: `[tokens, KV heads]`.
  row_major_matrix operator()(index_t l, const row_major_matrix& hidden) const;

 private:
  struct layer {
    engine::linear in = {}, out = {};  // no `in`: `out` alone; neither: a gate
    engine::linear q = {}, k = {};
    engine::row_vector q_norm = {}, k_norm = {};  // [D]
    row_major_matrix base = {}, bias = {};
  };

  static row_major_matrix gated(const layer& gate, const row_major_matrix& hidden);

  std::vector<layer> layers_;
};

/// Gives policies the surrogate in `file` that they score by. Throws `usage_error`: there are none,
/// or no file.
void load_surrogate(std::vector<named_policy>& policies, const std::filesystem::path& file,
                    const engine::config& shape);

}  // namespace evaluate
