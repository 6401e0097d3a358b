/// The main job on a tiny random model: bytes for tokens, two layers, two query heads on one.
#include "evaluate/evaluate.hpp"

#include <catch2/catch.hpp>
#include <cstdlib>  // setenv
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "engine_files.hpp"
#include "evaluate/parallel.hpp"
#include "evaluate/prompt.hpp"
#include "evaluate/random.hpp"

namespace {

constexpr const char* header =
    "policy,budget,slots,attention_error,nll,needle_after,needle_inside,stream_error,bytes,"
    "prefill_ms,decode_tokens_per_s,decode_vs_full";

/// A model's folder and a text, gone at the end of the test.
class tiny_model {
 public:
  tiny_model() {
    folder_.write("config.json",
                  R"({"model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
                      "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                      "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 256,
                      "rms_norm_eps": 1e-5, "tie_word_embeddings": true})");
    add("model.embed_tokens.weight", {256, 16});
    add("model.norm.weight", {16});
    for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
      add(layer + "input_layernorm.weight", {16});
      add(layer + "post_attention_layernorm.weight", {16});
      add(layer + "self_attn.q_proj.weight", {16, 16});
      add(layer + "self_attn.k_proj.weight", {8, 16});
      add(layer + "self_attn.v_proj.weight", {8, 16});
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
  output run(const std::vector<std::string>& more) const { return measure(options(more)); }
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
std::map<std::string, std::string> fields(const std::string& line) {
  std::map<std::string, std::string> by_name;
  std::istringstream names(header), values(line);
  for (std::string name, value; std::getline(names, name, ',');) {
    value.clear();
    std::getline(values, value, ',');
    by_name[name] = value;
  }
  return by_name;
}

}  // namespace

TEST_CASE("evaluate writes a row for each policy and budget, and what was not asked for is empty") {
  const tiny_model model;
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "nll", "--policies", "full_cache,h2o", "--budgets", "40,0.5"});
  CHECK(code == 0);
  REQUIRE(csv.size() == 4);
  CHECK(csv[0] == header);
  const std::vector<std::vector<std::string>> expected = {
      {"full_cache", "1", "96"}, {"h2o", "40", "40"}, {"h2o", "0.5", "48"}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    auto row = fields(csv[i + 1]);
    CAPTURE(csv[i + 1]);
    CHECK(std::vector{row["policy"], row["budget"], row["slots"]} == expected[i]);
    CHECK(std::stod(row["nll"]) > 0);
    CHECK(std::stod(row["bytes"]) > 0);
    for (const char* empty : {"attention_error", "needle_after", "needle_inside", "stream_error",
                              "prefill_ms", "decode_tokens_per_s", "decode_vs_full"}) {
      CHECK(row[empty].empty());
    }
  }
  CHECK_THAT(table, Catch::Contains("nll") && !Catch::Contains("stream"));
}

TEST_CASE("evaluate fills every column, and the full cache is without error") {
  const tiny_model model;
  const auto [code, table, progress, csv] = model.run({"--budgets", "0.5"});
  CHECK(code == 0);
  REQUIRE(csv.size() == 1 + evaluate::all_policies().size());
  for (std::size_t i = 1; i < csv.size(); ++i) {
    CAPTURE(csv[i]);
    // Who compresses prompts only, and budgets that a prompt divides, have no stream.
    const std::string who = csv[i].substr(0, csv[i].find(','));
    const bool streams = who != "attention_matching" && who.find('+') == std::string::npos;
    for (const auto& [name, value] : fields(csv[i])) {
      CAPTURE(name);
      CHECK(value.empty() == (name == "stream_error" && !streams));
    }
  }
  auto full = fields(csv[1]);
  CHECK(full["attention_error"] == "0");
  CHECK(full["stream_error"] == "0");
  CHECK(full["decode_vs_full"] == "1");
  CHECK(std::stod(fields(csv[2])["attention_error"]) > 0);
  CHECK(std::stod(fields(csv[2])["stream_error"]) > 0);
}

