// SPDX-License-Identifier: MIT
/// config.json: every form that is read, and what is refused.
#include "engine/config.hpp"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/test_files.hpp"

namespace config_test {

nlohmann::json llama() {
  return {{"model_type", "llama"},    {"hidden_act", "silu"},
          {"hidden_size", 32},        {"intermediate_size", 48},
          {"num_hidden_layers", 2},   {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"head_dim", 10},
          {"vocab_size", 64},         {"rms_norm_eps", 1e-5},
          {"rope_theta", 500000},     {"rope_scaling", nullptr},
          {"attention_bias", false},  {"tie_word_embeddings", true}};
}

const nlohmann::json llama3 = {{"rope_type", "llama3"},
                               {"factor", 8.0},
                               {"low_freq_factor", 1.0},
                               {"high_freq_factor", 4.0},
                               {"original_max_position_embeddings", 32}};

engine::config read(const nlohmann::json& json) {
  const test::temporary_folder folder;
  return engine::config::read(folder.write("config.json", json.dump()));
}

nlohmann::json with(nlohmann::json json, const nlohmann::json& fields) {
  json.update(fields);
  return json;
}

void refuses(const nlohmann::json& fields, std::initializer_list<std::string> words) {
  test::expect_refusal("config.json", words, [&] { read(with(llama(), fields)); });
}

TEST_CASE("config: a llama as Hugging Face writes it") {
  const auto c = read(llama());
  CHECK(c.hidden == 32);
  CHECK(c.intermediate == 48);
  CHECK(c.layers == 2);
  CHECK(c.heads == 4);
  CHECK(c.kv_heads == 2);
  CHECK(c.group() == 2);
  CHECK(c.dim == 10);
  CHECK(c.vocab == 64);
  CHECK(c.norm_epsilon == 1e-5F);
  CHECK(c.rope == kvmeld::rotary::halves(500'000));
  CHECK(c.tied);
  CHECK_FALSE(c.qkv_bias);
  CHECK_FALSE(c.o_bias);
  CHECK(c.max_positions == 0);
  CHECK_FALSE(c.qk_norm);
  CHECK(read(with(llama(), {{"model_type", "qwen3"}})).qk_norm);
  CHECK(read(with(llama(), {{"max_position_embeddings", 99}})).max_positions == 99);
}

TEST_CASE("config: absent and null fields take their defaults") {
  auto json = llama();
  for (const char* name : {"num_key_value_heads", "head_dim", "rope_theta", "rope_scaling",
                           "attention_bias", "tie_word_embeddings"}) {
    json.erase(name);
  }
  for (const auto& fields :
       {nlohmann::json::object(),
        nlohmann::json{{"num_key_value_heads", nullptr}, {"head_dim", nullptr}}}) {
    const auto c = read(with(json, fields));
    CHECK(c.kv_heads == 4);
    CHECK(c.dim == 8);
    CHECK(c.rope == kvmeld::rotary::halves(10'000));
    CHECK_FALSE(c.tied);
  }
}

TEST_CASE("config: biases") {
  const auto biased = read(with(llama(), {{"attention_bias", true}}));
  CHECK(biased.qkv_bias);
  CHECK(biased.o_bias);
  const auto qwen = read(with(llama(), {{"model_type", "qwen2"}, {"sliding_window", 4096}}));
  CHECK(qwen.qkv_bias);
  CHECK_FALSE(qwen.o_bias);
}

TEST_CASE("config: rope scaling in its three spellings") {
  auto old_name = llama3;
  old_name["type"] = old_name["rope_type"];
  old_name.erase("rope_type");
  auto parameters = with(llama(), {{"rope_parameters", with(llama3, {{"rope_theta", 7.0}})}});
  parameters.erase("rope_theta");
  for (const auto& [json, base] : {std::pair{with(llama(), {{"rope_scaling", llama3}}), 500000.0},
                                   {with(llama(), {{"rope_scaling", old_name}}), 500000.0},
                                   {parameters, 7.0}}) {
    CHECK(read(json).rope == kvmeld::rotary::halves(base).llama3(
                                 {.factor = 8, .low = 1, .high = 4, .original_context = 32}));
  }
  const nlohmann::json plain = {{"rope_type", "default"}, {"rope_theta", 9.0}};
  CHECK(read(with(llama(), {{"rope_parameters", plain}})).rope == kvmeld::rotary::halves(9));
  CHECK(read(with(llama(), {{"rope_scaling", plain}})).rope == kvmeld::rotary::halves(9));
}

TEST_CASE("config: refuses what it would compute wrongly") {
  refuses({{"rope_theta", 1.0}}, {"rope_theta", "more than 1"});
  refuses({{"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}}}, {"llama3", "default", "yarn"});
  refuses({{"rope_scaling", with(llama3, {{"factor", nullptr}})}}, {"expected \"factor\""});
  refuses({{"rope_scaling", with(llama3, {{"high_freq_factor", 1.0}})}}, {"high_freq_factor"});
  refuses({{"rope_scaling", "llama3"}}, {"rope_scaling", "object", "\"llama3\""});
  refuses({{"hidden_act", "gelu"}}, {"hidden_act", "silu", "gelu"});
  refuses({{"model_type", "gemma2"}}, {"model_type", "llama", "gemma2"});
  refuses({{"mlp_bias", true}}, {"mlp_bias", "expected false", "got true"});
  refuses({{"quantization_config", {{"bits", 4}}}}, {"quantization_config"});
  refuses({{"sliding_window", 4096}}, {"sliding_window", "4096"});
  refuses({{"model_type", "qwen2"}, {"use_sliding_window", true}}, {"use_sliding_window"});
  refuses({{"num_key_value_heads", 3}}, {"num_key_value_heads", "expected a divisor", "got 3"});
  refuses({{"head_dim", nullptr}, {"num_attention_heads", 6}},
          {"expected a divisor of hidden_size", "got 6"});
  refuses({{"head_dim", 7}}, {"expected an even head_dim", "got 7"});
  refuses({{"num_attention_heads", 1 << 30}}, {"num_attention_heads", "index holds"});
}

TEST_CASE("config: refuses values of the wrong kind") {
  for (const nlohmann::json& value :
       {nlohmann::json(0), nlohmann::json(-1), nlohmann::json(1.5), nlohmann::json("32"),
        nlohmann::json(3'000'000'000), nlohmann::json(~0ULL), nlohmann::json::array({1})}) {
    CAPTURE(value);
    refuses({{"hidden_size", value}}, {"hidden_size", "expected an integer from 1 to 2147483647"});
  }
  refuses({{"hidden_size", nullptr}}, {"expected \"hidden_size\""});
  refuses({{"rms_norm_eps", 0}}, {"rms_norm_eps", "positive", "got 0"});
  refuses({{"rope_theta", "big"}}, {"rope_theta", "positive", "big"});
  refuses({{"tie_word_embeddings", 1}}, {"tie_word_embeddings", "true or false", "got 1"});
  refuses({{"model_type", 3}}, {"model_type", "string", "got 3"});
}

TEST_CASE("config: refuses files that are no JSON object") {
  const test::temporary_folder folder;
  const auto read_text = [&](const std::string& text) {
    return [&, text] { engine::config::read(folder.write("config.json", text)); };
  };
  test::expect_refusal("config.json", {"JSON object", "not JSON"}, read_text("{\"a\": "));
  test::expect_refusal("config.json", {"JSON object", "not JSON"}, read_text(""));
  test::expect_refusal("config.json", {"JSON object", "an array"}, read_text("[1]"));
  // deeper than any stack
  test::expect_refusal("config.json", {"JSON object", "an array"},
                       read_text(std::string(500'000, '[') + std::string(500'000, ']')));
  test::expect_refusal("nowhere.json", {"readable file"},
                       [&] { engine::config::read(folder.path() / "nowhere.json"); });
  test::expect_refusal(folder.path().string(), {"readable file"},
                       [&] { engine::config::read(folder.path()); });
}

}  // namespace config_test
