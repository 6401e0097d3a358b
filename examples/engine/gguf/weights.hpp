// SPDX-License-Identifier: MIT
/// A decoder's parameters, from the tensors of a GGUF file.
#pragma once

#include "engine/gguf/config.hpp"
#include "engine/weights.hpp"

namespace engine::gguf {

weights read_weights(const file& from, const architecture& a);

}  // namespace engine::gguf
