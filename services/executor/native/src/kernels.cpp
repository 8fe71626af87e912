#include "kernels.h"

#include "cpu.h"

namespace quartet {
namespace {

constexpr Kernels kAvx512Kernels = {avx512::kRows, avx512::kProducts, avx512::kAttention, avx512::kSampling};
constexpr Kernels kAvx2Kernels = {avx2::kRows, avx2::kProducts, avx2::kAttention, avx2::kSampling};

}  // namespace

const Kernels& kernels_for(int isa) { return isa & kAvx512Bf16 ? kAvx512Kernels : kAvx2Kernels; }

}  // namespace quartet
