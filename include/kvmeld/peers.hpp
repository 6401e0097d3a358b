// SPDX-License-Identifier: MIT
/// The policies that those of policies/ are compared with, in one list, which CMakeLists.txt reads
/// too; and a choice from all at run time: `make_policy<any_policy_or_peer>("roco")`.
#pragma once

#include "kvmeld/kvmeld.hpp"
#include "kvmeld/peers/attention_matching.hpp"
#include "kvmeld/peers/cam.hpp"
#include "kvmeld/peers/centroids.hpp"
#include "kvmeld/peers/compactor.hpp"
#include "kvmeld/peers/dropkv.hpp"
#include "kvmeld/peers/expected_attention.hpp"
#include "kvmeld/peers/key_diff.hpp"
#include "kvmeld/peers/r_kv.hpp"
#include "kvmeld/peers/random_tokens.hpp"
#include "kvmeld/peers/roco.hpp"
#include "kvmeld/peers/scissorhands.hpp"
#include "kvmeld/peers/triattention.hpp"

namespace kvmeld::inline v0 {

/// Every policy of the library.
using any_policy_or_peer = any_policy_with<attention_matching, cam, centroids, compactor, dropkv,
                                           expected_attention, key_diff, r_kv, random_tokens, roco,
                                           scissorhands, triattention, massfold<dropkv>>;

}  // namespace kvmeld::inline v0

#if defined(KVMELD_COMPILED) && __has_include("kvmeld_compiled/peers.hpp")
#include "kvmeld_compiled/peers.hpp"  // what the target kvmeld::compiled has
#endif
#ifdef KVMELD_COMPILED
namespace kvmeld::inline v0 {

extern template class declared<massfold<dropkv>>;
extern template class declared<any_policy_or_peer>;
extern template class detail::head_policies<any_policy_or_peer>;
extern template class detail::open_heads<any_policy_or_peer>;
extern template class compressor<any_policy_or_peer>;
extern template any_policy_or_peer make_policy(std::string_view);
extern template void set_option(any_policy_or_peer&, std::string_view);
extern template std::string text(const any_policy_or_peer&);
extern template void validate(const any_policy_or_peer&);

}  // namespace kvmeld::inline v0
#endif
