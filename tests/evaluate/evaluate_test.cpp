// SPDX-License-Identifier: MIT
/// The main job from its command line to its files.
#include <algorithm>  // std::ranges::generate
#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <set>
#include <string>

#include "evaluate/needle.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/options.hpp"
#include "evaluate/parallel.hpp"
#include "kvmeld/compress/shared_slots.hpp"
#include "support/random.hpp"
#include "support/tiny_model.hpp"

namespace evaluate_test {

using test::fields;
using test::header;
using test::tiny_model;

TEST_CASE("evaluate writes a row for each policy and budget, and what was not asked for is empty") {
  const tiny_model model;
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "nll", "--policies", "full_cache,h2o", "--budgets", "40,0.5"});
  CHECK(code == 0);
  REQUIRE(csv.size() == 4);
  CHECK(csv[0] == header);
  const std::vector<std::vector<std::string>> expected = {
      {"full_cache", "1.0", "96"}, {"h2o", "40", "40"}, {"h2o", "0.5", "48"}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    auto row = fields(csv[i + 1]);
    CAPTURE(csv[i + 1]);
    CHECK(std::vector{row["policy"], row["budget"], row["slots"]} == expected[i]);
    CHECK(std::stod(row["nll"]) > 0);
    CHECK((std::stod(row["kl"]) > 0) == (row["policy"] == "h2o"));
    CHECK(std::stod(row["bytes"]) > 0);
    CHECK(std::stod(row["nll_se"]) > 0);
    CHECK((std::stod(row["kl_se"]) > 0) == (row["policy"] == "h2o"));
    for (const char* empty : {"attention_error", "needle_after", "needle_inside", "stream_error",
                              "prefill_ms", "decode_tokens_per_s", "decode_vs_full",
                              "attention_error_se", "needle_after_se", "needle_inside_se"}) {
      CHECK(row[empty].empty());
    }
  }
  CHECK_THAT(table, Catch::Contains("nll") && !Catch::Contains("stream"));
}

/// Rows of a run of all policies that finds no heads to keep whole: the budget is too small for
/// one, or there are no needles to find them by.
std::size_t rows_without_whole_heads() { return 1 + evaluate::all_policies().size() - 1; }

TEST_CASE("evaluate fills every column, and the full cache is without error") {
  const tiny_model model;
  const auto [code, table, progress, csv] = model.run({"--budgets", "0.5"});
  CHECK(code == 0);
  REQUIRE(csv.size() == rows_without_whole_heads());
  for (std::size_t i = 1; i < csv.size(); ++i) {
    CAPTURE(csv[i]);
    // Policies that compress prompts only, and budgets that only a prompt divides, have no stream.
    const std::string line = csv[i].substr(0, csv[i].find(','));
    const bool streams = line == "fold+equal" || line == "snapkv+massfold" ||
                         (line != "attention_matching" && line != "kvzip" && line != "dropkv" &&
                          line.find_first_of("+/") == std::string::npos);
    for (const auto& [name, value] : fields(csv[i])) {
      CAPTURE(name);
      CHECK(value.empty() == (name == "stream_error" && !streams));
    }
  }
  auto full = fields(csv[1]);
  CHECK(full["attention_error"] == "0");
  CHECK(full["stream_error"] == "0");
  CHECK(full["decode_vs_full"] == "1");
  const auto evicts = std::ranges::find_if(
      csv, [](const std::string& row) { return row.starts_with("streaming_llm,"); });
  REQUIRE(evicts != csv.end());
  CHECK(std::stod(fields(*evicts)["attention_error"]) > 0);
  CHECK(std::stod(fields(*evicts)["stream_error"]) > 0);
}

TEST_CASE(
    "the same seed gives evaluate the same bytes for any number of threads, another does not") {
  const tiny_model model;
  const std::string tasks = "error,nll,needle,stream";  // all but the timings
  const auto once = model.run({"--tasks", tasks, "--threads", "1"}).csv;
  CHECK(model.run({"--tasks", tasks, "--threads", "2"}).csv == once);
  CHECK(model.run({"--tasks", tasks, "--threads", "2", "--seed", "2"}).csv != once);
}

