// A long stream through every policy that decodes: does anything grow, break or drift?
//
//     soak [--tokens 1000000] [--slots 64,512] [--policy NAME]...
//
// The stream has a topic that drifts and is forgotten in some 500 tokens; attention is sharp
// (logits of 16 on the topic), so that all that matters was said lately: what is older than the
// window has about a hundredth of the mass, even after a million tokens. What a policy gives is
// held, every `tokens / 1000` tokens, against the attention over the first 4 and the last 4096
// tokens. Ends with 1 if a number is not finite, memory grows, or the error of the last tenth is
// more than 1.5 times (and 0.05 more than) that of the first.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kvfold/any_policy.hpp"
#include "kvfold/cache.hpp"
#include "kvfold/compress.hpp"

namespace {

using kvfold::index_t;

constexpr index_t dim = 16, group = 2, sinks = 4, window = 4096;

/// Tokens of a text whose topic drifts, the same for every policy.
class stream {
 public:
  std::vector<float> q = std::vector<float>(group * dim), k = std::vector<float>(dim), v = k;

  void next() {
    for (float& z : topic_) {
      z = 0.998F * z + 0.0632F * normal_(bits_);  // of variance 1, forgotten in 500 tokens
    }
    for (std::size_t i = 0; i < topic_.size(); ++i) {
      k[i] = topic_[i] + 0.5F * normal_(bits_);
      v[i] = topic_[(i + 5) % topic_.size()] + 0.3F * normal_(bits_);
      for (std::size_t g = 0; g < group; ++g) {
        q[g * dim + i] = 1.5F * topic_[i] + 0.5F * normal_(bits_);
      }
    }
  }

 private:
  std::mt19937 bits_{20261120};
  std::normal_distribution<float> normal_;
  std::vector<float> topic_ = std::vector<float>(dim);
};

/// The first tokens and the last `window`: the oldest of them makes room for the newest.
class windowed {
 public:
  windowed() : kv_({.heads = 1, .group = group, .dim = dim, .capacity = sinks + window}) {}

  void push(const stream& x) {
    const auto head = kv_.head(0);
    if (head.length() < head.capacity()) {
      head.push(x.k.data(), x.v.data());
      return;
    }
    std::copy_n(x.k.data(), dim, head.key(oldest_).data);
    std::copy_n(x.v.data(), dim, head.value(oldest_).data);
    oldest_ = oldest_ + 1 == head.capacity() ? sinks : oldest_ + 1;
  }
  void attend(const float* q, float* out) { kvfold::attend(kv_.head(0), q, out); }

 private:
  kvfold::cache<float> kv_;
  index_t oldest_ = sinks;
};

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

bool all_finite(const kvfold::head_view<float>& head, const kvfold::head_state& state) {
  bool finite = true;
  for (index_t s = 0; s < head.length(); ++s) {
    finite = finite && std::isfinite(head.log_mass(s));
    for (index_t i = 0; i < dim; ++i) {
      finite = finite && std::isfinite(head.key(s)[i]) && std::isfinite(head.value(s)[i]);
    }
  }
  for (index_t c = 0; c < state.columns(); ++c) {
    for (const float x : state.column(c)) {
      finite = finite && std::isfinite(x);
    }
  }
  return finite;
}

/// One policy's row of the table; false: something is wrong.
bool soak(const kvfold::any_policy& policy, index_t slots, int tokens) {
  const kvfold::budget budget = budget_within(policy, slots);
  kvfold::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = slots + 1}};
  kvfold::state state = make_state(policy, kv);
  const auto head = kv.head(0);
  stream x;
  windowed truth;
  std::vector<float> out(group * dim), expected = out;
  const int every = std::max(tokens / 1000, 1);
  double first = 0, last = 0, worst = 0, early_kib = 0;
  int firsts = 0, lasts = 0;
  bool finite = true;
  std::chrono::duration<double> spent{0};
  for (int t = 0; t < tokens; ++t) {
    x.next();
    truth.push(x);
    const auto begin = std::chrono::steady_clock::now();
    step(policy, head, state[0], state.workspace(), x.q.data(), x.k.data(), x.v.data(), budget,
         out.data());
    spent += std::chrono::steady_clock::now() - begin;
    if (t % every == every - 1) {
      truth.attend(x.q.data(), expected.data());
      const double error = off(out, expected);
      finite = finite && std::isfinite(error) && all_finite(head, state[0]);
      worst = std::max(worst, error);
      if (t < tokens / 10) {
        first += error, ++firsts;
      } else if (t >= tokens - tokens / 10) {
        last += error, ++lasts;
      }
    }
    if (t == tokens / 10) {
      early_kib = resident_kib();
    }
  }
  const double grown = resident_kib() - early_kib;
  first /= firsts, last /= lasts;
  const bool good = finite && grown <= 64 && (last <= 1.5 * first || last <= first + 0.05) &&
                    head.length() <= slots && head.seen() == tokens;
  std::printf("| %-18s | %5d | %8.0f | %6.0f | %.3f | %.3f | %.3f | %s |\n",
              std::string(policy.name()).c_str(), slots, tokens / spent.count(), grown, first, last,
              worst,
              good     ? "yes"
              : finite ? "NO"
                       : "NOT FINITE");
  std::fflush(stdout);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  int tokens = 1'000'000;
  std::string slots = "64,512";
  std::vector<std::string> wanted;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--tokens") {
      tokens = std::atoi(argv[i + 1]);
    } else if (name == "--slots") {
      slots = argv[i + 1];
    } else {
      wanted.emplace_back(argv[i + 1]);
    }
  }
  std::puts(
      "| policy | slots | tokens/s | grown, KiB | error, first tenth | last tenth | worst | good "
      "|");
  std::puts("|---|---|---|---|---|---|---|---|");
  bool good = true;
  std::istringstream list(slots);
  for (std::string count; std::getline(list, count, ',');) {
    for (const auto& policy : kvfold::any_policy::every()) {
      const bool asked =
          wanted.empty() || std::find(wanted.begin(), wanted.end(), policy.name()) != wanted.end();
      if (asked && policy.decodes() && policy.bounded()) {
        good = soak(policy, std::stoi(count), tokens) && good;
      }
    }
  }
  return good ? 0 : 1;
}
