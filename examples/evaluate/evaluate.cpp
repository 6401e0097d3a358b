// SPDX-License-Identifier: MIT
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "engine/error.hpp"
#include "engine/model.hpp"
#include "evaluate/ask_file.hpp"
#include "evaluate/bytes_picture.hpp"
#include "evaluate/calibration.hpp"
#include "evaluate/error_picture.hpp"
#include "evaluate/heads_picture.hpp"
#include "evaluate/measure.hpp"
#include "evaluate/needle_picture.hpp"
#include "evaluate/options.hpp"
#include "evaluate/prepare.hpp"
#include "evaluate/profile.hpp"
#include "evaluate/retention_picture.hpp"
#include "evaluate/surrogate.hpp"
#include "evaluate/table.hpp"

namespace evaluate {

namespace {

/// The file, with its header written.
std::ofstream open_csv(const std::filesystem::path& file, void (&write_header)(std::ostream&)) {
  std::error_code ignored;  // the file will not open, then
  std::filesystem::create_directories(std::filesystem::absolute(file).parent_path(), ignored);
  std::ofstream csv(file);
  detail::require(csv.is_open(), "--csv: expected a file to write, got '" + file.string() + "'");
  write_header(csv);
  return csv;
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  detail::require(!error, "--plots: expected a folder to write to, got '" + folder.string() +
                              "': " + error.message());
}

/// A folder's name, or a file's without its ending.
std::string model_name(const std::filesystem::path& model) {
  return std::filesystem::is_directory(model) ? (model / "").parent_path().filename().string()
                                              : model.stem().string();
}

/// What the numbers are of.
std::string subject(const options& o, const plan& todo) {
  const auto counted = [](index_t n, const char* what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
  };
  return fmt::format("{}: {} of {} tokens{}{}\n\n", model_name(o.model),
                     counted(todo.prompts, "prompt"), o.prompt,
                     o.tasks.needle ? ", " + counted(o.cases, "needle case") : "",
                     todo.streams > 0 ? fmt::format(", {} of {} times the budget",
                                                    counted(todo.streams, "stream"), stream_budgets)
                                      : "");
}

/// Draws what there is to show, and says where, or why not.
void draw_pictures(const options& o, const plan& todo, const engine::config& shape,
                   const dataset& m, const std::vector<outcome>& outcomes, std::ostream& out) {
  std::vector<row> rows;
  for (const outcome& x : outcomes) {
    rows.push_back(x.result);
  }
  const palette colours(rows);
  for (const auto& [name, script] :
       {std::pair<std::string, std::string>{"error", error_picture(rows, o.prompt, colours)},
        {"bytes", bytes_picture(rows, colours)},
        {"needle", needle_picture(outcomes)},
        {"stream", stream_picture(outcomes, colours)},
        {"heads", heads_picture(mean_head_stats(m.looking), shape.heads)},
        {"retention", retention_picture(todo, shape, m)}}) {
    if (script.empty()) {
      continue;
    }
    switch (draw(o.plots, name, script)) {
      case drawing::done:
        out << fmt::format("{:<9}  {}\n", name, (o.plots / (name + ".svg")).string());
        break;
      case drawing::failed:
        out << fmt::format("{:<9}  gnuplot could not draw {}\n", name,
                           (o.plots / "gnuplot" / (name + ".gp")).string());
        break;
      case drawing::no_gnuplot:
        out << "no pictures: gnuplot is not installed (Debian: apt install gnuplot-nox)\n";
        return;
    }
  }
}

}  // namespace

int run(options o, std::ostream& out, std::ostream& err) {
  interrupted = false;
  const auto loaded = engine::model::load(o.model);
  const engine::decoder& model = loaded.network;
  const engine::tokenizer& tokens = loaded.tokens;
  load_surrogate(o.policies, o.surrogate, model.shape());
  if (!o.files.empty()) {
    const auto open = [&] { return open_csv(o.csv, write_asked_header); };
    return ask_files(o, model_name(o.model), loaded, open, out, err);
  }
  const auto text = tokens.encode(engine::read_file(o.text));
  plan todo = make_plan(o, count_of(text), model.shape());
  const auto words = replay_words_of(tokens, chat_turn_of(o, tokens));
  for (named_policy& p : todo.policies) {
    p.words = words;
  }
  const index_t kv_heads = model.shape().full_heads();
  const bool has_profile = load_profile(todo, o.profile, kv_heads, o.prompt),
             makes_profile = !o.profile.empty() && !has_profile;
  if (makes_profile) {
    profiled(todo);
  }
  const bool calibrates =
      !load_calibration(todo, o.calibrate, model.shape()) && !o.calibrate.empty();
  const std::size_t measured = calibrates ? calibrating(todo, o.prompts, o.calibrate) : 0;
  const auto needles = draw_needles(o, tokens, text);
  const auto tasks = make_tasks(o, todo, model, tokens, text, todo.notes);
  make_folder(o.plots);
  std::ofstream csv = open_csv(o.csv, write_csv_header), tasks_csv;
  if (o.tasks.second_table()) {
    tasks_csv = open_csv(tasks_file(o.csv), write_tasks_header);
  }

  const auto say = [&out](std::span<const std::string> notes) {
    for (const std::string& note : notes) {
      out << "note: " << note << '\n';
    }
  };
  say(todo.notes);
  const std::size_t said = todo.notes.size();

  progress bar(err, o.terminal);
  double work = weight::of_all(o, todo);
  for (const task& t : tasks) {
    work += weight::of_task(o, todo, t);
  }
  bar.expect(work);
  const workers on(o.threads, bar);
  dataset m;
  std::vector<outcome> outcomes;
  std::vector<task_outcome> tasks_done;
  try {
    prepare(m, o, todo, model, text, tokens.begin(), on, bar);
    if (makes_profile) {
      save_profile(profiled(todo), model, m.prompts, o.profile, on);
    }
    if (calibrates) {
      save_calibration(measured, model.shape(), m.prompts, o.calibrate);
    }
    const auto asked = read_cases(m, o, todo, model, tokens, needles, on, bar);
    auto asked_of_entry = asked.begin();
    const table shown(o.tasks, todo.policies);
    for (const group& g : todo.groups) {
      std::vector<table_line> lines;
      const auto print = [&] {
        bar.clear();
        out << (&g == &todo.groups.front() ? subject(o, todo) + shown.heading() : "")
            << shown.group(g.title, lines) << std::flush;
      };
      try {
        std::vector<mean_prediction> predicted(g.entries.size());
        if (o.tasks.nll) {
          bar.stage(g.title + ": nll", weight::of_nll(todo, g));
          predicted = predict(g.entries, o, model, m.prompts, on);
        }
        for (std::size_t i = 0; i < g.entries.size(); ++i) {
          const entry& e = g.entries[i];
          const needle_recall& before = *asked_of_entry++;
          row r{.policy = e.name, .budget = e.given, .slots = e.chosen.limit.slots};
          if (e.refusal.empty()) {
            outcomes.push_back(
                measure_row(e, o, todo, model, tokens, m, predicted[i], before, on, bar));
            r = outcomes.back().result;
            write_csv(csv, r);
          }
          lines.push_back({r, e.refusal});
        }
      } catch (const interruption&) {
        if (!lines.empty()) {
          print();
        }
        throw;
      }
      print();
    }
    for (const task& t : tasks) {
      if (const auto done = run_task(t, o, todo, on, bar, todo.notes)) {
        write_tasks_csv(tasks_csv, todo, *done);
        tasks_done.push_back(*done);
      }
    }
  } catch (const interruption&) {
    bar.clear();
    out << "\ninterrupted: " << outcomes.size() << " rows were done\n";
  }
  bar.clear();
  out << tasks_table(todo, tasks_done) << "\n* best of its budget\n";
  say(std::span(todo.notes).subspan(said));
  out << fmt::format("{:<9}  {}\n", "table", o.csv.string());
  if (tasks_csv.is_open()) {
    out << fmt::format("{:<9}  {}\n", "tasks", tasks_file(o.csv).string());
  }
  if (makes_profile) {
    out << fmt::format("{:<9}  {}\n", "profile", o.profile.string());
  }
  if (calibrates && std::filesystem::exists(o.calibrate)) {  // not interrupted before
    out << fmt::format("{:<9}  {}\n", "calibration", o.calibrate.string());
  }
  draw_pictures(o, todo, model.shape(), m, outcomes, out);
  return interrupted ? 130 : 0;
}

}  // namespace evaluate