TEST_CASE(
    "the same seed gives evaluate the same bytes for any number of threads, another does not") {
  const tiny_model model;
  const std::string tasks = "error,nll,needle,stream";  // all but the timings
  const auto once = model.run({"--tasks", tasks, "--threads", "1"}).csv;
  CHECK(model.run({"--tasks", tasks, "--threads", "2"}).csv == once);
  CHECK(model.run({"--tasks", tasks, "--threads", "2", "--seed", "2"}).csv != once);
}

TEST_CASE("a budget of the whole prompt leaves attention as it was") {
  const tiny_model model;
  const auto csv = model.run({"--tasks", "error", "--budgets", "96"}).csv;
  REQUIRE(csv.size() == 1 + evaluate::all_policies().size());
  for (std::size_t i = 1; i < csv.size(); ++i) {
    CAPTURE(csv[i]);
    CHECK(std::stod(fields(csv[i])["attention_error"]) < 1e-6);
  }
}

TEST_CASE("prompts measured once are compressed as by compress itself, at any budget") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  std::vector<int> tokens;
  for (const char c : engine::read_file(files.file("text.txt")).substr(0, 96)) {
    tokens.push_back(c);
  }
  const auto r = engine::prefill(model, tokens);
  const auto policies = evaluate::all_policies();
  // Shared up to token 70, as needle prompts are.
  const auto body = std::make_shared<evaluate::prompt_body>(model.shape(), r, 70, 100);
  const auto prompt = evaluate::measure(model.shape(), r, policies, body);
  for (std::size_t i = 0; i < policies.size(); ++i) {
    CAPTURE(policies[i].name);
    for (const kvfold::budget limit : {kvfold::budget{40}, kvfold::budget{60}}) {
      kvfold::index_t slots = 0;  // of all layers: what was asked for
      for (std::size_t l = 0; l < prompt.tail.size(); ++l) {
        for (const kvfold::budget& b :
             evaluate::divide(policies[i].budgets, policies[i].policy, limit.target, prompt.tokens,
                              prompt.measured[i], l)) {
          slots += b.target;
          CHECK(b.target >= policies[i].policy.least());
        }
      }
      CHECK(slots == limit.target * model.shape().layers * model.shape().kv_heads);
      evaluate::compressed_layer ours({i, policies[i].policy, limit, policies[i].budgets}, prompt,
                                      1);
      const auto limits = evaluate::divide(policies[i].budgets, policies[i].policy, limit.target,
                                           prompt.tokens, prompt.measured[i], 1);
      auto kv = prompt.layer(1);
      auto state = kvfold::make_state(policies[i].policy, kv);
      const auto own = evaluate::queries_of(model.shape(), r.layers[1]);
      const auto chosen = evaluate::reference_of(policies[i], model.shape().rope, kv, own);
      kvfold::compress(policies[i].policy, kv, state, chosen ? chosen->view() : own,
                       std::span<const kvfold::budget>(limits));
      const auto head = kv.head(0), same = ours.kv.head(0);
      REQUIRE(same.length() == head.length());
      for (kvfold::index_t s = 0; s < head.length(); ++s) {
        CHECK(same.position(s) == head.position(s));
        CHECK(same.log_mass(s) == head.log_mass(s));
        CHECK(same.key(s)[0] == head.key(s)[0]);
      }
      CHECK(ours.bytes() == kv.bytes() + state.bytes());
    }
  }
}

TEST_CASE("a policy that refuses a budget is left out of the file and says what would do") {
  const tiny_model model;
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "error", "--policies", "streaming_llm,snapkv", "--budgets", "20"});
  CHECK(code == 0);
  REQUIRE(csv.size() == 2);
  CHECK(fields(csv[1])["policy"] == "streaming_llm");
  CHECK_THAT(table,
             Catch::Contains(fmt::format("needs at least {} slots", kvfold::snapkv{}.least())));
}

TEST_CASE("a stream that is longer than the text is said to be, and its column is empty") {
  const tiny_model model;
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "stream", "--policies", "h2o", "--budgets", "400,40"});
  REQUIRE(csv.size() == 3);
  CHECK(fields(csv[1])["stream_error"].empty());
  CHECK_FALSE(fields(csv[2])["stream_error"].empty());
  CHECK_THAT(table, Catch::Contains("no stream at 400 slots: it would take 4000 tokens"));
}

