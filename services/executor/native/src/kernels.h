// The kernels of one instruction set.
#pragma once

#include "attention.h"
#include "matrix.h"
#include "rows.h"
#include "sampling.h"

namespace quartet {

struct Kernels {
    const RowKernels& rows;
    const ProductKernels& products;
    const AttentionKernels& attention;
    const SamplingKernels& sampling;
};

// The widest of `isa`, a mask of Isa that has kAvx512Bf16 or kAvx2.
const Kernels& kernels_for(int isa);

}  // namespace quartet