TEST_CASE("nats and divergences of logits are those of their softmax, in double") {
  Eigen::MatrixXd logits[2];
  engine::row_major_matrix rows[2];
  for (int i : {0, 1}) {
    logits[i] = Eigen::MatrixXd::Random(1, 300) * 20;
    rows[i] = logits[i].cast<float>();
    logits[i] = rows[i].cast<double>();
  }
  double sums[2] = {0, 0}, divergence = 0;
  for (int t = 0; t < 300; ++t) {
    sums[0] += std::exp(logits[0](t)), sums[1] += std::exp(logits[1](t));
  }
  for (int t = 0; t < 300; ++t) {
    const double p = std::exp(logits[0](t)) / sums[0], q = std::exp(logits[1](t)) / sums[1];
    divergence += p * std::log(p / q);
  }
  CHECK(evaluate::surprise(rows[0], 7) == Approx(std::log(sums[0]) - logits[0](7)).epsilon(1e-6));
  CHECK(evaluate::kl_divergence(rows[0], rows[1]) == Approx(divergence).epsilon(1e-5));
  CHECK(evaluate::kl_divergence(rows[0], rows[0]) == 0);
}

TEST_CASE("standard errors are the samples' spread over the root of their number") {
  const std::vector<double> samples = {1, 2, 3, 6};
  const auto [mean, error] = evaluate::estimate_of(samples);
  CHECK(mean == Approx(3));
  CHECK(error.value() == Approx(std::sqrt((4 + 1 + 0 + 9) / 3.0 / 4)));
  CHECK(!evaluate::estimate_of(std::span(samples).first(1)).error);
  evaluate::recall r;
  r.asked[0] = 5, r.asked[7] = 3, r.right[0] = 1, r.right[7] = 1;
  CHECK(r.share().mean == Approx(0.25));
  CHECK(r.share().error.value() == Approx(std::sqrt(0.25 * 0.75 / 7)));
}

TEST_CASE("one prompt has no standard error, and the table shows those that there are") {
  const tiny_model model;
  const auto one = model.run({"--tasks", "error,nll", "--policies", "h2o", "--prompts", "1"});
  REQUIRE(one.csv.size() == 2);
  CHECK(fields(one.csv[1])["attention_error_se"].empty());
  CHECK(fields(one.csv[1])["kl_se"].empty());
  CHECK_THAT(one.table, !Catch::Contains("±"));
  const auto two = model.run({"--tasks", "error", "--policies", "h2o"});
  REQUIRE(two.csv.size() == 2);
  auto row = fields(two.csv[1]);
  CHECK_THAT(two.table,
             Catch::Contains(fmt::format("{:.3f} ±{:.0f}", std::stod(row["attention_error"]),
                                         1000 * std::stod(row["attention_error_se"]))));
}

TEST_CASE("a policy that evicts nothing predicts as the full cache does") {
  const tiny_model model;
  const auto csv =
      model.run({"--tasks", "nll", "--budgets", "352", "--policies", "full_cache,h2o,fold"}).csv;
  REQUIRE(csv.size() == 4);
  for (std::size_t i = 1; i < csv.size(); ++i) {
    CHECK(std::stod(fields(csv[i])["kl"]) < 1e-6);
    CHECK(std::stod(fields(csv[i])["nll"]) == Approx(std::stod(fields(csv[1])["nll"])));
  }
}

TEST_CASE("a budget of the whole prompt does not change attention") {
  const tiny_model model;
  const auto csv = model.run({"--tasks", "error", "--budgets", "96"}).csv;
  REQUIRE(csv.size() == rows_without_whole_heads());
  for (std::size_t i = 1; i < csv.size(); ++i) {
    CAPTURE(csv[i]);
    auto row = fields(csv[i]);
    const bool rounded = row["policy"].find('/') != std::string::npos;
    CHECK((std::stod(row["attention_error"]) < 1e-6) == !rounded);
  }
}

