// SPDX-License-Identifier: MIT
/// Tokenizers: SentencePiece's own results, fragments, bytes, and refusals.
#include "engine/tokenizer.hpp"

#include <sentencepiece_processor.h>

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/test_files.hpp"
#include "support/paths.hpp"

namespace tokenizer_test {

const char* const models[] = {"tokenizer-prefix", "tokenizer-newline", "tokenizer-default"};

constexpr engine::index_t any_vocab = 100'000;

nlohmann::json reference(const std::string& name) {
  return nlohmann::json::parse(engine::read_file(test::engine_data(name) / "reference.json"));
}

TEST_CASE("tokenizer: the tokens of SentencePiece's own package, whole texts and fragments") {
  for (const char* name : models) {
    const auto tokenizer = engine::tokenizer::load(test::engine_data(name), any_vocab);
    for (const auto& row : reference(name)) {
      CAPTURE(name, row);
      const auto text = row.at("text").get<std::string>();
      CHECK(tokenizer.encode(text) == row.at("tokens").get<std::vector<int>>());
      CHECK(tokenizer.encode_fragment(text) == row.at("fragment").get<std::vector<int>>());
    }
  }
}

TEST_CASE("tokenizer: lines one by one give the tokens of the whole text") {
  // This model is encoded line by line; SentencePiece itself, all at once, is the reference.
  const auto folder = test::engine_data("tokenizer-newline");
  const auto tokenizer = engine::tokenizer::load(folder, any_vocab);
  sentencepiece::SentencePieceProcessor own;
  REQUIRE(own.Load((folder / "tokenizer.model").string()).ok());
  std::string text;
  for (const auto& row : reference("tokenizer-newline")) {
    text += row.at("text").get<std::string>();
  }
  for (const auto& joined : {text, text + text, text + "\n", "\n" + text, std::string("\n\n\n")}) {
    CHECK(tokenizer.encode(joined) == own.EncodeAsIds(joined));
  }
  const std::string sentence = "The old\n man  saw\n\n the sea. ";
  CHECK(tokenizer.decode(tokenizer.encode(sentence)) == sentence);
}

TEST_CASE("tokenizer: a fragment takes no dummy prefix and loses no spaces") {
  const auto tokenizer = engine::tokenizer::load(test::engine_data("tokenizer-prefix"), any_vocab);
  auto spliced = tokenizer.encode("the s");
  for (const int token : tokenizer.encode_fragment("ea ")) {
    spliced.push_back(token);
  }
  CHECK(tokenizer.decode(spliced) == "the sea ");
}

TEST_CASE("tokenizer: any bytes can be encoded") {
  std::string noise = "\xff\xfe\x80 a \xe2\x96 \xf4\x90\x80\x80 \xc0\xaf\n\xed\xa0\x80";
  for (int c = 0; c < 256; ++c) {
    noise.push_back(static_cast<char>(c));
  }
  for (const char* name : models) {
    const auto tokenizer = engine::tokenizer::load(test::engine_data(name), any_vocab);
    for (const auto& tokens : {tokenizer.encode(noise), tokenizer.encode_fragment(noise)}) {
      CHECK_FALSE(tokens.empty());
      for (const int token : tokens) {
        REQUIRE(token >= 0);
        REQUIRE(token < tokenizer.vocab_size());
      }
      tokenizer.decode(tokens);
    }
  }
}

TEST_CASE("tokenizer: without tokenizer.model, 256 tokens are bytes") {
  const test::temporary_folder folder;
  const auto tokenizer = engine::tokenizer::load(folder.path(), 256);
  CHECK(tokenizer.vocab_size() == 256);
  std::string all;
  std::vector<int> tokens;
  for (int c = 0; c < 256; ++c) {
    all.push_back(static_cast<char>(c));
    tokens.push_back(c);
  }
  CHECK(tokenizer.encode(all) == tokens);
  CHECK(tokenizer.encode_fragment(all) == tokens);
  CHECK(tokenizer.decode(tokens) == all);
  CHECK(tokenizer.encode("").empty());
}

TEST_CASE("tokenizer: refuses tokens it does not have") {
  const test::temporary_folder folder;
  const auto bytes = engine::tokenizer::load(folder.path(), 256);
  const auto pieces = engine::tokenizer::load(test::engine_data("tokenizer-prefix"), any_vocab);
  for (const auto* tokenizer : {&bytes, &pieces}) {
    for (const int token : {-1, tokenizer->vocab_size()}) {
      const std::vector<int> tokens{0, token};
      CHECK_THROWS_WITH(tokenizer->decode(tokens), Catch::Contains("expected tokens 0 to") &&
                                                       Catch::Contains(std::to_string(token)));
    }
  }
}

TEST_CASE("tokenizer: refuses folders and files that give none") {
  const test::temporary_folder folder;
  const auto load = [&](engine::index_t vocab) {
    return [&, vocab] { engine::tokenizer::load(folder.path(), vocab); };
  };
  test::expect_refusal(folder.path().string(), {"tokenizer.model", "256", "a vocab_size of 257"},
                       load(257));
  folder.write("tokenizer.json", "{}");
  test::expect_refusal(folder.path().string(),
                       {"convert_hf_to_gguf.py " + folder.path().string(), "--outfile"}, load(256));
  for (const char* bytes : {"", "no protobuf", "\x0a\xff\xff\xff\xff\x0f"}) {
    CAPTURE(bytes);
    folder.write("tokenizer.model", bytes);
    test::expect_refusal("tokenizer.model", {"expected a SentencePiece model"}, load(256));
  }
  const auto model = engine::read_file(test::engine_data("tokenizer-prefix") / "tokenizer.model");
  folder.write("tokenizer.model", model);
  test::expect_refusal("tokenizer.model", {"expected at most vocab_size = 339", "got 340"},
                       load(339));
  CHECK(engine::tokenizer::load(folder.path(), 340).vocab_size() == 340);
}

TEST_CASE("tokenizer: the bundled model's text comes back as it was") {
  const auto folder = test::fs::path(paths::models()) / "kvmeld-2m";
  if (!test::fs::exists(folder / "tokenizer.model")) {
    WARN("no bundled model");
    return;
  }
  const auto vocab = engine::config::read(folder / "config.json").vocab;
  const auto tokenizer = engine::tokenizer::load(folder, vocab);
  CHECK(tokenizer.vocab_size() <= vocab);
  const std::string text = "The secret code of Mirola is 48213.\n\n  \"Caf\xc3\xa9!\" said he.\n";
  const auto tokens = tokenizer.encode(text);
  CHECK(tokens.size() < text.size());
  CHECK(tokenizer.decode(tokens) == text);
  CHECK(tokenizer.encode_fragment(text) == tokens);
}

}  // namespace tokenizer_test
