// SPDX-License-Identifier: MIT
/// The bytes of saved heads, and of a request.
#pragma once

#include <algorithm>  // std::ranges::for_each, std::ranges::fill
#include <cstring>    // std::memcmp
#include <istream>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "kvmeld/compress/open_heads.hpp"
#include "kvmeld/detail/bytes.hpp"

namespace kvmeld::inline v0 {

// All numbers are little-endian; floats are their bits.
//
//     "kvmeld\r\n"                       8 bytes; line ends, as text mode would spoil them
//     version, heads, capacity           u32 each; version: 5, or 6 with rows beside the slots:
//                                        newest ones in half, or a mean
//     for every head:
//       scalars of keys, of values       u32 each: 0 float, 1 half, 2 bfloat16, 3 q8_0, 4 q4_0,
//                                        5 q6_0, 6 k8, 7 k6, 8 k4
//       newest rows in half              u32 (version 6)
//       group, dims of keys, of values   u32 each
//       place of values                  u32: 0 their own, 1 in the keys
//       scale, soft cap                  f32 each
//       window                           u32; 0: none
//       sinks, slopes                    [group] f32 each, 0 for none; a sink of 0 is −0
//       rotation                         u32 each: numbers, the first of them, how they pair
//                                        (0: halves, 1: interleaved); [numbers / 2] f32 frequencies
//       policy's name                    u32 length, and its bytes
//       columns                          u32, then (u32 fold, f32 initial) each
//       floats of memory                 u64
//     for every head:
//       length, measured, seen           u32 each: slots, those that have columns, tokens so far
//       rounded                          u32 (version 6): tokens before it are not the newest
//       observed                         u64 queries
//     for every head:
//       keys, values                     [length, its dim] scalars; q8_0: blocks of half and 32 i8;
//                                        q4_0: of half and 16 u8, values rotated; q6_0: 8 more;
//                                        k8, k6, k4: of q8_0, q6_0, q4_0
//       newest keys, values              [newest + 4, its dim] half, those of the first four
//                                        tokens first; none of what is not in blocks
//       mean                             [dim] half, of keys in k8, k6, k4
//       log-mass, positions              [length] f32, [length] u32
//       columns                          [columns, measured] f32
//       memory                           f32
//     CRC-32 of all that                 u32

namespace detail {

inline constexpr std::string_view saved_magic = "kvmeld\r\n";

/// Has a head rows beside its slots?
inline bool has_rows_beside(const storage_pair& type) {
  return type.newest > 0 || is_centred(type.keys);
}

/// What saved heads and those that they are loaded into must agree on, field by field:
/// `field(name, value)`. `Heads`: `count()`, and of the `i`-th `head(i)`, `state(i)`.
template <class Heads, class Field>
void each_common_field(Heads& heads, Field field) {
  const auto number = [&](const char* what, auto x) { field(what, static_cast<std::uint32_t>(x)); };
  const storage_pair& type = heads.head(0).type();
  number("version", has_rows_beside(type) ? 6 : 5);
  field("heads", heads.count());
  field("capacity", heads.head(0).capacity());
  for (index_t i = 0; i < heads.count(); ++i) {
    const head_ref head = heads.head(i);
    const attention_spec& spec = head.spec();
    number(
        "scalar (0: float, 1: half, 2: bfloat16, 3: q8_0, 4: q4_0, 5: q6_0, 6: k8, 7: k6, 8: k4)",
        head.type().keys);
    number("scalar of values", head.type().values);
    if (has_rows_beside(type)) {
      field("newest rows in half", type.newest);
    }
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
      field("sink logit", sinks == nullptr ? 0.0F : sinks[g] == 0 ? -0.0F : sinks[g]);
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
    field("floats of memory", static_cast<std::uint64_t>(state.memory_size()));
  }
}

/// Of one head, what says how many bytes follow, and what counts tokens and queries.
struct saved_counts {
  index_t length = 0, measured = 0, next_position = 0, rounded = 0;
  std::int64_t observed = 0;
  std::size_t positions = 0;  ///< where these lie in what follows
};

template <class Number>
void each_number(row<any_scalar> x, index_t dim, Number number) {
  x.held().visit([&]<class Scalar>(row<Scalar> typed) {
    for (index_t i = 0; i < row_size<Scalar>(dim); ++i) {
      if constexpr (block_scalar<Scalar>) {
        number(typed.data[i].scale);
        std::ranges::for_each(typed.data[i].codes, number);
        if constexpr (requires { typed.data[i].upper; }) {
          std::ranges::for_each(typed.data[i].upper, number);
        }
      } else {
        number(typed[i]);
      }
    }
  });
}

/// Makes zeros of what is not read: of slots that have one of the newest rows their own, the newest
/// rows of no slot, the mean that no key is held less. Equal heads are saved as equal bytes,
/// without what they held before.
inline void clear_unread(const head_ref& head) {
  const auto clear = [](row<any_scalar> read, row<any_scalar> held, index_t dim) {
    if (read.data != held.data) {
      each_number(held, dim, [](auto& x) { x = {}; });
    }
  };
  const index_t newest = head.type().newest;
  std::vector<char> in_use(as_size(rows_in_half(newest)));
  for (index_t s = 0; s < (newest > 0 ? head.length() : 0); ++s) {
    clear(head.key(s), head.held_key(s), head.dim());
    clear(head.value(s), head.held_value(s), head.own_value_dim());
    if (head.is_newest(s)) {
      in_use[as_size(head.newest_row(head.position(s)))] = 1;
    }
  }
  for (const std::span<Eigen::half> rows : {head.newest_keys(), head.newest_values()}) {
    const std::size_t dim = rows.empty() ? 0 : rows.size() / in_use.size();
    for (std::size_t i = 0; dim > 0 && i < in_use.size(); ++i) {
      if (in_use[i] == 0) {
        std::ranges::fill(rows.subspan(i * dim, dim), Eigen::half{});
      }
    }
  }
  if (head.length() == 0 || (newest > 0 && head.rounded() <= first_in_half)) {
    std::ranges::fill(head.key_mean(), Eigen::half{});
  }
}

/// Every number of a head's slots and of its state, in the order in which they are saved.
/// `number(x)` reads or writes it.
template <class Number>
void each_number(const head_ref& head, head_state& state, Number number) {
  for (const bool values : {false, true}) {
    for (index_t s = 0; s < head.length(); ++s) {
      if (values) {
        each_number(head.held_value(s), head.own_value_dim(), number);
      } else {
        each_number(head.held_key(s), head.dim(), number);
      }
    }
  }
  std::ranges::for_each(head.newest_keys(), number);
  std::ranges::for_each(head.newest_values(), number);
  std::ranges::for_each(head.key_mean(), number);
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
    if (has_rows_beside(heads.head(h).type())) {
      to.put(heads.head(h).rounded());
    }
    to.put(heads.state(h).observed());
  }
  for (index_t h = 0; h < heads.count(); ++h) {
    clear_unread(heads.head(h));
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
    n.next_position = from.get<index_t>();
    const auto head = heads.head(h);
    const index_t newest = head.type().newest;
    n.rounded = has_rows_beside(head.type()) ? from.get<index_t>() : n.next_position;
    n.observed = from.get<std::int64_t>();
    expects(errc::corrupt_file, n.length >= 0 && n.length <= head.capacity(),
            "load: expected a length of 0 to ", head.capacity(), " slots, got ", n.length);
    expects(errc::corrupt_file, n.measured >= 0 && n.measured <= n.length, "load: expected 0 to ",
            n.length, " slots with columns, got ", n.measured);
    heads.expect_fits(h, n.length, n.measured);
    expects(errc::corrupt_file, n.next_position >= n.length, "load: expected at least ", n.length,
            " tokens in total, got ", n.next_position);
    expects(errc::corrupt_file,
            n.rounded <= n.next_position && n.rounded >= std::max(n.next_position - newest, 0),
            "load: expected at most ", newest, " newest rows, got ",
            std::int64_t{n.next_position} - n.rounded);
    expects(errc::corrupt_file, n.observed >= 0, "load: expected at least 0 observed queries, got ",
            n.observed);
    const std::size_t row = row_bytes(head.type().keys, head.dim()) +
                            row_bytes(head.type().values, head.own_value_dim());
    n.positions = size + as_size(n.length) * (row + sizeof(float)) +
                  sizeof(Eigen::half) * (head.newest_keys().size() + head.newest_values().size() +
                                         head.key_mean().size());
    size = n.positions + as_size(n.length) * sizeof(index_t) +
           sizeof(float) *
               (as_size(n.measured, heads.state(h).slot_stats()) + heads.state(h).memory_size());
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
    heads.head(h).restore(n.length, n.next_position, n.rounded);
    heads.state(h).truncate(0);
    heads.state(h).extend(n.measured);
    heads.state(h).count_queries(n.observed - heads.state(h).observed());
    each_number(heads.head(h), heads.state(h), [&]<class T>(T& x) {
      from_bytes(next, x);
      next += sizeof x;
    });
    clear_unread(heads.head(h));
  }
}

/// One request's heads, as they are saved.
template <policy P>
struct saved_request {
  open_heads<P>& all;
  std::vector<index_t> list;
  std::vector<kept_slots> kept = {};
  std::vector<budget> limits = {};

