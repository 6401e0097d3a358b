// SPDX-License-Identifier: MIT
// The program kvmeld-llama on the bundled model: its options, and what its table counts.
#include "llama_cpp/program.hpp"

#include <catch2/catch.hpp>
#include <sstream>

#include "evaluate/options.hpp"
#include "llama_cpp/bundled.hpp"
#include "llama_cpp/vocabulary.hpp"
#include "support/paths.hpp"

namespace program_test {

using namespace test;
using kvmeld::llama::program_options;

/// A prompt of the held-out text, and the program's options for it.
struct prompt {
  temporary_folder folder;
  std::string text =
      engine::read_file(std::filesystem::path(paths::models()) / "held-out.txt").substr(0, 1500);
  std::string file = folder.write("prompt.txt", text).string();
  std::string gguf = paths::gguf();

  program_options parse(std::vector<std::string> more) const {
    std::vector<const char*> arguments = {
        "kvmeld-llama", "--model",   gguf.c_str(), "--prompt-file", file.c_str(), "--chunk",
        "64",           "--predict", "16"};
    for (const std::string& a : more) {
      arguments.push_back(a.c_str());
    }
    return program_options::parse(static_cast<int>(arguments.size()), arguments.data());
  }
};

/// The cells of its table: a line's name ↦ what stands behind it.
struct table {
  std::string printed;

