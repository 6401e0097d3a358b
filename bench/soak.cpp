// SPDX-License-Identifier: MIT
// A long stream through every policy that decodes: does anything grow, break or drift?
//
//     soak [--tokens 1000000] [--slots 64,512] [--dim 16] [--sharpness 1.5] [--policy NAME]...
//
// The stream has a topic that drifts (topic.hpp). By default attention is soft: in the end what is
// older than the window has most of the mass, a little each. `--dim 64 --sharpness 2` is sharp: all
// that matters was said lately. What a policy gives is held, every `tokens / 1000` tokens, against
// the attention over the first 4 and the last 4096 tokens, and against the attention over all
// tokens; log mass held is the log-sum-exp of the policy's slots less that of all tokens. Ends with
// 1 if a number is not finite, memory grows, or the error to the window is in the last tenth more
// than 1.5 times (and 0.05 more than) that of the first.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/peers.hpp"
#include "spec.hpp"
#include "topic.hpp"

namespace {

using kvmeld::index_t;

constexpr index_t group = 2, sinks = 4, window = 4096;

struct setting {
  int tokens = 1'000'000;
  index_t dim = 16;
  float sharpness = 1.5F;

  int every() const { return std::max(tokens / 1000, 1); }
  bool early(int t) const { return t < tokens / 10; }
  bool late(int t) const { return t >= tokens - tokens / 10; }
  /// The same for every policy.
  bench::topic_stream stream() const { return {dim, group, sharpness}; }
};

/// The first tokens and the last `window`: the oldest of them makes room for the newest.
class windowed {
 public:
  explicit windowed(index_t dim) : kv_(bench::spec(1, group, dim), {.capacity = sinks + window}) {}

  void push(const bench::topic_stream& x) {
    const auto head = kv_.head(0);
    if (head.length() < head.capacity()) {
      head.push(x.k.data(), x.v.data());
      return;
    }
    kvmeld::detail::store_row(x.k.data(), head.key(oldest_), head.dim());
    kvmeld::detail::store_row(x.v.data(), head.value(oldest_), head.dim());
    oldest_ = oldest_ + 1 == head.capacity() ? sinks : oldest_ + 1;
  }
  void attend(const std::vector<float>& q, std::vector<float>& out, std::vector<float>& lse) {
    kvmeld::attend(kv_.head(0), q.data(), out.data(), {}, lse);
  }

 private:
  kvmeld::cache kv_;
  index_t oldest_ = sinks;
};

/// What is right at a place of the stream, `[group, dim]`; log-sum-exp `[group]` over all tokens.
struct truth {
  std::vector<float> of_window, of_all, log_sum_exp;
};

/// At every `by.every()`-th token. Prints what share of the attention is older than the window.
std::vector<truth> truths(const setting& by) {
  kvmeld::cache all(bench::spec(1, group, by.dim), {.capacity = by.tokens});
  windowed recent(by.dim);
  auto x = by.stream();
  std::vector<truth> found;
  double first = 0, last = 0;
  int firsts = 0, lasts = 0;
  for (int t = 0; t < by.tokens; ++t) {
    x.next();
    recent.push(x);
    all.head(0).push(x.k.data(), x.v.data());
    if (t % by.every() != by.every() - 1) {
      continue;
    }
    truth now{x.q, x.q, std::vector<float>(group)};
    std::vector<float> log_sum_exp(group);
    recent.attend(x.q, now.of_window, log_sum_exp);
    kvmeld::attend(all.head(0), x.q.data(), now.of_all.data(), {}, now.log_sum_exp);
    for (std::size_t g = 0; g < group; ++g) {
      const double older = 1 - std::exp(static_cast<double>(log_sum_exp[g] - now.log_sum_exp[g]));
      first += by.early(t) ? older : 0, firsts += by.early(t) ? 1 : 0;
      last += by.late(t) ? older : 0, lasts += by.late(t) ? 1 : 0;
    }
    found.push_back(std::move(now));
  }
  std::printf(
      "%d tokens, dim %d, sharpness %g: older than the window is %.3f of the attention in "
      "the first tenth, %.3f in the last\n\n",
      by.tokens, by.dim, static_cast<double>(by.sharpness), first / firsts, last / lasts);
  return found;
}

/// Of the program's own memory: pages of files, such as its code, come when they are first used.
double resident_kib() {
  std::ifstream statm("/proc/self/statm");
  double size = 0, resident = 0, of_files = 0;
  statm >> size >> resident >> of_files;
  return (resident - of_files) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1024;
}

double off(const std::vector<float>& a, const std::vector<float>& truth) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - static_cast<double>(truth[i]), 2);
    size += std::pow(static_cast<double>(truth[i]), 2);
  }
  return std::sqrt(error / size);
}

