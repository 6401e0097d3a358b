// SPDX-License-Identifier: MIT
#include "evaluate/ask_file.hpp"

#include <algorithm>  // std::clamp, max, min, std::ranges::count_if, minmax_element, transform
#include <limits>     // std::numeric_limits
#include <map>
#include <span>

#include "evaluate/calibration.hpp"
#include "evaluate/needle.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/profile.hpp"
#include "evaluate/prompt_file.hpp"
#include "evaluate/table.hpp"

namespace evaluate {

namespace {

/// One prompt as tokens.
struct ask {
  asked_prompt from;
  std::vector<int> context, question, answer = {};
  index_t written = 16;  ///< tokens to come after the question
};

/// Those of a file by one metric, and each row's score.
struct ask_column {
  std::string file;
  metric by;
  std::vector<ask> asks = {};
  std::vector<estimate> scores = {};

  double unit() const { return by == metric::nats ? 1000 : 100; }  ///< of the last digit shown
};

ask tokens_of(asked_prompt p, const engine::tokenizer& tokens, const engine::chat_turn& turn) {
  ask a{.from = std::move(p), .context = turn.before, .question = {}};
  const auto text =
      turn.before.empty() ? tokens.encode(a.from.context) : tokens.encode_fragment(a.from.context);
  a.context.insert(a.context.end(), text.begin(), text.end());
  a.question = encode_question(a.from.question, tokens, turn);
  for (const std::string& answer : a.from.answers) {
    a.answer = tokens.encode_fragment(' ' + answer);
    a.written += 2 * count_of(a.answer);
  }
  a.written = a.from.by == metric::nats ? count_of(a.answer) : a.written;
  return a;
}

/// For a context of so many tokens; the full cache is one of the rows.
plan plan_for(options o, const engine::config& shape, const replay_words& words, index_t tokens) {
  o.prompt = tokens, o.tasks = {};
  if (std::ranges::all_of(o.policies,
                          [](const auto& n) { return kvmeld::declared(n.policy).evicts(); })) {
    o.policies.insert(o.policies.begin(), {std::string(full_cache().name()), full_cache()});
  }
  plan p = make_plan(o, std::numeric_limits<index_t>::max(), shape);
  load_profile(p, o.profile, shape.full_heads(), tokens);
  detail::require(load_calibration(p, o.calibrate, shape) || o.calibrate.empty(),
                  "--calibrate: for prompts of others: expected an existing file, got '" +
                      o.calibrate.string() + "'");
  for (named_policy& n : p.policies) {
    n.words = words;
  }
  return p;
}

/// A score for each contender. All decode side by side, so that weights are read once for all.
std::vector<double> scores_after(const prompt& read, const ask& a, const engine::model& loaded,
                                 std::span<const contender> contenders) {
  const index_t asked = count_of(a.question), behind = asked + a.written;
  std::vector<compressed_decoder> lines;
  std::vector<compressed_decoder*> decoders;
  lines.reserve(contenders.size()), decoders.reserve(contenders.size());
  for (const contender& c : contenders) {
    decoders.push_back(&lines.emplace_back(loaded.network, c, read));
  }
  const bool is_given = a.from.by == metric::nats;
  std::vector<std::vector<int>> texts(lines.size());
  std::vector<double> scores(lines.size());
  engine::decoder::scratch work;
  row_major_matrix logits;
  for (index_t t = 0; t < behind && !interrupted; ++t) {
    std::vector<int> next(lines.size(), t < asked ? a.question[as_size(t)] : 0);
    for (std::size_t i = 0; t >= asked && i < lines.size(); ++i) {
      const auto row = logits.row(static_cast<Eigen::Index>(i));
      next[i] = is_given ? a.answer[as_size(t - asked)] : likeliest(row);
      scores[i] += is_given ? surprise(row, next[i]) / a.written : 0;
      texts[i].push_back(next[i]);
    }
    if (t + 1 < behind) {
      compressed_decoder::next(decoders, next, work, logits);
    }
  }
  for (std::size_t i = 0; i < lines.size() && !is_given; ++i) {
    scores[i] = score_of(a.from, loaded.tokens.decode(texts[i]));
  }
  return scores;
}

/// The same in batches: each of the threads has its part of `--memory` for the prompt and for the
/// contenders' caches, which have room for all of it until they are compressed.
std::vector<double> scores_of(const ask& a, const engine::model& loaded, const options& o,
                              const plan& todo, std::span<const contender> contenders) {
  const engine::config& shape = loaded.network.shape();
  const index_t capacity =
      std::max(count_of(a.context), todo.most_slots) + count_of(a.question) + a.written + 1;
  const double bytes =
      2.0 * sizeof(float) * shape.layers * shape.kv_heads * shape.dim * capacity * o.threads;
  const auto at_once = static_cast<std::size_t>(
      std::clamp(o.memory * (1 << 30) / bytes - 1, 1.0, static_cast<double>(contenders.size())));
  const prompt read = read_whole(loaded.network, todo.policies, a.context, capacity);
  std::vector<double> scores;
  while (!contenders.empty()) {
    const auto batch = contenders.first(std::min(at_once, contenders.size()));
    const auto of_batch = scores_after(read, a, loaded, batch);
    scores.insert(scores.end(), of_batch.begin(), of_batch.end());
    contenders = contenders.subspan(batch.size());
  }
  return scores;
}

/// A row's cell, marked if none of the rows `first .. last` of its budget is better.
std::string cell(const ask_column& c, std::size_t row, std::size_t first, std::size_t last) {
  const auto& [mean, error] = c.scores[row];
  const auto rank = [&](std::size_t i) {
    return (c.by == metric::nats ? 1 : -1) * std::round(c.unit() * c.scores[i].mean);
  };
  std::vector<std::optional<double>> ranks;
  for (std::size_t i = first; i < last; ++i) {
    ranks.emplace_back(rank(i));
  }
  return (c.by == metric::nats ? fmt::format("{:.3f}", mean) : fmt::format("{:.0f}", 100 * mean)) +
         (error ? fmt::format(" ±{:.0f}", c.unit() * *error) : "") + mark_least(rank(row), ranks);
}

/// Of all entries but those refused, which have no score.
std::string table_of(const plan& shown, const std::vector<ask_column>& asked, std::ostream& csv) {
  aligned layout(6, shown.policies);
  std::vector<std::string> names, measures;
  for (const ask_column& c : asked) {
    names.push_back(c.file + ' ');
    measures.push_back(std::string(name_of(c.by)) + (c.by == metric::nats ? "/token " : ", % "));
    layout.widths.push_back(std::max({names.back().size(), measures.back().size(), as_size(11)}));
  }
  std::string text = layout.line("policy", "slots", names) + layout.line("", "", measures);
  std::size_t row = 0;
  for (const group& g : shown.groups) {
    text += "\n" + g.title + "\n";
    const auto is_taken = [](const entry& e) { return e.refusal.empty(); };
    const std::size_t first = row, last = row + as_size(std::ranges::count_if(g.entries, is_taken));
    for (const entry& e : g.entries) {
      const auto slots = fmt::format("{:>6}", e.chosen.limit.slots);
      std::vector<std::string> cells;
      for (std::size_t i = 0; i < asked.size() && is_taken(e); ++i) {
        const ask_column& c = asked[i];
        const auto& [mean, error] = c.scores[row];
        cells.push_back(cell(c, row, first, last));
        csv << fmt::format("{},{},{},{},{},{},{:.6g},{}\n", csv_field(e.name), e.given,
                           e.chosen.limit.slots, csv_field(c.file), name_of(c.by), c.asks.size(),
                           mean, error ? fmt::format("{:.6g}", *error) : "");
      }
      text += layout.line(e.name, is_taken(e) ? slots : slots + "  " + e.refusal, cells);
      row += is_taken(e) ? 1 : 0;
    }
  }
  return text + "\n* best of its budget\n";
}

}  // namespace

int ask_files(const options& o, const std::string& name, const engine::model& loaded,
              const std::function<std::ofstream()>& open_csv, std::ostream& out,
              std::ostream& err) {
  const auto turn = chat_turn_of(o, loaded.tokens);
  const auto words = replay_words_of(loaded.tokens, turn);
  const engine::config& shape = loaded.network.shape();
  std::vector<ask_column> asked, done;
  std::vector<double> lengths;
  for (const auto& file : o.files) {
    std::map<metric, ask_column> by;
    for (asked_prompt& p : read_prompts(file)) {
      auto& column = by.try_emplace(p.by, ask_column{file.stem().string(), p.by}).first->second;
      column.asks.push_back(tokens_of(std::move(p), loaded.tokens, turn));
      lengths.push_back(count_of(column.asks.back().context));
    }
    for (auto& [metric, column] : by) {
      asked.push_back(std::move(column));
    }
  }
  const auto [least, most] = std::ranges::minmax_element(lengths);
  const auto mean = static_cast<index_t>(estimate_of(lengths).mean + 0.5);
  plan shown = plan_for(o, shape, words, mean);
  const plan shortest = plan_for(o, shape, words, static_cast<index_t>(*least));
  const auto rows = entries_of(shown);
  for (std::size_t e = 0; e < rows.size(); ++e) {  // what the shortest context refuses, all do
    rows[e]->refusal = entries_of(shortest)[e]->refusal;
  }
  std::ofstream csv = open_csv();
  progress bar(err, o.terminal);
  bar.expect(static_cast<double>(lengths.size()));
  const workers on(o.threads, bar);
  try {
    for (ask_column& c : asked) {
      bar.stage(c.file, static_cast<double>(c.asks.size()));
      const auto all = on.map(count_of(c.asks), [&](index_t i) {
        const ask& a = c.asks[as_size(i)];
        const plan todo = plan_for(o, shape, words, count_of(a.context));
        std::vector<contender> taken;
        for (std::size_t e = 0; e < rows.size(); ++e) {
          if (rows[e]->refusal.empty()) {
            taken.push_back(entries_of(todo)[e]->chosen);
          }
        }
        return scores_of(a, loaded, o, todo, taken);
      });
      for (std::size_t row = 0; row < all.front().size(); ++row) {
        std::vector<double> each(all.size());
        std::ranges::transform(all, each.begin(), [&](const auto& x) { return x[row]; });
        c.scores.push_back(estimate_of(each));
      }
      done.push_back(std::move(c));
    }
  } catch (const interruption&) {
    out << "\ninterrupted: " << done.size() << " columns were done\n";
  }
  bar.clear();
  out << fmt::format(
             "{}: {} prompts of {:.0f} to {:.0f} tokens, {} on average; the question after "
             "compression\n\n",
             name, lengths.size(), *least, *most, mean)
      << table_of(shown, done, csv);
  for (const std::string& note : shown.notes) {
    out << "note: " << note << '\n';
  }
  out << fmt::format("{:<9}  {}\n", "table", o.csv.string());
  return interrupted ? 130 : 0;
}

}  // namespace evaluate