  explicit table(const program_options& o) {
    std::ostringstream out, progress;
    CHECK(kvmeld::llama::run(o, out, progress) == 0);
    printed = out.str();
  }
  std::vector<std::string> line(const std::string& name) const {
    std::istringstream in(printed);
    for (std::string l; std::getline(in, l);) {
      if (l.starts_with(name + " ")) {
        std::istringstream cells(l.substr(26));
        return {std::istream_iterator<std::string>(cells), {}};
      }
    }
    return {};
  }
};

using cells = std::vector<std::string>;

std::string kib(double bytes) { return std::to_string(std::lround(bytes / 1024)); }

TEST_CASE("llama.cpp: the program refuses what cannot be, by the option's name") {
  const prompt p;
  const auto said = [&](const std::vector<std::string>& more) -> std::string {
    try {
      p.parse(more);
    } catch (const evaluate::usage_error& e) {
      return e.what();
    }
    return "not refused";
  };
  using Catch::Contains;
  CHECK(said({"--mode", "own", "--cache-type", "f32", "--untouched", "0,3"}) == "not refused");
  CHECK_THAT(said({"--mode", "both"}), Contains("--mode: expected repack or own"));
  CHECK_THAT(said({"--cache-type", "q8_0", "--mode", "repack"}),
             Contains("--cache-type: expected f16 or f32"));
  CHECK(said({"--cache-type", "q8_0"}) == "not refused");
  for (const auto& [name, least] : {std::pair{"--budget", 1},
                                    {"--trigger", 0},
                                    {"--room", 0},
                                    {"--predict", 0},
                                    {"--chunk", 0},
                                    {"--cells", 0},
                                    {"--threads", 1}}) {
    CHECK_THAT(said({name, std::to_string(least - 1)}),
               Contains(std::string(name) + ": expected " + std::to_string(least) + " to "));
    CHECK(said({name, std::to_string(least)}) == "not refused");
  }
  CHECK_THAT(said({"--policy", "h2o+ada_kv"}), Contains("--policy: expected a name"));
  CHECK_THAT(said({"--policy", "h2o@window"}), Contains("--policy: expected a name"));
  CHECK_THAT(said({"--policy", "h3o"}), Contains("h3o"));
  CHECK_THAT(said({"--trigger", "600"}), Contains("--trigger: expected --equal with it"));
  CHECK(said({"--trigger", "600", "--equal"}) == "not refused");
  CHECK(said({"--trigger", "600", "--policy", "h2o"}) == "not refused");
  CHECK_THROWS_AS(p.parse({"--help"}), evaluate::help_request);
}

TEST_CASE("llama.cpp: the program counts tokens, cells, slots, bytes and nats") {
  const prompt p;
  const auto theirs = load_gguf(paths::gguf());
  std::vector<int> tokens(p.text.size() + 8);
  tokens.resize(static_cast<std::size_t>(llama_tokenize(
      llama_model_get_vocab(theirs.get()), p.text.data(), static_cast<int>(p.text.size()),
      tokens.data(), static_cast<int>(tokens.size()), true, false)));
  const auto count = static_cast<index_t>(tokens.size()), all = count + 16;
  REQUIRE(count > 300);
  // What a cache of every token costs in nats.
  auto parameters = exact_parameters(count, count);
  parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const llama_context_ptr context(llama_init_from_model(theirs.get(), parameters));
  const auto logits = decode(context.get(), tokens, 0);
  double nats = 0;
  for (index_t i = 0; i + 1 < count; ++i) {
    nats += kvmeld::llama::surprise(
        std::span(logits.row(i).data(), static_cast<std::size_t>(logits.cols())),
        tokens[static_cast<std::size_t>(i) + 1]);
  }
  const double mean = nats / (count - 1);
  const auto facts = kvmeld::llama::model_facts::of(theirs.get());
  const double heads = llama_model_n_layer(theirs.get()) * facts.kv_heads;
  const std::string every = std::to_string(all);

  for (const std::string mode : {"repack", "own"}) {
    CAPTURE(mode);
    const std::vector<std::string> asked = {"--mode", mode, "--perplexity", "--cache-type", "f32"};
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), asked.begin(), asked.end());
      return p.parse(more);
    };
    const double row = 2.0 * facts.dim * 4;
    {
      // All of it fits: nothing is lost, and the same is written.
      const table t(with({"--policy", "h2o", "--budget", every}));
      CHECK(t.line("tokens") == cells{every, every});
      CHECK(t.line("slots of the longest head") == cells{every, every});
      const auto nll = t.line("nll, nats/token");
      REQUIRE(nll.size() == 2);
      CHECK(std::stod(nll[0]) == Approx(mean).margin(2e-4));
      CHECK(std::stod(nll[1]) == Approx(mean).margin(2e-4));
    }
    {
      const table t(with({"--policy", "streaming_llm", "--budget", "96", "--trigger", "97"}));
      CHECK(t.line("tokens") == cells{every, every});
      CHECK(t.line("cells in use") == cells{every, mode == "own" ? "1" : "96"});
      CHECK(t.line("slots of the longest head") == cells{every, "96"});
      CHECK(t.line("KV held, KiB") == cells{kib(all * heads * row), kib(96 * heads * (row + 8))});
      // The engine's cells come by 256; what is ours in whole pages of the system's.
      const index_t padded = (all + 255) / 256 * 256;
      const auto reserved = t.line("KV reserved, KiB");
      REQUIRE(reserved.size() == 2);
      CHECK(reserved[0] == kib(padded * heads * row));
      const double ours = std::stod(reserved[1]),
                   least = (256 * row + 96 * (8.0 + (mode == "own" ? row : 0))) * heads / 1024;
      CHECK((ours >= std::floor(least) && ours <= least + 4 * 2 * 4 * heads));
      const auto nll = t.line("nll, nats/token");
      REQUIRE(nll.size() == 2);
      CHECK(std::stod(nll[0]) == Approx(mean).margin(2e-4));
      CHECK(std::stod(nll[1]) > mean + 0.003);
    }
    if (mode == "own") {
      auto o = with({"--policy", "streaming_llm", "--budget", "96", "--trigger", "97"});
      const auto exact = table(o).line("nll, nats/token");
      o.cache_type = "q8_0";
      const table t(o);
      const auto nll = t.line("nll, nats/token");
      const double row8 = facts.dim / 16.0 * 34;  // of keys and values
      CHECK(t.line("KV held, KiB") == cells{kib(all * heads * row8), kib(96 * heads * (row8 + 8))});
      CHECK(std::stod(nll.at(0)) == Approx(mean).margin(0.01));
      CHECK((nll[1] != exact[1] && std::abs(std::stod(nll[1]) - std::stod(exact[1])) < 0.01));
    }
    {
      // Between target and trigger; half rows; one column of figures.
      auto o = with({"--policy", "streaming_llm", "--budget", "96", "--trigger", "160", "--alone"});
      o.cache_type = "f16";
      const table t(o);
      index_t held = 0;
      for (index_t at = 0; at < all; at += at < count ? std::min<index_t>(64, count - at) : 1) {
        held += at < count ? std::min<index_t>(64, count - at) : 1;
        held = at < count ? std::min(held, 96) : held >= 160 ? 96 : held;
      }
      CHECK(held > 96);
      CHECK(t.line("tokens") == cells{every});
      CHECK(t.line("slots of the longest head") == cells{std::to_string(held)});
      CHECK(t.line("KV held, KiB") == cells{kib(held * heads * (row / 2 + 8))});
      CHECK(t.line("nll, nats/token").size() == 1);
    }
    {
      // Fewer cells than a chunk's tokens: smaller chunks.
      const table t(with(
          {"--policy", "h2o", "--budget", "64", "--cells", "100", "--chunk", "256", "--alone"}));
      CHECK(t.line("tokens") == cells{every});
      CHECK(t.line("slots of the longest head") == cells{"64"});
    }
    {
      // One layer keeps all.
      const table t(with(
          {"--policy", "streaming_llm", "--budget", "96", "--trigger", "97", "--untouched", "1"}));
      CHECK(t.line("slots of the longest head") == cells{every, every});
      const double whole = facts.kv_heads, short_ones = heads - whole;
      CHECK(t.line("KV held, KiB")[1] ==
            kib(mode == "own" ? (whole * all + short_ones * 96) * (row + 8)
                              : heads * all * row + (whole * all + short_ones * 96) * 8));
    }
  }
}

