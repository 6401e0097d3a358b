// SPDX-License-Identifier: MIT
// Heads of requests that wait, in an engine's pages.
#include <catch2/catch.hpp>
#include <numeric>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/state.cuh"

namespace kvmeld::cuda {
namespace saved_heads_test {

constexpr index_t floats = 37, columns = 3, header = 3;

/// Four heads with a state, and pages of `page` words a head for three places.
struct server {
  device_cache<float> kv;
  index_t of_place;  // pages
  device_buffer<std::uint32_t> pool;
  device_buffer<index_t> table, words;
  index_t page;

  explicit server(index_t page_words, std::uint64_t seed = 7)
      : kv({.heads = 4, .capacity = 41, .dim = 8, .spare = 3}, {0, 41, 12, 30}, seed,
           {slot_reduce::sum, slot_reduce::max, slot_reduce::anchor}, floats),
        of_place(static_cast<index_t>((saved_words(kv.state, 41) + page_words - 1) / page_words)),
        pool(static_cast<std::size_t>(3 * of_place * page_words)),
        table(static_cast<std::size_t>(3 * of_place)),
        words(3),
        page(page_words) {
    for (index_t i = 0; i < 3 * of_place; ++i) {  // from the back
      table[i] = 3 * of_place - 1 - i;
    }
    for (index_t h = 0; h < 4; ++h) {
      kv.next_position[h] = kv.length[h] + 100 * h;
      for (index_t i = 0; i < 10 * h; ++i) {  // the memory in use differs
        kv.memory[h * floats + i] = i % 3 == 0 ? 0.0F : -0.0F;
      }
    }
    kv.memory[floats + 1] = NAN;
  }
  saved_pages pages() {
    return {.data = pool.data(),
            .row = 1,
            .heads = 1,
            .table = table.data(),
            .pages = of_place,
            .slots = page,
            .page = page};
  }
  std::vector<index_t> save(const std::vector<index_t>& heads, index_t capacity = 41) {
    device_buffer<index_t> list(heads);
    const auto some = kv.view().with_capacity(capacity).with_active(list.data(), 3);
    save_to_pages(some, kv.state, pages(), words.data(), order());
    return {std::as_const(words).host(), std::as_const(words).host() + 3};
  }
  std::vector<index_t> load(const std::vector<index_t>& heads) {
    device_buffer<index_t> list(heads);
    load_from_pages(kv.view().with_active(list.data(), 3), kv.state, pages(), words.data(),
                    order());
    return {std::as_const(words).host(), std::as_const(words).host() + 3};
  }
  /// The bytes of all that is not rows, of a head.
  std::vector<unsigned char> bytes(index_t h) const {
    std::vector<unsigned char> all;
    const auto put = [&](const auto* x, std::size_t n) {
      const auto* const first = reinterpret_cast<const unsigned char*>(x);
      all.insert(all.end(), first, first + n * sizeof *x);
    };
    put(&kv.length[h], 1), put(&kv.next_position[h], 1);
    const auto n = static_cast<std::size_t>(kv.length[h]);
    put(&kv.log_mass[kv.at(h, 0)], n), put(&kv.position[kv.at(h, 0)], n);
    for (std::size_t c = 0; c < columns; ++c) {
      put(&kv.columns[static_cast<std::ptrdiff_t>(c * kv.slots()) + kv.at(h, 0)], n);
    }
    put(&kv.memory[std::ptrdiff_t{h} * floats], floats);
    return all;
  }
  auto everything() const {
    return std::vector{kv.log_mass.bytes(),      kv.position.bytes(), kv.length.bytes(),
                       kv.next_position.bytes(), kv.columns.bytes(),  kv.memory.bytes()};
  }
  void check_guards() const {
    kv.check_guards();
    CHECK((pool.intact() && table.intact() && words.intact()));
  }
};

TEST_CASE("heads that are saved and loaded elsewhere are the same to the bit") {
  for (const index_t page : {1, 3, 7, 64, 1000}) {
    INFO("pages of " << page << " words");
    server from(page), to(page, 8);
    const auto before = from.everything();
    const index_t of_2 = header + 12 * (2 + columns) + 20, of_1 = header + 41 * (2 + columns) + 9;
    CHECK(from.save({2, -1, 1})[0] == of_2);
    CHECK(from.words[2] == of_1);
    CHECK(from.everything() == before);
    const auto idle = static_cast<index_t>(0xcdcdcdcdU);
    CHECK(std::as_const(from.words)[1] == idle);

    std::copy_n(std::as_const(from.pool).host(), from.pool.size(), to.pool.host());
    const auto others = std::pair(to.bytes(1), to.bytes(3));
    CHECK(to.load({0, -1, 2})[0] == of_2);
    CHECK(to.words[2] == of_1);
    CHECK(to.bytes(0) == from.bytes(2));
    CHECK(to.bytes(2) == from.bytes(1));
    CHECK((others == std::pair(to.bytes(1), to.bytes(3))));
    CHECK(to.save({0, 2, 0})[0] == of_2);  // an empty head's words, a row of zeros
    from.check_guards(), to.check_guards();
  }
  server x(7);
  const index_t of_0 = header;
  CHECK(x.save({0, -1, -1})[0] == of_0);
  CHECK(x.load({3, -1, -1})[0] == of_0);
  CHECK(x.bytes(3) == x.bytes(0));
}

TEST_CASE("heads of a request share pages") {
  server x(16);
  auto pages = x.pages();  // 8 words of each of two heads
  pages.head = 8, pages.heads = 2, pages.slots = 8, pages.pages = 3 * x.of_place;
  device_buffer<index_t> first(std::vector<index_t>{2, 3}), second(std::vector<index_t>{0, 1});
  const auto is = std::pair(x.bytes(2), x.bytes(3));
  save_to_pages(x.kv.view().with_active(first.data(), 2), x.kv.state, pages, x.words.data(),
                order());
  load_from_pages(x.kv.view().with_active(second.data(), 2), x.kv.state, pages, x.words.data(),
                  order());
  CHECK((is == std::pair(x.bytes(0), x.bytes(1))));
  x.check_guards();
}

TEST_CASE("heads without pages, and pages without heads, are counted and change nothing") {
  server x(16);
  const auto pool = x.pool.bytes();
  const index_t used = (header + 30 * (2 + columns) + 30 + 15) / 16;  // of head 3
  REQUIRE(used < x.of_place);
  const index_t last = x.table[used - 1];
  x.table[used - 1] = -1;
  CHECK(x.save({3, -1, -1})[0] == -1);
  CHECK(x.save({1, -1, -1}, 40)[0] == -1);  // more slots than the call's capacity
  CHECK(x.pool.bytes() == pool);
  x.table[used - 1] = last, x.table[used] = -1;  // the first that is not needed
  CHECK(x.save({3, -1, -1})[0] > 0);

  const auto before = x.everything();
  const auto first = std::ptrdiff_t{x.table[0]} * 16;
  const auto refuses = [&](std::ptrdiff_t word, std::uint32_t value) {
    const std::uint32_t was = std::exchange(x.pool[first + word], value);
    CHECK(x.load({0, -1, -1})[0] == -1);
    CHECK(x.everything() == before);
    x.pool[first + word] = was;
  };
  refuses(0, 42), refuses(0, static_cast<std::uint32_t>(-1));
  refuses(1, 29);
  refuses(2, floats + 1), refuses(2, static_cast<std::uint32_t>(-1));
  for (const index_t missing : {0, used - 1}) {
    const index_t was = std::exchange(x.table[missing], -1);
    CHECK(x.load({0, -1, -1})[0] == -1);
    CHECK(x.everything() == before);
    x.table[missing] = was;
  }
  CHECK(x.load({0, -1, -1})[0] > 0);
  CHECK(x.bytes(0) == x.bytes(3));
  x.check_guards();
}

TEST_CASE("pages that words cannot be found in are refused") {
  server x(16);
  const auto refuses = [&](auto change) {
    auto pages = x.pages();
    change(pages);
    CHECK_THROWS_WITH(
        save_to_pages(x.kv.view(), x.kv.state, pages, x.words.data(), order()),
        Catch::Contains("cuda save_to_pages: expected saved_pages with a table, a row of 1"));
    CHECK_THROWS_WITH(
        load_from_pages(x.kv.view(), x.kv.state, pages, x.words.data(), order()),
        Catch::Contains("cuda load_from_pages: expected saved_pages with a table, a row of 1"));
  };
  refuses([](saved_pages& p) { p.data = nullptr; });
  refuses([](saved_pages& p) { p.table = nullptr; });
  refuses([](saved_pages& p) { p.row = 0; });
  refuses([](saved_pages& p) { p.heads = 0; });
  refuses([](saved_pages& p) { p.pages = 0; });
  refuses([](saved_pages& p) { p.slots = 0; });
  CHECK_THROWS_WITH(save_to_pages(x.kv.view(), x.kv.state, x.pages(), nullptr, order()),
                    Catch::Contains("expected saved_pages"));
}

}  // namespace saved_heads_test
}  // namespace kvmeld::cuda
