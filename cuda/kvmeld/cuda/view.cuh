// SPDX-License-Identifier: MIT
/// Views of a cache, of a policy's state and of plans in device memory.
#pragma once

#include "kvmeld/cuda/memory/view.cuh"
