// SPDX-License-Identifier: MIT
/// The exception of a refused CUDA call.
#pragma once

#include "kvmeld/cuda/device/error.cuh"
