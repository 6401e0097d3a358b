// SPDX-License-Identifier: MIT
/// Which layers of a model attend to a window of tokens alone.
#pragma once

#include <llama-cpp.h>

#include <vector>

#include "llama_cpp/nodes.hpp"

namespace kvmeld::llama {

/// The numbers of those layers, read off the graph of one token: the engine gives a windowed layer
/// fewer cells than the context has. A model without a window is not run.
inline std::vector<index_t> windowed_layers(const llama_model* model) {
  const auto window = static_cast<std::uint32_t>(llama_model_n_swa(model));
  if (window == 0) {
    return {};
  }
  struct survey {
    std::int64_t all;
    std::vector<index_t> windowed = {};
  };
  auto p = llama_context_default_params();
  p.n_batch = p.n_ubatch = p.n_seq_max = 1;
  p.n_ctx = (window + p.n_ubatch + 255) / 256 * 256 + 256;  // more than a window's whole blocks
  p.n_threads = p.n_threads_batch = 1;
  p.swa_full = p.offload_kqv = false;
  survey found{p.n_ctx};
  p.cb_eval_user_data = &found;
  p.cb_eval = [](ggml_tensor* t, bool, void* data) {
    auto& s = *static_cast<survey*>(data);
    if (t->op == GGML_OP_SET_ROWS) {
      const ggml_tensor* const rows = root_of(t);
      if (const index_t l = number_behind("cache_k_l", rows->name); l >= 0 && rows->ne[1] < s.all) {
        s.windowed.push_back(l);
      }
    }
    return false;
  };
  // The engine takes no constant model, and changes nothing of it.
  const llama_context_ptr context(llama_init_from_model(const_cast<llama_model*>(model), p));
  llama_token token = 0;
  expects(context != nullptr && llama_decode(context.get(), llama_batch_get_one(&token, 1)) == 0,
          "llama.cpp: expected a model that decodes a token, got none");
  return found.windowed;
}

}  // namespace kvmeld::llama
