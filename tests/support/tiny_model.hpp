// SPDX-License-Identifier: MIT
/// The main job on a tiny random model: bytes for tokens, two layers, two query heads.
#pragma once

#include <fmt/format.h>

#include <cstdlib>  // setenv
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "engine/test_files.hpp"
#include "evaluate/options.hpp"
#include "evaluate/random.hpp"

namespace test {

inline constexpr const char* header =
    "policy,budget,slots,attention_error,nll,needle_after,needle_inside,stream_error,bytes,"
    "prefill_ms,decode_tokens_per_s,decode_vs_full,kl,attention_error_se,nll_se,needle_after_se,"
    "needle_inside_se,kl_se,output_error,output_error_se";

/// While one lives there is no gnuplot, whose pictures take longer than what they show.
class no_pictures {
 public:
  no_pictures() { setenv("PATH", "/nowhere", 1); }
  no_pictures(const no_pictures&) = delete;
  ~no_pictures() { setenv("PATH", path_.c_str(), 1); }

 private:
  std::string path_ = std::getenv("PATH");
};

/// A model's folder and a text, gone at the end of the test.
class tiny_model {
 public:
  explicit tiny_model(int kv_heads = 1) {
    folder_.write("config.json",
                  R"({"model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
                      "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                      "head_dim": 8, "vocab_size": 256, "rms_norm_eps": 1e-5,
                      "tie_word_embeddings": true, "num_key_value_heads": )" +
                      std::to_string(kv_heads) + "}");
    add("model.embed_tokens.weight", {256, 16});
    add("model.norm.weight", {16});
    for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
      add(layer + "input_layernorm.weight", {16});
      add(layer + "post_attention_layernorm.weight", {16});
      add(layer + "self_attn.q_proj.weight", {16, 16});
      add(layer + "self_attn.k_proj.weight", {8 * kv_heads, 16});
      add(layer + "self_attn.v_proj.weight", {8 * kv_heads, 16});
      add(layer + "self_attn.o_proj.weight", {16, 16});
      add(layer + "mlp.gate_proj.weight", {24, 16});
      add(layer + "mlp.up_proj.weight", {24, 16});
      add(layer + "mlp.down_proj.weight", {16, 24});
    }
    folder_.write("model.safetensors", test::safetensors("{" + tensors_ + "}", data_));
    std::string text;
    while (text.size() < 3000) {
      text += random_.name() + (random_.below(8) == 0 ? ".\n" : " ");
    }
    folder_.write("text.txt", text);
  }

  std::filesystem::path file(const std::string& name) const { return folder_.path() / name; }

  /// The command line, for a prompt of 96 bytes; `more` comes last and wins.
  evaluate::options options(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {"evaluate",
                                      "--model",
                                      file("").string(),
                                      "--text",
                                      file("text.txt").string(),
                                      "--prompt",
                                      "96",
                                      "--prompts",
                                      "2",
                                      "--needle",
                                      " {key} is {value}.",
                                      "--question",
                                      "\\n{key}?",
                                      "--needles",
                                      "2",
                                      "--cases",
                                      "4",
                                      "--digits",
                                      "2",
                                      "--budgets",
                                      "40",
                                      "--csv",
                                      file("e.csv").string(),
                                      "--plots",
                                      file("plots").string()};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<const char*> arguments;
    for (const std::string& word : words) {
      arguments.push_back(word.c_str());
    }
    return evaluate::parse(static_cast<int>(arguments.size()), arguments.data());
  }

  struct output {
    int code = 0;
    std::string table, progress;
    std::vector<std::string> csv;
  };
  output run(const std::vector<std::string>& more) const {
    const no_pictures none;
    return measure(options(more));
  }
  output measure(const evaluate::options& o) const {
    std::ostringstream table, progress;
    const int code = evaluate::run(o, table, progress);
    return {code, table.str(), progress.str(), lines()};
  }

  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    std::ifstream in(file("e.csv"));
    for (std::string line; std::getline(in, line);) {
      all.push_back(line);
    }
    return all;
  }

 private:
  void add(const std::string& name, const std::vector<int>& shape) {
    const std::size_t begin = data_.size();
    int count = 1;
    for (const int n : shape) {
      count *= n;
    }
    for (int i = 0; i < count; ++i) {
      const float x = shape.size() == 1 ? 1.0F : static_cast<float>(random_.uniform() - 0.5);
      data_.append(reinterpret_cast<const char*>(&x), sizeof x);
    }
    tensors_ += fmt::format(
        R"({}"{}": {{"dtype": "F32", "shape": [{}], "data_offsets": [{}, {}]}})",
        tensors_.empty() ? "" : ", ", name, fmt::join(shape, ", "), begin, data_.size());
  }

  test::temporary_folder folder_;
  evaluate::random_source random_{7, 0, 0};
  std::string tensors_, data_;
};

/// A CSV line by column.
inline std::map<std::string, std::string> fields(const std::string& line) {
  std::map<std::string, std::string> by_name;
  std::istringstream names(header), values(line);
  for (std::string name, value; std::getline(names, name, ',');) {
    value.clear();
    std::getline(values, value, ',');
    by_name[name] = value;
  }
  return by_name;
}

}  // namespace test
