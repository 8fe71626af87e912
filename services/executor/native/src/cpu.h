#pragma once

namespace quartet {

// What the kernels may use. Bits of the ABI: append only.
enum Isa : int {
    kAvx512Bf16 = 1,  // AVX-512 F, BW, VL, DQ and BF16
    kVnni = 2,        // AVX-512 VNNI
    kAmx = 4,         // AMX tiles with bf16 and int8, and the kernel's leave to use them
    kAvx2 = 8,        // AVX2, FMA, F16C
    kAvxVnni = 16,    // AVX-VNNI, beside AVX2
};

// What this CPU and kernel have, as a mask of Isa. Asks the kernel for AMX the first time.
int detect_isa();

}  // namespace quartet