TEST_CASE("llama.cpp: the program writes until the model ends the text") {
  const prompt p;
  const std::vector<std::string> asked = {"--policy", "streaming_llm", "--budget", "96"};
  const auto o = p.parse(asked);
  const table t(o);
  // What it writes, token by token.
  const auto model = load_gguf(paths::gguf());
  const kvmeld::llama::vocabulary language(model.get());
  auto parameters = exact_parameters(256, 64);
  parameters.type_k = parameters.type_v = GGML_TYPE_F16;
  const auto policy = policy_named("streaming_llm");
  kvmeld::llama::session s(
      model.get(), parameters,
      kvmeld::llama::compression{
          policy, {.how = kvmeld::llama::mode::own_attention, .limits = {{.slots = 96}}}});
  const auto tokens = language.read(p.text);
  std::vector<int> written;
  s.read(tokens, false, [&](std::size_t i, std::span<const float> logits) {
    written = {kvmeld::llama::likeliest(logits)};
    CHECK(i < tokens.size());
  });
  while (written.size() < 16) {
    written.push_back(kvmeld::llama::likeliest(s.next(written.back())));
  }
  const auto first = [&](std::size_t n) {
    std::string text;
    for (std::size_t i = 0; i < n; ++i) {
      text += language.write(written[i]);
    }
    return text;
  };
  CHECK(t.printed.starts_with(first(16) + "\n\n"));
  // Another one ends it, at the place where it comes first: none of its text is printed.
  const int last = written[7];
  const auto at = static_cast<std::size_t>(std::ranges::find(written, last) - written.begin());
  auto ended = o;
  ended.model = (p.folder.path() / "ending.gguf").string();
  write_ending(ended.model, last);
  const table short_one(ended);
  CHECK(short_one.printed.starts_with(first(at) + "\n\n"));
  const std::string every = std::to_string(tokens.size() + at);
  CHECK(short_one.line("tokens") == cells{every, every});
  CHECK(short_one.line("cells in use")[0] == every);
}

TEST_CASE("llama.cpp: a session begins again, and tells tokens by where they stand") {
  twin models;
  const auto text = draw_tokens(192, models.shape.vocab);
  const auto wanted = full_logits(models.ours, text);
  for (const bool compressed : {false, true}) {
    std::optional<kvmeld::llama::compression> by;
    if (compressed) {
      by = {policy_named("fold"), {.limits = {{.slots = 200}}}};
    }
    kvmeld::llama::session s(models.theirs.get(), exact_parameters(256, 64), by);
    for (int time = 0; time < 2; ++time) {
      std::size_t next = 0;
      s.read(text, true, [&](std::size_t i, std::span<const float> logits) {
        CHECK(i == next++);
        const auto row = Eigen::Map<const engine::row_vector>(logits.data(), wanted.cols());
        CHECK((row - wanted.row(static_cast<Eigen::Index>(i))).cwiseAbs().maxCoeff() < 0.05F);
      });
      CHECK(next == text.size());
      CHECK(s.position() == 192);
      std::vector<std::size_t> ends;
      s.clear();
      CHECK(s.position() == 0);
      s.read(std::span(text).first(100), false, [&](std::size_t i, std::span<const float> logits) {
        ends.push_back(i);
        const auto row = Eigen::Map<const engine::row_vector>(logits.data(), wanted.cols());
        CHECK((row - wanted.row(static_cast<Eigen::Index>(i))).cwiseAbs().maxCoeff() < 0.05F);
      });
      CHECK(ends == std::vector<std::size_t>{63, 99});
      const auto logits = s.next(text[100]);
      const auto row = Eigen::Map<const engine::row_vector>(logits.data(), wanted.cols());
      CHECK((row - wanted.row(100)).cwiseAbs().maxCoeff() < 0.05F);
      CHECK(s.position() == 101);
      s.clear();
    }
  }
}

}  // namespace program_test
