/// The exception of a refused CUDA call.
#pragma once

#include "kvfold/cuda/device/error.cuh"
