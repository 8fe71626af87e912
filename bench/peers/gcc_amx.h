/* GCC 12's AMX intrinsics do not say that they read memory, so the compiler drops the stores before them and
   llama.cpp crashes. These say so. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>
#undef _tile_loadconfig
#undef _tile_loadd_internal
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])(config)) : "memory")
#define _tile_loadd_internal(tile, base, stride)                                                     \
    __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm" #tile ::"r"((const void *)(base)), "r"((long)(stride)) : "memory")
#endif
