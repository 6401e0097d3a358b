// SPDX-License-Identifier: MIT
#include "evaluate/options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>  // std::ranges::find
#include <array>
#include <cmath>  // std::floor

namespace evaluate {

std::string budget_option::text() const {
  return of == unit::bytes                 ? fmt::format("{:g}%", 100 * given)
         : of == unit::share && given == 1 ? "1.0"
                                           : fmt::format("{:g}", given);
}

namespace detail {
namespace {

std::vector<budget_option> parse_budgets(const std::string& list) {
  constexpr double most = 1 << 24;
  std::vector<budget_option> budgets;
  for (const std::string& word : split(list)) {
    using unit = budget_option::unit;
    double x = 0;
    const unit of = word.ends_with('%')                   ? unit::bytes
                    : word.find('.') != std::string::npos ? unit::share
                                                          : unit::slots;
    const bool number =
        CLI::detail::lexical_cast(of == unit::bytes ? word.substr(0, word.size() - 1) : word, x);
    require(number && x > 0 &&
                (of == unit::bytes   ? x < 100
                 : of == unit::share ? x <= 1
                                     : x <= most && x == std::floor(x)),
            "--budgets: expected shares of the prompt (0.1, at most 1.0), slots per head (90) or "
            "percents of a 16-bit cache's bytes (10%), got '" +
                word + "'");
    budgets.push_back({of == unit::bytes ? x / 100 : x, of});
  }
  require(!budgets.empty(), "--budgets: expected at least 1 budget");
  return budgets;
}

task_set parse_tasks(const std::string& list) {
  constexpr std::array names = {"error", "nll",   "needle",        "stream", "speed",
                                "chain", "ruler", "stream_needle", "copy"};
  constexpr std::array members = {&task_set::error,  &task_set::nll,           &task_set::needle,
                                  &task_set::stream, &task_set::speed,         &task_set::chain,
                                  &task_set::ruler,  &task_set::stream_needle, &task_set::copy};
  task_set tasks;
  for (const std::string& word : split(list)) {
    const auto found = std::ranges::find(names, word);
    require(found != names.end(),
            fmt::format("--tasks: expected some of {}, got '{}'", fmt::join(names, ","), word));
    tasks.*members[as_size(found - names.begin())] = true;
  }
  require(!split(list).empty(), "--tasks: expected at least 1 task");
  return tasks;
}

/// A shell hands "\n" over as two characters.
std::string unescape(std::string text) {
  for (const auto& [from, to] : {std::pair{"\\n", "\n"}, std::pair{"\\t", "\t"}}) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; ++at) {
      text.replace(at, 2, to);
    }
  }
  return text;
}

}  // namespace
}  // namespace detail