bool all_finite(const kvmeld::head_ref& head, const kvmeld::head_state& state) {
  bool finite = true;
  for (index_t s = 0; s < head.length(); ++s) {
    finite = finite && std::isfinite(head.log_mass(s));
    for (index_t i = 0; i < head.dim(); ++i) {
      finite = finite && std::isfinite(head.key(s)[i]) && std::isfinite(head.value(s)[i]);
    }
  }
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    for (const float x : state.column(c)) {
      finite = finite && std::isfinite(x);
    }
  }
  return finite;
}

/// Errors against one truth, averaged over the first and the last tenth.
struct drift {
  double first = 0, last = 0, worst = 0;
  int firsts = 0, lasts = 0;

  void add(const setting& by, int t, double error) {
    worst = std::max(worst, error);
    first += by.early(t) ? error : 0, firsts += by.early(t) ? 1 : 0;
    last += by.late(t) ? error : 0, lasts += by.late(t) ? 1 : 0;
  }
  void end() { first /= firsts, last /= lasts; }
  bool bounded() const { return last <= 1.5 * first || last <= first + 0.05; }
};

/// One policy's row of the table; false: something is wrong.
bool soak(const kvmeld::any_policy_or_peer& policy, index_t slots, const setting& by,
          const std::vector<truth>& right) {
  kvmeld::cache kv(bench::spec(1, group, by.dim), {.capacity = slots + 1});
  kvmeld::compressor meld(kv, policy, budget_within(policy, slots));
  const auto head = kv.head(0);
  auto x = by.stream();
  std::vector<float> out(x.q.size());
  double early_kib = 0;
  drift to_window, to_all, mass;
  std::vector<float> again(out.size()), log_sum_exp(group);
  bool finite = true;
  std::chrono::duration<double> spent{0};
  auto expected = right.begin();
  for (int t = 0; t < by.tokens; ++t) {
    x.next();
    const auto begin = std::chrono::steady_clock::now();
    meld.step(kv.heads(0, 0), {x.q, x.k, x.v}, out);
    spent += std::chrono::steady_clock::now() - begin;
    if (t % by.every() == by.every() - 1) {
      to_window.add(by, t, off(out, expected->of_window));
      to_all.add(by, t, off(out, expected->of_all));
      kvmeld::declared(policy).attend(head, meld.state(0), x.q.data(), again.data(), {},
                                      log_sum_exp);
      for (std::size_t g = 0; g < group; ++g) {
        mass.add(by, t, static_cast<double>(log_sum_exp[g] - expected->log_sum_exp[g]));
      }
      finite = finite && std::isfinite(to_window.worst) && all_finite(head, meld.state(0));
      ++expected;
    }
    if (t == by.tokens / 10) {
      early_kib = resident_kib();
    }
  }
  const double grown = resident_kib() - early_kib;
  to_window.end(), to_all.end(), mass.end();
  const bool good = finite && grown <= 64 && to_window.bounded() && head.length() <= slots &&
                    head.next_position() == by.tokens;
  std::printf(
      "| %-18s | %5d | %8.0f | %6.0f | %.3f | %.3f | %.3f | %.3f | %.3f | %+.2f | %+.2f | %s |\n",
      std::string(policy.name()).c_str(), slots, by.tokens / spent.count(), grown, to_window.first,
      to_window.last, to_window.worst, to_all.first, to_all.last, mass.first, mass.last,
      good     ? "yes"
      : finite ? "NO"
               : "NOT FINITE");
  std::fflush(stdout);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  setting by;
  std::string slots = "64,512";
  std::vector<std::string> wanted;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--tokens") {
      by.tokens = std::atoi(argv[i + 1]);
    } else if (name == "--dim") {
      by.dim = std::atoi(argv[i + 1]);
    } else if (name == "--sharpness") {
      by.sharpness = std::strtof(argv[i + 1], nullptr);
    } else if (name == "--slots") {
      slots = argv[i + 1];
    } else {
      wanted.emplace_back(argv[i + 1]);
    }
  }
  const auto right = truths(by);
  std::puts(
      "| policy | slots | tokens/s | grown, KiB | error to the window, first tenth | last tenth | "
      "worst | error to all, first tenth | last tenth | log mass held, first tenth | last tenth | "
      "good |");
  std::puts("|---|---|---|---|---|---|---|---|---|---|---|---|");
  bool good = true;
  std::istringstream list(slots);
  for (std::string count; std::getline(list, count, ',');) {
    for (const auto& policy : kvmeld::any_policy_or_peer::every()) {
      const bool chosen =
          wanted.empty() || std::find(wanted.begin(), wanted.end(), policy.name()) != wanted.end();
      if (chosen && kvmeld::declared(policy).supports_decode() &&
          kvmeld::declared(policy).evicts()) {
        good = soak(policy, std::stoi(count), by, right) && good;
      }
    }
  }
  return good ? 0 : 1;
}
