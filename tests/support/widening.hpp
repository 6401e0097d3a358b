// SPDX-License-Identifier: MIT
// What files see that are compiled for several instruction sets: where `to_floats` is, and whether
// rows in 8 bits are attended to at the width of a vector as one by one.
#pragma once

namespace widening {

using address = void (*)();

/// As the file sees it that was compiled with that KVMELD_SET.
template <int set>
address of();
template <>
address of<0>();
template <>
address of<1>();

template <int set>
bool codes_as_one_by_one();
template <>
bool codes_as_one_by_one<0>();
template <>
bool codes_as_one_by_one<1>();

}  // namespace widening
