#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

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

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned part = 0) {
    Registers r;
    if (!__get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d)) return {};
    return r;
}

bool has(unsigned word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!(word >> bit & 1)) return false;
    return true;
}

int detect() {
    const Registers base = cpuid(1), more = cpuid(7), newest = cpuid(7, 1);
    constexpr int kOsxsave = 27, kFma = 12, kF16c = 29, kAvx = 28;
    constexpr unsigned long long kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;
    if (!has(base.c, {kOsxsave})) return 0;
    const unsigned long long enabled = xcr0();
    if ((enabled & kYmmState) != kYmmState || !has(base.c, {kAvx, kFma, kF16c})) return 0;
    int isa = 0;
    if (has(more.b, {5})) isa |= kAvx2;
    if ((isa & kAvx2) && has(newest.a, {4})) isa |= kAvxVnni;
    // F, DQ, BW, VL and BMI2; VNNI is on every CPU with BF16.
    const bool has_registers = (enabled & kZmmState) == kZmmState;
    if (!has_registers || !has(more.b, {16, 17, 30, 31, 8}) || !has(more.c, {11}) || !has(newest.a, {5})) return isa;
    isa |= kAvx512Bf16 | kVnni;
    if (has(more.d, {22, 24, 25}) && (enabled & kTileState) == kTileState && may_use_amx()) isa |= kAmx;
    return isa;
}

}  // namespace

int detect_isa() {
    static const int isa = detect();
    return isa;
}

}  // namespace quartet
