// SPDX-License-Identifier: MIT
/// Picture `retention`: every token at every step, a panel for each policy.
#pragma once

#include <algorithm>  // std::min
#include <string>
#include <vector>

#include "evaluate/dataset.hpp"
#include "evaluate/gnuplot.hpp"

namespace evaluate {

inline constexpr index_t retention_slots = 64, retention_steps = 384;

/// What becomes of a token.
enum class fate : char { to_come, kept, merged, evicted };

/// The tokens of each slot after `plan` is applied: rows whose anchors lie beyond the slots that
/// are left fill those that are free, in ascending order (`kvmeld::apply`).
inline std::vector<std::vector<index_t>> merged(const kvmeld::merge_plan& plan,
                                                const std::vector<std::vector<index_t>>& members) {
  std::vector<std::vector<index_t>> slots(as_size(plan.rows()));
  std::size_t hole = 0;
  for (const bool moves : {false, true}) {
    for (index_t r = 0; r < plan.rows(); ++r) {
      if ((plan.anchor(r) >= plan.rows()) == moves) {
        for (; moves && !slots[hole].empty(); ++hole) {
        }
        auto& slot = slots[moves ? hole : as_size(plan.anchor(r))];
        for (const kvmeld::merge_source& e : plan.row(r)) {
          const auto& from = members[as_size(e.source)];
          slot.insert(slot.end(), from.begin(), from.end());
        }
      }
    }
  }
  return slots;
}

/// `[steps][tokens]`: token `t` after step `s`, of the first KV head of a recorded layer decoded
/// from an empty cache at `b`.
inline std::vector<std::vector<fate>> follow(const any_policy& p,
                                             const kvmeld::attention_spec& spec,
                                             const engine::layer_record& layer, index_t steps,
                                             const budget& b) {
  kvmeld::cache kv(spec, {.capacity = b.trigger_length()});
  const auto head = kv.head(0);
  auto state = kvmeld::make_head_state(p, head);
  kvmeld::workspace work;
  std::vector<float> out(as_size(spec.group * spec.key_dim));
  std::vector<std::vector<index_t>> members;  // tokens of each slot
  std::vector<std::vector<fate>> fates;
  for (index_t t = 0; t < steps; ++t) {
    const index_t before = head.length();
    kvmeld::step(p, head, state, work, &layer.q(t, 0), &layer.k(t, 0), &layer.v(t, 0), b,
                 out.data());
    members.push_back({t});
    if (head.length() <= before) {
      members = merged(work.plan, members);
    }

    auto& now = fates.emplace_back(as_size(steps), fate::to_come);
    std::fill_n(now.begin(), t + 1, fate::evicted);
    for (const auto& slot : members) {
      for (const index_t token : slot) {
        now[as_size(token)] = slot.size() == 1 ? fate::kept : fate::merged;
      }
    }
  }
  return fates;
}

/// What the colours mean, from the upper left corner at `x`, `y` of the screen; boxes of `w`, `h`.
inline std::string retention_legend(double x, double y, double w, double h) {
  std::string script;
  const auto text = [&](const char* words, double indent) {
    script += fmt::format("set label '{}' at screen {:.4f},{:.4f} left\n", words, x + indent * w,
                          y - h / 2);
    y -= 1.9 * h;
  };
  for (const auto& [fill, words] : {std::pair{"#0072b2", "kept by itself"},
                                    {"#f0b43c", "merged with others"},
                                    {"#e6e6e6", "evicted"}}) {
    script += fmt::format(
        "set object rectangle from screen {:.4f},{:.4f} to screen {:.4f},{:.4f} "
        "fillcolor '{}' fillstyle solid noborder\n",
        x, y - h, x + w, y, fill);
    text(words, 1.6);
  }
  y -= h;
  text(fmt::format("{} slots, a row a token,", retention_slots).c_str(), 0);
  text("one head, middle layer", 0);
  return script;
}

/// Of the middle layer's first KV head; empty: nothing to show.
inline std::string retention_picture(const plan& todo, const engine::config& shape,
                                     const dataset& m) {
  struct panel {
    std::string name;
    any_policy policy;
  };
  std::vector<panel> panels;
  for (const named_policy& p : todo.policies) {
    const bool own = p.budgets == budget_allocation::uniform || p.name.find('+') == p.name.npos;
    if (own && kvmeld::declared(p.policy).evicts() &&
        kvmeld::declared(p.policy).supports_decode() && p.storage == storage::f32) {
      const auto [policy, refusal] = detail::holding(p, retention_slots, 0, shape.dim);
      if (refusal.empty()) {
        panels.push_back({p.name, policy});
      }
    }
  }
  const index_t steps = std::min(retention_steps, todo.longest_stream);
  if (panels.empty() || m.streams.empty() || steps <= retention_slots) {
    return {};
  }
  const auto full = shape.full_layers();
  const index_t middle = full[full.size() / 2];
  const auto& layer = m.streams.front().layers[as_size(middle)];

  // As many panels abreast as leave the fewest places empty; the legend takes one place.
  const std::size_t places = panels.size() + 1;
  const auto empty = [&](std::size_t abreast) { return (abreast - places % abreast) % abreast; };
  const std::size_t abreast = places <= 9 && empty(3) <= empty(4) ? 3 : 4,
                    lines = (places - 1) / abreast + 1;
  constexpr double width = 800, left = 46, top = 66, between = 34;
  const double side =
      (width - left - 14 - 16 * static_cast<double>(abreast - 1)) / static_cast<double>(abreast);
  const double height = top + static_cast<double>(lines) * (side + between) + 14;
  const auto corner = [&](std::size_t place) {  // upper left, in pixels
    return std::pair(left + static_cast<double>(place % abreast) * (side + 16),
                     top + static_cast<double>(place / abreast) * (side + between));
  };

  std::string script = picture("retention", static_cast<int>(width), static_cast<int>(height),
                               "What becomes of every token while decoding");
  script += fmt::format(
      "set palette defined (0 '#ffffff', 1 '#0072b2', 2 '#f0b43c', 3 '#e6e6e6') maxcolors 4\n"
      "set cbrange [-0.5:3.5]\n"
      "unset colorbox\n"
      "set border 3\n"
      "set tics scale 0.4 font ',11'\n"
      "set xrange [0:{0}]\n"
      "set yrange [0:{0}]\n"
      "set xtics 0,{1},{2} offset 0,0.4\n"
      "set ytics {1} offset 0.6\n",
      steps, steps / 3, 0.9 * steps);
  constexpr std::size_t stride = 2;  // steps drawn: a panel has no more pixels
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const auto fates = follow(panels[i].policy, shape.attention(middle, 1), layer, steps,
                              kvmeld::budget_within(panels[i].policy, retention_slots));
    script += fmt::format("$fates{} << end\n", i);
    for (std::size_t t = 0; t < fates.size(); ++t) {
      for (std::size_t s = 0; s < fates.size(); s += stride) {
        script += static_cast<char>('0' + static_cast<int>(fates[s][t]));
        script += ' ';
      }
      script.back() = '\n';
    }
    script += "end\n";
    if (i + 1 == panels.size()) {  // objects are drawn with every plot: with the last one only
      const auto [from, upper] = corner(panels.size());
      script += retention_legend((from + 24) / width, 1 - (upper + 0.2 * side) / height, 14 / width,
                                 14 / height);
    }
    const auto [x, y] = corner(i);
    const bool lowest = i + abreast >= panels.size();
    script += margins(x / width, (x + side) / width, 1 - y / height, 1 - (y + side) / height);
    script += fmt::format(
        "set title '{}' noenhanced offset 0,-0.8\n"
        "set format x '{}'\n"
        "set format y '{}'\n"
        "{}\n"
        "{}\n"
        "plot $fates{} matrix using ($1 * {} + 1):($2 + 0.5):3 with image\n",
        panels[i].name, lowest ? "%g" : "", i % abreast == 0 ? "%g" : "",
        lowest ? "set xlabel 'step' offset 0,1" : "unset xlabel",
        i % abreast == 0 ? "set ylabel 'token' offset 1.8" : "unset ylabel", i, stride);
  }
  return script + "unset multiplot\n";
}

}  // namespace evaluate
