// What leverage multiplies and moves, as the emulator counts it, beside the least that there is.
#include <catch2/catch.hpp>

#include "cuda/row_traffic.hpp"
#include "kvfold/cuda/policies/fold/leverage.cuh"

namespace kvfold::cuda {
namespace {

using emulator::traffic;

void check_leverage(const cache_case& c) {
  const index_t n = c.capacity, dim = c.dim, depth = dim <= 128 ? 128 : 256;
  INFO("dim " << dim << ", slots " << n);
  device_cache<half> kv(c, std::vector(static_cast<std::size_t>(c.heads), n), 3,
                        {column_merge::sum, column_merge::max});
  detail::leverage_scratch work{};
  workspace_allocator count;
  work.allocate(count, detail::shape_of(kv.view()));
  device_buffer<unsigned char> memory(count.used(), 0);
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, detail::shape_of(kv.view()));
  device_buffer<index_t> planned(static_cast<std::size_t>(c.heads));
  const detail::unrotated_keys<half> keys{kv.view(), {}, budget{.target = 0}, nullptr};
  const index_t parts = detail::moment_parts(c.heads, n), cleared = dim < depth ? 1 : 0;
  const stream launches = order();
  {
    const traffic counted;
    detail::covariance_of<true>(kv.view(), keys, n, planned.data(), 1, 0, work.moments, launches);
    // 32 rows at a time, above 128 dims 16, by tiles of 16 × 16 of the lower triangle; a product is
    // six of 16 bits.
    const index_t some = 4096 / depth, tiles = ceiling(dim, 16);
    CHECK(counted.mmas == std::int64_t{c.heads} * ceiling(n, some) * (some / 16) *
                              (tiles * (tiles + 1) / 2) * 2 * 6);
    CHECK(counted.bank_conflicts == 0);
    // One for every turn, one when a block begins and one at its end; one a block of covariances.
    CHECK(counted.barriers ==
          c.heads * (ceiling(n, some) + parts * (1 + cleared) + ceiling(dim, 8)));
    CHECK(counted.launches == 2);
  }
  const auto measure = [&]<index_t Depth>(std::integral_constant<index_t, Depth>) {
    using kernel = detail::measure_leverage<half, Depth>;
    traffic counted;
    counted.watch(work.inverse.data,
                  sizeof(bfloat16) * 3 * static_cast<std::size_t>(c.heads) *
                      static_cast<std::size_t>(detail::split_inverse::size(dim)));
    const index_t blocks = ceiling(n, kernel::slots), side = ceiling(dim, 64);
    launch(kernel{keys, kv.state, false, planned.data(), work.moments.mean, work.inverse,
                  work.leverage},
           {static_cast<unsigned>(c.heads), static_cast<unsigned>(blocks)}, launches);
    // Pieces of 64 × 64 on and below the diagonal, in three parts.
    const std::int64_t pieces = std::int64_t{c.heads} * blocks * side * (side + 1) / 2;
    CHECK(counted.of(0).loaded.bytes == pieces * 64 * 64 * 3 * 2);
    CHECK(32 * counted.of(0).loaded.sectors == counted.of(0).loaded.bytes);
    CHECK(counted.mmas == pieces * (kernel::slots / 16) * 8 * 4 * 6);
    CHECK(counted.bank_conflicts == 0);
    CHECK(counted.barriers == pieces + std::int64_t{c.heads} * blocks * (1 + cleared));
  };
  if (dim <= 128) {
    measure(std::integral_constant<index_t, 128>{});
  } else {
    measure(std::integral_constant<index_t, 256>{});
  }
  CHECK(memory.intact());
}

TEST_CASE("leverage multiplies a triangle of keys' products and one of the factor's inverse") {
  check_leverage({.heads = 2, .capacity = 300, .dim = 128});
  check_leverage({.heads = 2, .capacity = 100, .dim = 64});
  check_leverage({.heads = 1, .capacity = 70, .dim = 160});
  check_leverage({.heads = 1, .capacity = 40, .dim = 256});
}

}  // namespace
}  // namespace kvfold::cuda
