// What the instructions themselves reach, with operands in registers, and what memory gives: the bounds that
// measured figures are held against. Each function runs on its calling thread and returns operations or bytes a second.
#define _GNU_SOURCE
#include <immintrin.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Sixteen chains of one instruction, which do not wait for each other; `operations` of one instruction.
#define EACH(f, x) \
    f(0, x) f(1, x) f(2, x) f(3, x) f(4, x) f(5, x) f(6, x) f(7, x) \
    f(8, x) f(9, x) f(10, x) f(11, x) f(12, x) f(13, x) f(14, x) f(15, x)
#define ZERO(i, _) "vpxorq %%zmm" #i ", %%zmm" #i ", %%zmm" #i "\n\t"
#define NEXT(i, instruction) instruction " %%zmm31, %%zmm31, %%zmm" #i "\n\t"
#define USED(i, _) "xmm" #i,
// `zero` once, then `code` again and again, which runs `chains` instructions; then the registers that both overwrite.
#define MEASURE(name, cpu, chains, operations, zero, code, ...)                          \
    API __attribute__((target(cpu))) double name(double seconds) {                       \
        long rounds = 0;                                                                 \
        const double start = now();                                                      \
        double spent;                                                                    \
        do {                                                                             \
            long left = 20000;                                                           \
            __asm__ volatile(zero "1:\n\t" code "dec %0\n\tjnz 1b"                       \
                             : "+r"(left) : : __VA_ARGS__, "cc");                        \
            rounds += 20000;                                                             \
        } while ((spent = now() - start) < seconds);                                     \
        return (double)rounds * chains * operations / spent;                             \
    }
#define CHAINS(name, instruction, operations)                                            \
    MEASURE(name, "avx512f", 16, operations, EACH(ZERO, ) ZERO(31, ),                    \
            EACH(NEXT, instruction), EACH(USED, ) "xmm31")

CHAINS(fp32_avx512, "vfmadd231ps", 32)
CHAINS(bf16_avx512, "vdpbf16ps", 64)
CHAINS(int8_avx512, "vpdpbusd", 128)

// The same for the sixteen registers of AVX2.
#define EACH_OLD(f, x) \
    f(0, x) f(1, x) f(2, x) f(3, x) f(4, x) f(5, x) f(6, x) f(7, x) f(8, x) f(9, x) f(10, x) f(11, x)
#define ZERO_OLD(i, _) "vpxor %%ymm" #i ", %%ymm" #i ", %%ymm" #i "\n\t"
#define NEXT_OLD(i, instruction) instruction " %%ymm15, %%ymm15, %%ymm" #i "\n\t"
#define CHAINS_OLD(name, instruction, operations)                                        \
    MEASURE(name, "avx2", 12, operations, EACH_OLD(ZERO_OLD, ) ZERO_OLD(15, ),           \
            EACH_OLD(NEXT_OLD, instruction), EACH_OLD(USED, ) "xmm15")

CHAINS_OLD(fp32_avx2, "vfmadd231ps", 16)
CHAINS_OLD(int8_avx2, "vpmaddubsw", 64)
CHAINS_OLD(int8_avxvnni, "%{vex%} vpdpbusd", 64)

struct tile_config {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
};

__attribute__((target("amx-tile"))) static int open_tiles(void) {
    const long request_permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, request_permission, tile_data)) return 0;
    struct tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 takes the next line to read 8 bytes only
    _tile_loadconfig(&config);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
    return 1;
}

// 16 x 16 results of 64 bytes each.
#define TILES(name, isa, product, operations)                                         \
    API __attribute__((target("amx-tile," isa))) double name(double seconds) {        \
        if (!open_tiles()) return 0;                                                  \
        long rounds = 0;                                                              \
        const double start = now();                                                   \
        double spent;                                                                 \
        do {                                                                          \
            for (int k = 0; k < 5000; ++k) {                                          \
                product(0, 4, 6); product(1, 4, 7); product(2, 5, 6); product(3, 5, 7); \
            }                                                                         \
            rounds += 5000;                                                           \
        } while ((spent = now() - start) < seconds);                                  \
        _tile_release();                                                              \
        return (double)rounds * 4 * operations / spent;                               \
    }

TILES(bf16_amx, "amx-bf16", _tile_dpbf16ps, 16384)
TILES(int8_amx, "amx-int8", _tile_dpbssd, 32768)

// Memory of the calling thread's own, in huge pages where the system gives them; read with prefetches far ahead.
API __attribute__((target("avx2"))) double read_memory(double seconds) {
    enum { kBytes = 256 << 20, kHuge = 2 << 20, kAhead = 4096 };
    char* mapped = mmap(0, kBytes + 2 * kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return 0;
    char* data = (char*)(((size_t)mapped + kHuge - 1) & ~(size_t)(kHuge - 1));
    madvise(data, kBytes, MADV_HUGEPAGE);
    memset(data, 1, kBytes);
    __m256i sums[8];
    for (int i = 0; i < 8; ++i) sums[i] = _mm256_setzero_si256();
    long rounds = 0;
    const double start = now();
    double spent;
    do {
        for (size_t at = 0; at < kBytes; at += 256) {
            for (int i = 0; i < 4; ++i) {
                _mm_prefetch(data + at + kAhead + 64 * i, _MM_HINT_T0);
                const __m256i* line = (const __m256i*)(data + at + 64 * i);
                sums[2 * i] = _mm256_add_epi32(sums[2 * i], _mm256_load_si256(line));
                sums[2 * i + 1] = _mm256_add_epi32(sums[2 * i + 1], _mm256_load_si256(line + 1));
            }
        }
        ++rounds;
    } while ((spent = now() - start) < seconds);
    for (int i = 0; i < 8; ++i) __asm__ volatile("" : : "x"(sums[i]));
    munmap(mapped, kBytes + 2 * kHuge);
    return (double)rounds * kBytes / spent;
}
