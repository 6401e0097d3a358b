// SPDX-License-Identifier: MIT
// Where `to_floats` is, as files see it that are compiled for several instruction sets.
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

}  // namespace widening
