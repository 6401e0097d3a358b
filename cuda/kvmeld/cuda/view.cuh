// SPDX-License-Identifier: MIT
/// Views of a cache, of a policy's state and of plans in device memory, and the pages in use.
#pragma once

#include "kvmeld/cuda/memory/free_pages.cuh"
#include "kvmeld/cuda/memory/view.cuh"
