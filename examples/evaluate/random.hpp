// SPDX-License-Identifier: MIT
/// Random draws that are the same everywhere, and for any order of threads.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <utility>  // std::swap
#include <vector>

#include "engine/matrix.hpp"

namespace evaluate {

using engine::as_size;
using engine::count_of;
using engine::index_t;

class random_source {
 public:
  /// One of its own for each thing drawn: `what` names the kind, `i` the piece.
  random_source(std::uint64_t seed, std::uint64_t what, index_t i)
      : bits_((seed * 0x9E3779B97F4A7C15U + what) * 0xBF58476D1CE4E5B9U +
              static_cast<std::uint64_t>(i)) {}

  /// 0 to `n` − 1.
  index_t below(index_t n) { return static_cast<index_t>(bits_() % static_cast<std::uint64_t>(n)); }
  /// 0 to 1, without 1.
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }

  /// A capitalised word of consonants and vowels in turn, such as "Mirola".
  std::string name() {
    static constexpr std::string_view consonants = "bcdfghjklmnprstvz", vowels = "aeiou";
    const auto one_of = [&](std::string_view letters) {
      return letters[as_size(below(count_of(letters)))];
    };
    std::string word;
    for (index_t syllables = 2 + below(3); syllables > 0; --syllables) {
      word += one_of(consonants);
      word += one_of(vowels);
    }
    if (uniform() < 0.3) {
      word += one_of(consonants);
    }
    word[0] = static_cast<char>(word[0] - 'a' + 'A');
    return word;
  }
  std::string digits(index_t n) {
    std::string number;
    for (index_t i = 0; i < n; ++i) {
      number += static_cast<char>('0' + below(10));
    }
    return number;
  }
  template <class T>
  void shuffle(std::vector<T>& list) {
    for (std::size_t n = list.size(); n > 1; --n) {
      std::swap(list[n - 1], list[as_size(below(static_cast<index_t>(n)))]);
    }
  }

 private:
  std::mt19937_64 bits_;
};

}  // namespace evaluate