TEST_CASE("the order of policies changes the order of rows and nothing else") {
  const tiny_model model;
  const auto rows = [&](const std::string& policies) {
    const auto csv = model.run({"--tasks", "error,nll,needle", "--policies", policies}).csv;
    REQUIRE(csv.size() == 4);
    return std::set<std::string>(csv.begin() + 1, csv.end());
  };
  const auto expected = rows("full_cache,fold,h2o");
  CHECK(rows("fold,full_cache,h2o") == expected);
  CHECK(rows("h2o,fold,full_cache") == expected);
}

TEST_CASE("a policy that refuses a budget is left out of the file and says what would do") {
  const tiny_model model;
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "error", "--policies", "streaming_llm,snapkv", "--budgets", "20"});
  CHECK(code == 0);
  REQUIRE(csv.size() == 2);
  CHECK(fields(csv[1])["policy"] == "streaming_llm");
  CHECK_THAT(table, Catch::Contains(fmt::format("needs at least {} slots",
                                                kvmeld::declared(kvmeld::snapkv{}).min_budget())));
}

TEST_CASE("a budget in percent gives every policy what fits beside its state") {
  const tiny_model model;
  const bool rests = GENERATE(false, true);  // with as many slots as fold's queries span
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "error", "--budgets", "90%", "--room", rests ? "64" : "0", "--policies",
                 "full_cache,streaming_llm,h2o,fold,fold:queries=1,h2o/half"});
  REQUIRE(csv.size() == 7);
  // Of each token the full cache has 2 · 8 floats and 8 bytes beside them in each of two heads.
  const double most = 0.9 * std::stod(fields(csv[1])["bytes"]) * (2 * 8 * 2) / (2 * 8 * 4 + 8);
  std::map<std::string, int> slots;
  for (std::size_t i = 2; i < csv.size(); ++i) {
    auto row = fields(csv[i]);
    CAPTURE(csv[i]);
    CHECK(row["budget"] == "90%");
    slots[row["policy"]] = std::stoi(row["slots"]);
    const double bytes = std::stod(row["bytes"]);
    CHECK(bytes <= most);
    CHECK(bytes > most - 1.02 * bytes / slots[row["policy"]]);  // another slot would not fit
  }
  CHECK(slots["streaming_llm"] > slots["h2o"]);  // h2o has a number for each slot
  CHECK((rests || slots["h2o"] > slots["fold"]));
  CHECK(
      (rests ? slots["fold:queries=1"] == slots["fold"] : slots["fold:queries=1"] > slots["fold"]));
  CHECK(slots["h2o/half"] > slots["h2o"]);
  CHECK_THAT(table, Catch::Contains("90 % of a 16-bit cache's bytes"));
}

TEST_CASE("a stream that is longer than the text or the model is said to be, and has no column") {
  const tiny_model model;
  const auto [code, table, progress, csv] =
      model.run({"--tasks", "stream", "--policies", "h2o", "--budgets", "400,40"});
  REQUIRE(csv.size() == 3);
  CHECK(fields(csv[1])["stream_error"].empty());
  CHECK_FALSE(fields(csv[2])["stream_error"].empty());
  const std::string note = "no stream at 400 slots: it would take 4000 tokens, the text has ";
  CHECK_THAT(table, Catch::Contains(note));
  CHECK(table.find(note) < table.find("h2o"));  // before what it takes to find out

  const engine::config shape{
      .layers = 1, .heads = 1, .kv_heads = 1, .dim = 8, .max_positions = 500};
  auto options = model.options({"--tasks", "stream", "--policies", "h2o", "--budgets", "60,50"});
  options.prompt = 200;
  const auto todo = evaluate::make_plan(options, 4000, shape);
  CHECK(todo.notes == std::vector<std::string>{"no stream at 60 slots: it would take 600 tokens, "
                                               "the model was made for 500"});
  CHECK(todo.longest_stream == 500);
  options.prompt = 501;
  CHECK_THROWS_WITH(evaluate::make_plan(options, 4000, shape),
                    "--prompt: expected at most 500 tokens, which the model was made for, got 501");
}