options parse(int count, const char* const* arguments) {
  options o;
  std::string policies = "all", budgets = "0.05,0.1,0.2", tasks = "error,nll,needle,stream,speed",
              prompts = "2";
  CLI::App app(
      "Measures what KV-cache compression does to a model: every policy at several budgets.",
      "evaluate");
  app.option_defaults()->take_last()->always_capture_default();
  app.add_option("--model", o.model, "Hugging Face folder or GGUF file of a llama-family model")
      ->required();
  app.add_option("--text", o.text, "text that the model was not trained on");
  app.add_option("--policies", policies,
                 "all, or names with commas between: "
                 "name[:parameter=value,...][+division][@source][/storage]");
  app.add_option("--horizon", o.ahead.horizon, "positions to which @lookahead shifts queries");
  app.add_option("--fade", o.ahead.fade, "distance at which their density halves; inf: evenly");
  app.add_option("--future", o.future,
                 "tokens after the prompt whose queries attention_error averages");
  app.add_option("--budgets", budgets,
                 "0.1: share of the prompt; 90: slots per head; 10%: of a 16-bit cache's bytes");
  app.add_option("--room", o.room,
                 "slots per head in addition to the budget, for tokens after the prompt");
  app.add_option("--prompt", o.prompt, "tokens of a prompt");
  app.add_option("--prompts", prompts,
                 "prompts (and streams) to average over; or FILE.jsonl,...: prompts of others");
  app.add_option("--tasks", tasks,
                 "columns to fill; chain,ruler,stream_needle,copy: a table of their own");
  app.add_option("--needle", o.needle, "the text of a planted fact");
  app.add_option("--question", o.question, "the question about it");
  app.add_flag("--chat", o.chat, "needle cases as a user's turn, by the model's chat template");
  app.add_option("--digits", o.digits, "digits of a value");
  app.add_option("--needles", o.needles, "needles in a prompt, one of them queried");
  app.add_option("--cases", o.cases, "needle prompts");
  app.add_option("--memory", o.memory,
                 "GiB of needle prompts, or of caches of prompt files, held at once");
  app.add_option("--samples", o.samples, "prompts of each task of the second table");
  app.add_option("--threads", o.threads, "changes the time only");
  app.add_option("--seed", o.seed, "the same seed gives the same file, except for times");
  app.add_option(
      "--profile", o.profile,
      "budgets per head: written if the file does not exist, otherwise used by +profile and for "
      "fold's clusters");
  app.add_option("--calibrate", o.calibrate,
                 "means of queries for triattention: written if the file does not exist, otherwise "
                 "used");
  app.add_option("--surrogate", o.surrogate, "weights of KVzap or Fast KVzip, for @surrogate");
  app.add_option("--csv", o.csv, "results as a table");
  app.add_option("--plots", o.plots, "folder for the pictures");
  try {
    app.parse(count, arguments);
  } catch (const CLI::CallForHelp&) {
    throw help_request{app.help()};
  } catch (const CLI::Error& e) {
    throw usage_error(e.what());
  }
  using detail::require;
  o.policies = detail::parse_policies(policies);
  o.budgets = detail::parse_budgets(budgets);
  o.tasks = detail::parse_tasks(tasks);
  if (index_t number = 0; CLI::detail::lexical_cast(prompts, number)) {
    o.prompts = number;
  } else {
    for (const std::string& file : detail::split(prompts)) {
      require(std::filesystem::is_regular_file(file),
              "--prompts: expected a number or JSONL files, got '" + file + "'");
      o.files.emplace_back(file);
    }
    require(!o.files.empty(), "--prompts: expected a number or JSONL files, got ''");
  }
  for (named_policy& p : o.policies) {
    p.ahead = o.ahead;
    p.policy.visit([&](auto& one) {  // where a decode step's remembered queries are moved to
      if constexpr (requires { one.decode.ahead = o.ahead; }) {
        one.decode.ahead = o.ahead;
      }
    });
  }
  o.needle = detail::unescape(o.needle);
  o.question = detail::unescape(o.question);
  for (const auto& [name, value, most] : {std::tuple{"--prompt", o.prompt, 1 << 24},
                                          {"--prompts", o.prompts, 1 << 16},
                                          {"--cases", o.cases, 1 << 16},
                                          {"--needles", o.needles, 1000},
                                          {"--samples", o.samples, 1 << 16},
                                          {"--digits", o.digits, 1000},
                                          {"--horizon", o.ahead.horizon, 1 << 24},
                                          {"--future", o.future, 1 << 24},
                                          {"--threads", o.threads, 1024}}) {
    require(value >= 1 && value <= most, std::string(name) + ": expected 1 to " +
                                             std::to_string(most) + ", got " +
                                             std::to_string(value));
  }
  require(o.room >= 0 && o.room <= 1 << 24,
          "--room: expected 0 to 16777216 slots, got " + std::to_string(o.room));
  require(o.memory > 0 && o.memory <= 1 << 20,
          fmt::format("--memory: expected more than 0 and at most 1048576 GiB, got {}", o.memory));
  require(o.ahead.fade > 0,
          "--fade: expected more than 0 positions, got " + std::to_string(o.ahead.fade));
  require(std::filesystem::is_directory(o.model) || std::filesystem::is_regular_file(o.model),
          "--model: expected a folder or a GGUF file, got '" + o.model.string() + "'");
  require(!o.files.empty() || std::filesystem::is_regular_file(o.text),
          "--text: expected a file, got '" + o.text.string() + "'");
  const auto has = [](const std::string& text, const char* field) {
    return text.find(field) != std::string::npos;
  };
  require(has(o.needle, "{key}") && has(o.needle, "{value}"),
          "--needle: expected a text with {key} and {value}, got '" + o.needle + "'");
  require(has(o.question, "{key}"),
          "--question: expected a text with {key}, got '" + o.question + "'");
  return o;
}

}  // namespace evaluate
