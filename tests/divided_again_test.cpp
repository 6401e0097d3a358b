// SPDX-License-Identifier: MIT
// Slots that heads share are divided again whenever decode has scored all of them.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <sstream>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "support/model.hpp"

namespace divided_again_test {

using namespace small_model;
using kvmeld::budget;
using kvmeld::fold;

constexpr index_t rescore = 5, slots = 40, heads = layers_of * kv_heads_of;

fold scoring() {
  fold p;
  p.decode.rescore = rescore;
  return p;
}

/// A token of request `r`; keys of one head stand out more, so that it is looked at more.
template <class Meld>
void step(Meld& meld, index_t r, const std::vector<std::vector<float>>& rows) {
  for (index_t l = 0; l < layers_of; ++l) {
    const auto at = static_cast<std::size_t>(3 * l);
    std::vector<float> out(static_cast<std::size_t>(kv_heads_of * group * dim));
    meld.step(model_cache::of(l, r), {rows[at], rows[at + 1], rows[at + 2]}, out);
  }
}
std::vector<std::vector<float>> token() {
  std::vector<std::vector<float>> rows;
  for (index_t l = 0; l < layers_of; ++l) {
    rows.push_back(normal(kv_heads_of * group * dim, 1.0F + 2 * static_cast<float>(l)));
    rows.push_back(normal(kv_heads_of * dim));
    rows.push_back(normal(kv_heads_of * dim));
  }
  return rows;
}

std::vector<index_t> heads_of(index_t r) {
  std::vector<index_t> all;
  for (index_t l = 0; l < layers_of; ++l) {
    for (index_t i = 0; i < kv_heads_of; ++i) {
      all.push_back(model_cache::of(l, r).first + i);
    }
  }
  return all;
}

/// The rule by sorting: `total` slots, of which every head has `own`; the others go to the highest
/// scores of all heads, of slots that are neither among the first four tokens nor among the latest
/// eight. Equal scores do not occur.
template <class Meld>
std::vector<index_t> divided(const Meld& meld, model_cache& kv, index_t r, index_t total,
                             index_t own) {
  struct candidate {
    float score;
    std::size_t head;
  };
  std::vector<candidate> all;
  std::vector<index_t> parts(heads, own);
  const std::vector<index_t> of = heads_of(r);
  for (std::size_t i = 0; i < of.size(); ++i) {
    const auto head = kv.head(of[i]);
    const index_t pinned = meld.pinned(of[i]);
    for (index_t s = pinned; s < head.length(); ++s) {
      if (head.position(s) >= 4 && head.position(s) < head.next_position() - 8) {
        all.push_back(
            {meld.state(of[i]).column(fold::prompt_score)[static_cast<std::size_t>(s - pinned)],
             i});
      }
    }
  }
  std::ranges::sort(all, [](const auto& a, const auto& b) { return a.score > b.score; });
  all.resize(static_cast<std::size_t>(total - heads * own));
  for (const candidate& c : all) {
    ++parts[c.head];
  }
  return parts;
}

template <class Meld>
std::vector<index_t> parts_of(const Meld& meld, index_t r) {
  std::vector<index_t> parts;
  for (const index_t h : heads_of(r)) {
    parts.push_back(meld.limit(h).trigger_length() - 1);
  }
  return parts;
}

TEST_CASE("shared slots are divided again by all scores of decode, every `rescore` tokens") {
  const index_t prompt = GENERATE(0, 90), slack = GENERATE(0, 7);
  CAPTURE(prompt, slack);
  model_cache kv(300);
  kvmeld::compressor meld(kv, scoring(), budget::shared(slots, slack));
  const index_t own = meld.policy_of(0).slots_beside_pins();
  if (prompt > 0) {
    read(meld, kv, prompt_rows(prompt), 0, prompt), meld.end_prompt(0);
  }
  std::vector<index_t> wanted = parts_of(meld, 0);
  int changed = 0;
  bool uneven = false;
  for (index_t t = 1; t <= 4 * slots; ++t) {
    step(meld, 0, token());
    const std::vector<index_t> parts = parts_of(meld, 0);
    // Of the longest head: as many slots as it has pins, neither first nor latest, and one.
    index_t longest = 0;
    for (const index_t h : heads_of(0)) {
      longest = std::max(longest, kv.head(h).length());
    }
    if (t % rescore == 0 && longest - 12 > slots - own) {
      const std::vector<index_t> before = wanted;
      wanted = divided(meld, kv, 0, heads * slots, own);
      std::ranges::transform(wanted, wanted.begin(), [&](index_t n) { return n + slack; });
      changed += wanted != before ? 1 : 0;
    }
    REQUIRE(parts == wanted);
    REQUIRE(std::accumulate(parts.begin(), parts.end(), 0) == heads * (slots + slack));
    uneven = uneven || std::ranges::max(parts) > std::ranges::min(parts) + slots / 2;
  }
  CHECK(changed > 10);
  CHECK(uneven);
  // A head holds its part once the next step has been made, and no more.
  step(meld, 0, token());
  for (const index_t h : heads_of(0)) {
    CHECK(kv.head(h).length() < meld.limit(h).trigger_length());
  }
  CHECK(kv.head(heads_of(1)[0]).length() == 0);
}

TEST_CASE("slots that do not divide evenly, as after pins, are all divided again") {
  bool uneven = false;
  for (index_t pinned = 9; pinned < 15; ++pinned) {
    model_cache kv(300);
    kvmeld::compressor meld(kv, scoring(), budget::shared(slots));
    const index_t own = meld.policy_of(0).slots_beside_pins();
    index_t t = 0;
    while (t < 2 * slots) {
      step(meld, 0, token()), ++t;
    }
    meld.pin(0, t, pinned);  // heads that have no more than the policy's least give fewer
    while (t < 2 * slots + pinned) {
      step(meld, 0, token()), ++t;
    }
    std::vector<index_t> wanted = parts_of(meld, 0);
    const index_t total = std::accumulate(wanted.begin(), wanted.end(), 0);
    uneven = uneven || total % heads != 0;
    for (; t < 3 * slots; ++t) {
      step(meld, 0, token());
      if ((t + 1) % rescore == 0) {
        wanted = divided(meld, kv, 0, total, own);
      }
      REQUIRE(parts_of(meld, 0) == wanted);
    }
  }
  CHECK(uneven);
}

TEST_CASE("nothing is divided again while heads of other layers are behind") {
  model_cache kv(300);
  kvmeld::compressor meld(kv, scoring(), budget::shared(slots));
  for (index_t t = 0; t < 2 * slots; ++t) {
    step(meld, 0, token());
  }
  const std::vector<index_t> before = parts_of(meld, 0);
  const auto step_layer = [&](index_t layer, index_t at) {
    const auto rows = token();
    const std::span last = std::span(rows).last(3);  // of the layer that looks at single tokens
    std::vector<float> out(static_cast<std::size_t>(kv_heads_of * group * dim));
    meld.step(model_cache::of(layer, 0), {last[0], last[1], last[2], {&at, 1}}, out);
  };
  for (index_t i = 0; i < 2 * rescore; ++i) {  // also where the others were scored as long ago
    step_layer(layers_of - 1, 2 * slots + i);
    REQUIRE(parts_of(meld, 0) == before);
  }
  for (index_t l = 0; l + 1 < layers_of; ++l) {
    for (index_t i = 0; i < 2 * rescore; ++i) {
      step_layer(l, 2 * slots + i);
    }
  }
  meld.compress(model_cache::of(layers_of - 1, 0));
  CHECK(parts_of(meld, 0) != before);
}

TEST_CASE("a request goes on alike in a copy and after save and load, divided again or not") {
  model_cache kv(300), other(300);
  kvmeld::compressor meld(kv, scoring(), budget::shared(slots)),
      loaded(other, scoring(), budget::shared(slots));
  for (index_t t = 0; t < 63; ++t) {
    step(meld, 0, token());
  }
  std::stringstream bytes;
  meld.copy(0, 1), meld.save(bytes, 0), loaded.load(bytes, 1);
  for (index_t t = 0; t < 30; ++t) {
    const auto rows = token();
    step(meld, 0, rows), step(meld, 1, rows), step(loaded, 1, rows);
    REQUIRE(parts_of(meld, 1) == parts_of(meld, 0));
    REQUIRE(parts_of(loaded, 1) == parts_of(meld, 0));
    for (std::size_t i = 0; i < heads; ++i) {
      REQUIRE(same_head(kv.head(heads_of(0)[i]), kv.head(heads_of(1)[i])));
      REQUIRE(same_head(kv.head(heads_of(0)[i]), other.head(heads_of(1)[i])));
    }
  }
}

TEST_CASE("a part of the last layer divides nothing, until compress is called for all of it") {
  model_cache kv(300), parts(300);
  kvmeld::compressor meld(kv, scoring(), budget::shared(slots)),
      split(parts, scoring(), budget::shared(slots));
  const auto row = [](const std::vector<float>& x, index_t i, index_t each) {
    return std::span(x).subspan(static_cast<std::size_t>(i * each), static_cast<std::size_t>(each));
  };
  for (index_t t = 0; t < 3 * slots; ++t) {
    const auto rows = token();
    const std::vector<index_t> before = parts_of(split, 0);
    step(meld, 0, rows);
    for (index_t l = 0; l < layers_of; ++l) {
      const auto at = static_cast<std::size_t>(3 * l);
      for (index_t i = 0; i < kv_heads_of; ++i) {
        const index_t next = t;
        std::vector<float> out(static_cast<std::size_t>(group * dim));
        split.step(kvmeld::head_range{model_cache::of(l, 0).first + i, 1},
                   {row(rows[at], i, group * dim),
                    row(rows[at + 1], i, dim),
                    row(rows[at + 2], i, dim),
                    {&next, 1}},
                   out);
      }
    }
    REQUIRE(parts_of(split, 0) == before);
    split.compress(model_cache::of(layers_of - 1, 0));
    REQUIRE(parts_of(split, 0) == parts_of(meld, 0));
  }
  for (const index_t h : heads_of(0)) {
    CHECK(same_head(kv.head(h), parts.head(h)));
  }
}

TEST_CASE("equal slots for a layer's heads stay equal when they are divided again") {
  model_cache kv(300);
  kvmeld::compressor meld(kv, scoring(), budget::shared_by_layer(slots));
  bool uneven = false;
  for (index_t t = 0; t < 4 * slots; ++t) {
    step(meld, 0, token());
    const std::vector<index_t> parts = parts_of(meld, 0);
    REQUIRE(parts[0] == parts[1]);
    REQUIRE(parts[2] == parts[3]);
    REQUIRE(parts[0] + parts[2] == 2 * slots);
    uneven = uneven || parts[0] != parts[2];
  }
  CHECK(uneven);
}

TEST_CASE("no head is given more than the cap of a shared budget") {
  model_cache kv(300);
  kvmeld::compressor meld(kv, scoring(), budget::shared(slots, 0, slots + 4));
  for (index_t t = 0; t < 4 * slots; ++t) {
    step(meld, 0, token());
    const std::vector<index_t> parts = parts_of(meld, 0);
    REQUIRE(std::ranges::max(parts) <= slots + 4);
    REQUIRE(std::accumulate(parts.begin(), parts.end(), 0) == heads * slots);
  }
}

}  // namespace divided_again_test