TEST_CASE("from an empty cache slots that heads share are what the library makes of them") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const auto named = evaluate::detail::parse_policy("fold");
  const evaluate::contender c{
      .policy = kvmeld::for_shared(named.measuring(), 40), .limit = {40}, .budgets = named.budgets};
  REQUIRE(c.streams());
  constexpr kvmeld::index_t tokens = 150;
  evaluate::compressed_cache own(c, model.shape(), tokens);
  kvmeld::cache kv(model.shape().attention(), {.layers = model.shape().layers, .capacity = tokens});
  kvmeld::compressor meld(kv, kvmeld::fold(), kvmeld::budget::shared(40));
  const auto& spec = kv.spec();
  auto numbers = [normal = std::normal_distribution<float>()](kvmeld::index_t n) mutable {
    std::vector<float> x(kvmeld::as_size(n));
    std::ranges::generate(x, [&] { return normal(streams::floats); });
    return x;
  };
  for (kvmeld::index_t t = 0; t < tokens; ++t) {
    for (kvmeld::index_t layer = 0; layer < kv.layers(); ++layer) {
      const auto q = numbers(spec.kv_heads * spec.group * spec.key_dim),
                 k = numbers(spec.kv_heads * spec.key_dim);
      std::vector<float> a(q.size()), b(q.size());
      own.meld().step(own.kv().heads(layer, 0), {q, k, k}, a);
      meld.step(kv.heads(layer, 0), {q, k, k}, b);
      REQUIRE(a == b);
    }
  }
  CHECK(own.kv().head(0).length() <= 40);
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
  REQUIRE(csv.size() == 8);  // of full caches in seven storages
  CHECK(fields(csv[1])["policy"] == "full_cache");
  CHECK_THAT(buffer.str(), Catch::Contains("interrupted"));
}

TEST_CASE("evaluate draws pictures with gnuplot, and says so when there is none") {
  const tiny_model model;
  const std::vector<std::string> arguments = {"--tasks", "error,needle,stream", "--prompts", "1"};
  CHECK_THAT(model.run(arguments).table, Catch::Contains("gnuplot is not installed"));
  const auto table = model.measure(model.options(arguments)).table;
  if (table.find("gnuplot is not installed") == std::string::npos) {
    for (const char* name : {"plots/error.svg", "plots/bytes.svg", "plots/needle.svg",
                             "plots/stream.svg", "plots/heads.svg", "plots/retention.svg"}) {
      CAPTURE(name);
      CHECK_THAT(engine::read_file(model.file(name)), Catch::Contains("</svg>"));
      CHECK_THAT(table, Catch::Contains(name));
    }
  }
}

TEST_CASE("what does not fit into the text or the prompt is refused before anything is run") {
  const tiny_model model;
  CHECK_THROWS_AS(model.run({"--prompt", "2900"}), evaluate::usage_error);
  CHECK_THROWS_AS(model.run({"--needles", "20"}), evaluate::usage_error);
  CHECK_THROWS_AS(model.run({"--csv", "/proc/no/e.csv"}), evaluate::usage_error);
  CHECK_THROWS_AS(model.run({"--plots", "/proc/no"}), evaluate::usage_error);
}

TEST_CASE("the error of more future queries is another one, and wants text for them") {
  const tiny_model model;
  const std::vector<std::string> common = {"--policies", "h2o", "--tasks", "error"};
  auto near = common, far = common;
  near.insert(near.end(), {"--future", "8"});
  far.insert(far.end(), {"--future", "300"});
  const auto one = model.run(near).csv, other = model.run(far).csv;
  REQUIRE(one.size() == 2);
  REQUIRE(other.size() == 2);
  CHECK(fields(one[1])["attention_error"] != fields(other[1])["attention_error"]);
  CHECK_THROWS_AS(model.run({"--future", "2950"}), evaluate::usage_error);
}

TEST_CASE("room after a prompt changes what is decoded, not what is compressed") {
  const tiny_model model;
  const auto row = [&](const char* room) {
    const auto csv = model.run({"--policies", "h2o", "--tasks", "error,nll", "--room", room}).csv;
    REQUIRE(csv.size() == 2);
    return fields(csv[1]);
  };
  auto none = row("0"), some = row("100000");  // more than any cache has
  CHECK(none["attention_error"] == some["attention_error"]);
  CHECK(none["nll"] != some["nll"]);
}

}  // namespace evaluate_test
