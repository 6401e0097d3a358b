// SPDX-License-Identifier: MIT
/// The bytes of saved heads, as those of one request.
#pragma once

#include <algorithm>  // std::ranges::for_each
#include <cstring>    // std::memcmp
#include <istream>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/detail/bytes.hpp"

namespace kvmeld::inline v0 {

// All numbers are little-endian; floats are their bits.
//
//     "kvmeld\r\n"                       8 bytes; line ends, as text mode would spoil them
//     version, heads, capacity           u32 each; version: 3
//     for every head:
//       scalars of keys, of values       u32 each: 0 float, 1 half, 2 bfloat16, 3 q8_0, 4 q4_0
//       group, dims of keys, of values   u32 each
//       place of values                  u32: 0 their own, 1 in the keys
//       scale, soft cap                  f32 each
//       window                           u32; 0: none
//       sinks, slopes                    [group] f32 each, 0 for none
//       rotation                         u32 each: numbers, the first of them, how they pair
//                                        (0: halves, 1: interleaved); [numbers / 2] f32 frequencies
//       policy's name                    u32 length, and its bytes
//       columns                          u32, then (u32 fold, f32 initial) each
//       floats of memory                 u64
//     for every head:
//       length, measured, seen           u32 each: slots, those that have columns, tokens so far
//       observed                         u64 queries
//     for every head:
//       keys, values                     [length, its dim] scalars; q8_0: blocks of half and 32 i8;
//                                        q4_0: of half and 16 u8, values rotated
//       log-mass, positions              [length] f32, [length] u32
//       columns                          [columns, measured] f32
//       memory                           f32
//     CRC-32 of all that                 u32

namespace detail {

inline constexpr std::string_view saved_magic = "kvmeld\r\n";

/// What saved heads and those that they are loaded into must agree on, field by field:
/// `field(name, value)`. `Heads`: `count()`, and of the `i`-th `head(i)`, `state(i)`.
template <class Heads, class Field>
void each_common_field(Heads& heads, Field field) {
  const auto number = [&](const char* what, auto x) { field(what, static_cast<std::uint32_t>(x)); };
  number("version", 3);
  field("heads", heads.count());
  field("capacity", heads.head(0).capacity());
  for (index_t i = 0; i < heads.count(); ++i) {
    const head_ref head = heads.head(i);
    const attention_spec& spec = head.spec();
    number("scalar (0: float, 1: half, 2: bfloat16, 3: q8_0, 4: q4_0)", head.type().keys);
    number("scalar of values", head.type().values);
    field("group", head.group());
    field("dim", head.dim());
    field("dim of values", head.value_dim());
    number("place of values (0: their own, 1: in the keys)", head.one_memory() ? 1 : 0);
    field("scale", head.scale());
    field("soft cap", spec.soft_cap);
    field("window", spec.window);
    const float *const sinks = head.of_group(spec.sink_logits), *const slopes = head.of_group(
                                                                    spec.alibi_slopes);
    for (index_t g = 0; g < head.group(); ++g) {
      field("sink logit", sinks != nullptr ? sinks[g] : 0.0F);
      field("slope", slopes != nullptr ? slopes[g] : 0.0F);
    }
    const index_t rotated = spec.rope.rotated(head.dim());
    field("rotated numbers", rotated);
    field("first rotated number", spec.rope.first(head.dim()));
    number("pairing (0: halves, 1: interleaved)",
           rotated > 0 && spec.rope.pairs_as() == rotary::pairing::interleaved ? 1 : 0);
    for (index_t p = 0; p < rotated / 2; ++p) {
      field("frequency", static_cast<float>(spec.rope.frequency(p, head.dim())));
    }
    const head_state& state = heads.state(i);
    field("policy", state.policy());
    number("columns", state.slot_stats());
    for (const slot_stat& c : state.kinds()) {
      number("merge rule of a column (0: sum, 1: max, 2: anchor)", c.reduce);
      field("initial number of a column", c.initial);
    }
    field("floats of memory", static_cast<std::uint64_t>(state.memory().size()));
  }
}

/// Of one head, what says how many bytes follow, and what counts tokens and queries.
struct saved_counts {
  index_t length = 0, measured = 0, next_position = 0;
  std::int64_t observed = 0;
  std::size_t positions = 0;  ///< where these lie in what follows
};

template <class Number>
void each_number(row<any_scalar> x, index_t dim, Number number) {
  x.visit([&]<class Scalar>(row<Scalar> typed) {
    for (index_t i = 0; i < row_size<Scalar>(dim); ++i) {
      if constexpr (block_scalar<Scalar>) {
        number(typed.data[i].scale);
        std::ranges::for_each(typed.data[i].codes, number);
      } else {
        number(typed[i]);
      }
    }
  });
}

/// Every number of a head's slots and of its state, in the order in which they are saved.
/// `number(x)` reads or writes it.
template <class Number>
void each_number(const head_ref& head, head_state& state, Number number) {
  for (const bool values : {false, true}) {
    for (index_t s = 0; s < head.length(); ++s) {
      if (values) {
        each_number(head.value(s), head.own_value_dim(), number);
      } else {
        each_number(head.key(s), head.dim(), number);
      }
    }
  }
  for (index_t s = 0; s < head.length(); ++s) {
    number(head.log_mass(s));
  }
  for (index_t s = 0; s < head.length(); ++s) {
    number(head.position(s));
  }
  for (index_t c = 0; c < state.slot_stats(); ++c) {
    std::ranges::for_each(state.column(c), number);
  }
  std::ranges::for_each(state.memory(), number);
}

/// Saves heads. Refused: a stream that fails.
template <class Heads>
void save_heads(std::ostream& out, Heads& heads) {
  for (index_t h = 0; h < heads.count(); ++h) {
    expects(heads.state(h).length() <= heads.head(h).length(), "save: expected a state of at most ",
            heads.head(h).length(), " slots, got ", heads.state(h).length());
  }
  byte_writer to(out);
  to.put_text(saved_magic);
  each_common_field(heads, [&](const char*, const auto& x) {
    if constexpr (requires { x.data(); }) {
      to.put(static_cast<std::uint32_t>(x.size()));
      to.put_text(x);
    } else {
      to.put(x);
    }
  });
  for (index_t h = 0; h < heads.count(); ++h) {
    to.put(heads.head(h).length());
    to.put(heads.state(h).length());
    to.put(heads.head(h).next_position());
    to.put(heads.state(h).observed());
  }
  for (index_t h = 0; h < heads.count(); ++h) {
    each_number(heads.head(h), heads.state(h), [&](const auto& x) { to.put(x); });
  }
  to.finish();
}

/// Loads what `save_heads` saved into heads of the same shape and policies. Refused, with nothing
/// changed: what `load` refuses.
template <class Heads>
void load_heads(std::istream& in, Heads& heads) {
  byte_reader from(in);
  const auto expect_same = [](const char* what, const auto& wanted, const auto& got, bool same) {
    expects(errc::corrupt_file, same, "load: expected ", what, " ", wanted, ", got ", got);
  };
  expects(errc::corrupt_file, from.get_text(saved_magic.size()) == saved_magic,
          "load: expected a saved cache, got other bytes");
  each_common_field(heads, [&]<class T>(const char* what, const T& wanted) {
    if constexpr (requires { wanted.data(); }) {
      constexpr std::uint32_t longest = 256;
      const auto size = from.get<std::uint32_t>();
      expects(errc::corrupt_file, size <= longest, "load: expected a ", what, " name of at most ",
              longest, " bytes, got ", size);
      const std::string got = from.get_text(size);
      expect_same(what, wanted, got, wanted == got);
    } else {
      const T got = from.get<T>();
      expect_same(what, wanted, got, std::memcmp(&wanted, &got, sizeof got) == 0);
    }
  });
  std::vector<saved_counts> counts(as_size(heads.count()));
  std::size_t size = 0;  // of what follows: no more than the cache and its state take already
  for (index_t h = 0; h < heads.count(); ++h) {
    auto& n = counts[as_size(h)];
    n.length = from.get<index_t>(), n.measured = from.get<index_t>();
    n.next_position = from.get<index_t>(), n.observed = from.get<std::int64_t>();
    const auto head = heads.head(h);
    expects(errc::corrupt_file, n.length >= 0 && n.length <= head.capacity(),
            "load: expected a length of 0 to ", head.capacity(), " slots, got ", n.length);
    expects(errc::corrupt_file, n.measured >= 0 && n.measured <= n.length, "load: expected 0 to ",
            n.length, " slots with columns, got ", n.measured);
    heads.expect_fits(h, n.length, n.measured);
    expects(errc::corrupt_file, n.next_position >= n.length, "load: expected at least ", n.length,
            " tokens in total, got ", n.next_position);
    expects(errc::corrupt_file, n.observed >= 0, "load: expected at least 0 observed queries, got ",
            n.observed);
    const std::size_t row = row_bytes(head.type().keys, head.dim()) +
                            row_bytes(head.type().values, head.own_value_dim());
    n.positions = size + as_size(n.length) * (row + sizeof(float));
    size = n.positions + as_size(n.length) * sizeof(index_t) +
           sizeof(float) *
               (as_size(n.measured, heads.state(h).slot_stats()) + heads.state(h).memory().size());
  }
  std::vector<unsigned char> bytes(size);
  from.get(bytes);
  from.finish();
  for (index_t h = 0; h < heads.count(); ++h) {
    const saved_counts &own = counts[as_size(h)], &like = counts[as_size(heads.like(h))];
    const bool same =
        own.length == like.length && own.next_position == like.next_position &&
        (own.length == 0 || std::memcmp(bytes.data() + own.positions, bytes.data() + like.positions,
                                        as_size(own.length) * sizeof(index_t)) == 0);
    expects(errc::corrupt_file, same, "load: expected all heads of each layer with the same tokens",
            ", got other tokens in head ", h, " of the request than in head ", heads.like(h));
    for (index_t s = 0; s < own.length; ++s) {
      index_t position = 0;
      std::memcpy(&position, bytes.data() + own.positions + as_size(s) * sizeof position,
                  sizeof position);
      expects(errc::corrupt_file, position >= 0 && position < own.next_position,
              "load: expected positions of 0 to ", own.next_position - 1, ", got ", position);
    }
  }
  // All is read and right: from here on nothing throws.
  const unsigned char* next = bytes.data();
  for (index_t h = 0; h < heads.count(); ++h) {
    const auto& n = counts[as_size(h)];
    heads.head(h).truncate(0);
    heads.head(h).restore(n.length, n.next_position);
    heads.state(h).truncate(0);
    heads.state(h).extend(n.measured);
    heads.state(h).count_queries(n.observed - heads.state(h).observed());
    each_number(heads.head(h), heads.state(h), [&]<class T>(T& x) {
      from_bytes(next, x);
      next += sizeof x;
    });
  }
}

}  // namespace detail

}  // namespace kvmeld::inline v0
