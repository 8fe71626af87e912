#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace quartet {
namespace {

unsigned long long xcr0() {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<unsigned long long>(high) << 32) | low;
}

bool may_use_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

int detect() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    const unsigned long long enabled = xcr0();
    constexpr unsigned long long kZmmState = 0xe6, kTileState = 0x60000;
    if ((enabled & kZmmState) != kZmmState || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    constexpr unsigned kFoundation = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    const bool base = (b & kFoundation) == kFoundation && (b & 1u << 8);         // and BMI2
    const bool vnni = c & 1u << 11;  // on every CPU with BF16
    const bool amx = (d & 1u << 22) && (d & 1u << 24);
    if (!base || !vnni || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return 0;
    int isa = kAvx512Bf16 | kVnni;
    if (amx && (enabled & kTileState) == kTileState && may_use_amx()) isa |= kAmx;
    return isa;
}

}  // namespace

int detect_isa() {
    static const int isa = detect();
    return isa;
}

}  // namespace quartet