TEST_CASE("Ctrl-C keeps the rows that are done") {
  /// Comes as soon as something is printed: after the first group.
  struct interrupter : std::stringbuf {
    int sync() override {
      evaluate::interrupted = true;
      return 0;
    }
  } buffer;
  const tiny_model model;
  std::ostream out(&buffer);
  std::ostringstream err;
  CHECK(evaluate::run(model.options({"--tasks", "error,stream"}), out, err) == 130);
  const auto csv = model.lines();
  REQUIRE(csv.size() == 2);
  CHECK(fields(csv[1])["policy"] == "full_cache");
  CHECK_THAT(buffer.str(), Catch::Contains("interrupted"));
}

TEST_CASE("evaluate draws pictures with gnuplot, and says so when there is none") {
  const tiny_model model;
  const auto options = model.options({"--tasks", "error,needle,stream", "--prompts", "1"});
  const std::string path = std::getenv("PATH");
  setenv("PATH", "/nowhere", 1);
  CHECK_THAT(model.measure(options).table, Catch::Contains("gnuplot is not installed"));
  setenv("PATH", path.c_str(), 1);
  const auto table = model.measure(options).table;
  if (table.find("gnuplot is not installed") == std::string::npos) {
    for (const char* name : {"plots/error.svg", "plots/needle.svg", "plots/retention.svg"}) {
      CAPTURE(name);
      CHECK_THAT(engine::read_file(model.file(name)), Catch::Contains("</svg>"));
      CHECK_THAT(table, Catch::Contains(name));
    }
  }
}

TEST_CASE("budgets below one are shares of the prompt, others slots") {
  const tiny_model model;
  const auto budgets = model.options({"--budgets", "64,0.1"}).budgets;
  REQUIRE(budgets.size() == 2);
  CHECK(budgets[0].slots(896) == 64);
  CHECK(budgets[1].slots(896) == 90);
  CHECK(evaluate::budget_option{1}.slots(896) == 1);
}

TEST_CASE("an argument given twice counts as given last") {
  const tiny_model model;
  CHECK(model.options({"--seed", "3", "--seed", "4"}).seed == 4);
  CHECK(model.options({"--question", "a\\nb {key}"}).question == "a\nb {key}");
}

TEST_CASE("bad values are refused in one line before anything is run") {
  const tiny_model model;
  const std::vector<std::vector<std::string>> bad = {{"--policies", "h2o,chance"},
                                                     {"--policies", ""},
                                                     {"--budgets", "0"},
                                                     {"--budgets", "a"},
                                                     {"--budgets", "2.5"},
                                                     {"--budgets", "0.1,-3"},
                                                     {"--budgets", "nan"},
                                                     {"--tasks", "errors"},
                                                     {"--prompt", "0"},
                                                     {"--prompt", "many"},
                                                     {"--prompts", "0"},
                                                     {"--threads", "0"},
                                                     {"--needle", "no fields"},
                                                     {"--question", "?"},
                                                     {"--model", "/nowhere"},
                                                     {"--text", "/nowhere"},
                                                     {"--unknown", "1"},
                                                     {"--digits", "0"},
                                                     {"--policies", "h2o+x"},
                                                     {"--policies", "random+ada_kv"},
                                                     {"--policies", "snapkv@own:3"},
                                                     {"--policies", "fold:share=2"},
                                                     {"--policies", "keepkv:as=2"}};
  for (const auto& arguments : bad) {
    CAPTURE(arguments);
    std::string message;
    try {
      model.options(arguments);
    } catch (const evaluate::usage_error& error) {
      message = error.what();
    }
    CHECK_FALSE(message.empty());
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("what does not fit into the text or the prompt is refused before anything is run") {
  const tiny_model model;
  CHECK_THROWS_AS(model.run({"--prompt", "2900"}), evaluate::usage_error);
  CHECK_THROWS_AS(model.run({"--needles", "20"}), evaluate::usage_error);
  CHECK_THROWS_AS(model.run({"--csv", "/proc/no/e.csv"}), evaluate::usage_error);
  CHECK_THROWS_AS(model.run({"--plots", "/proc/no"}), evaluate::usage_error);
}
