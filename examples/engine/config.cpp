// SPDX-License-Identifier: MIT
#include "engine/config.hpp"

#include <cstdint>
#include <limits>
#include <string>

#include "engine/error.hpp"
#include "engine/json.hpp"

namespace engine {

namespace {

/// `rope_theta` with `rope_scaling`, or all of it in the newer `rope_parameters`.
kvmeld::rotary read_rope(const json_fields& model, const std::filesystem::path& file) {
  const auto base_of = [](const json_fields& from, double otherwise) {
    const double base = from.positive("rope_theta", otherwise);
    from.expect(base > 1, "rope_theta", "more than 1");
    return base;
  };
  const double base = base_of(model, 10'000.0);
  const char* const name = model.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!model.has(name)) {
    return kvmeld::rotary::halves(base);
  }
  const json_fields scaling(model.object(name), file);
  const auto rope = kvmeld::rotary::halves(base_of(scaling, base));
  const char* const type_name = scaling.has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling.has(type_name) ? scaling.word(type_name) : "default";
  if (type == "llama3") {
    const kvmeld::llama3_scaling llama3{
        .factor = scaling.positive("factor"),
        .low = scaling.positive("low_freq_factor"),
        .high = scaling.positive("high_freq_factor"),
        .original_context = scaling.count("original_max_position_embeddings"),
    };
    scaling.expect(llama3.high > llama3.low, "high_freq_factor", "more than low_freq_factor");
    return rope.llama3(llama3);
  }
  scaling.expect(type == "default", type_name, "\"llama3\" or \"default\"");
  return rope;
}

}  // namespace

config config::parse(std::string_view text, const std::filesystem::path& file) {
  const auto json = parse_object(text, file);
  const json_fields model(json, file);

  const std::string type = model.word("model_type");
  const bool is_qwen = type == "qwen2" || type == "qwen3";
  model.expect(type == "llama" || type == "mistral" || is_qwen, "model_type",
               "\"llama\", \"mistral\", \"qwen2\" or \"qwen3\"");
  model.expect(model.word("hidden_act") == "silu", "hidden_act", "\"silu\"");
  model.expect(!model.flag("mlp_bias", false), "mlp_bias", "false");
  model.expect(!model.has("quantization_config"), "quantization_config", "none");
  if (is_qwen) {  // names a window even when it is not in use
    model.expect(!model.flag("use_sliding_window", false), "use_sliding_window", "false");
  } else {
    model.expect(!model.has("sliding_window"), "sliding_window", "none");
  }

  config c;
  c.hidden = model.count("hidden_size");
  c.intermediate = model.count("intermediate_size");
  c.layers = model.count("num_hidden_layers");
  c.heads = model.count("num_attention_heads");
  c.kv_heads = model.count("num_key_value_heads", c.heads);
  model.expect(c.heads % c.kv_heads == 0, "num_key_value_heads",
               "a divisor of num_attention_heads");
  if (!model.has("head_dim")) {
    model.expect(c.hidden % c.heads == 0, "num_attention_heads", "a divisor of hidden_size");
  }
  c.dim = model.count("head_dim", c.hidden / c.heads);
  if (c.dim % 2 != 0) {
    throw format_error(file, "expected an even head_dim (RoPE rotates pairs), got ", c.dim);
  }
  model.expect(std::int64_t{c.heads} * c.dim <= std::numeric_limits<index_t>::max(),
               "num_attention_heads", "heads * head_dim that an index holds");
  c.vocab = model.count("vocab_size");
  if (model.has("max_position_embeddings")) {
    c.max_positions = model.count("max_position_embeddings");
  }
  c.norm_epsilon = static_cast<float>(model.positive("rms_norm_eps"));
  c.tied = model.flag("tie_word_embeddings", false);
  c.qk_norm = type == "qwen3";
  c.o_bias = (type == "llama" || type == "qwen3") && model.flag("attention_bias", false);
  c.qkv_bias = type == "qwen2" || c.o_bias;
  c.rope = read_rope(model, file);
  return c;
}

}  // namespace engine