  index_t count() const { return static_cast<index_t>(list.size()); }
  head_ref head(index_t i) const { return all.kv.head(list[as_size(i)]); }
  head_state& state(index_t i) const { return all.of(list[as_size(i)]).state; }
  /// The head whose tokens head `i` must have: its layer's first, or its own.
  index_t like(index_t i) const {
    return all.policies.alike(list[as_size(i)]) ? i - i % head(i).spec().kv_heads : i;
  }
  void expect_fits(index_t i, index_t length, index_t measured) const {
    const index_t h = list[as_size(i)];
    const kept_slots& own = kept[as_size(i)];
    expects(errc::corrupt_file,
            std::int64_t{own.sealed} + own.pinned <= length - measured &&
                own.sealed % head(i).page_slots() == 0,
            "load: expected at most ", length - measured,
            " sealed and pinned slots, the former in whole pages of ", head(i).page_slots(),
            ", got ", own.sealed, " and ", own.pinned);
    if (own.sealed > 0 || own.pinned > 0) {
      all.policies.with(h, [](const auto& p) { expect_seals("load: ", p); });
      all.policies.expect_room("load", h, own, limits[as_size(i)]);
    }
    head(i).expect_pages(0, length);
    all.kv.expect_own_pages("load", h, 0, length);
  }
};

/// Saves a request: of every head −sealed slots, if there are any, 0 and its pinned ones, if there
/// are any, then slots and trigger of what it is held to; CRC-32 of these; then the heads.
template <policy P>
void save_request(open_heads<P>& all, std::ostream& out, index_t request) {
  saved_request<P> heads{all, all.closed("save", request)};
  byte_writer limits(out);
  all.gather("save", heads.list);
  all.expect_alike("save", heads.list);
  for (const index_t h : heads.list) {
    expects(!all.awaits_pins(h), "save: expected all pinned tokens, got some to come");
    const one_head& one = all.of(h);
    if (one.kept.sealed > 0) {
      limits.put(-one.kept.sealed);
    }
    if (one.kept.pinned > 0) {
      limits.put(index_t{0}), limits.put(one.kept.pinned);
    }
    limits.put(one.limit.slots), limits.put(one.limit.trigger);
    all.of(h).state.extend(all.known_slots(h));  // saved as if it did not rest
  }
  limits.finish();
  save_heads(out, heads);
  for (const index_t h : heads.list) {
    all.wake_or_rest(h);
  }
}

/// Loads that into a request, and holds its heads to what they were held to.
template <policy P>
void load_request(open_heads<P>& all, std::istream& in, index_t request) {
  saved_request<P> heads{all, all.of_request("load", request)};
  byte_reader from(in);
  for (const index_t h : heads.list) {
    const index_t capacity = all.kv.head(h).capacity();
    auto slots = from.get<index_t>();
    expects(errc::corrupt_file, slots >= -capacity, "load: expected at most ", capacity,
            " sealed slots, got ", -std::int64_t{slots});
    kept_slots kept{.sealed = std::max(-slots, index_t{0})};
    slots = slots < 0 ? from.get<index_t>() : slots;
    if (slots == 0) {
      kept.pinned = from.get<index_t>(), slots = from.get<index_t>();
      expects(errc::corrupt_file, kept.pinned > 0 && kept.pinned <= capacity,
              "load: expected 1 to ", capacity, " pinned slots, got ", kept.pinned);
    }
    const auto trigger = from.get<index_t>();
    const bool cut = all.policies.is_cut(h);
    const index_t window = all.policies.slots_of(h);
    expects(errc::corrupt_file, !cut || (slots == window && trigger == 0),
            "load: expected a window of ", window, " tokens without a trigger, got ", slots,
            " and ", trigger);
    expects(errc::corrupt_file,
            cut || (slots > 0 && slots <= capacity && trigger >= 0 && trigger <= capacity),
            "load: expected a limit of 1 to ", capacity, " slots, got ", slots,
            " and a trigger of ", trigger);
    heads.kept.push_back(kept), heads.limits.push_back({slots, trigger});
  }
  from.finish();
  all.or_recount(heads.list, [&] { load_heads(in, heads); });
  pinned_tokens& pins = all.pins[as_size(request)] = {};
  for (std::size_t i = 0; i < heads.list.size(); ++i) {
    const index_t h = heads.list[i];
    all.hold_to(h, heads.limits[i], heads.kept[i], all.kv.head(h).next_position() > 0);
    one_head& one = all.of(h);
    one.gathered = all.kv.head(h).next_position();
    one.compressed = one.gone > 0 ? one.gathered : 0;
    for (index_t s = one.kept.sealed; s < one.kept.count(); ++s) {
      pins.add(all.kv.head(h).position(s), all.kv.head(h).position(s) + 1);
    }
  }
}

}  // namespace detail

}  // namespace kvmeld::inline v0
