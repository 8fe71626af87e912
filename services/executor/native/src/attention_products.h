// The two products of attention, for up to 16 query rows against a chunk of pages.
#pragma once

#include <cstdint>

#include "attention.h"
#include "simd.h"

namespace quartet::QUARTET_ISA {

// Pages whose scores are held at a time.
constexpr int kChunkPages = 8;
constexpr int kBlockRows = 16;
constexpr int kFewTileRows = 8;
// Scores' rows a power of two apart would share few sets of the first cache.
constexpr int kScoreStride = kChunkPages * kPage + 16;

// One block of rows and one chunk of pages.
struct Chunk {
    const Operand* query = nullptr;          // [16][head_size]
    float* out = nullptr;                    // [16][head_size]
    float* scores = nullptr;                 // [16][kScoreStride]
    Operand* weights = nullptr;              // [16][kScoreStride]
    const uint16_t* const* keys = nullptr;   // each page's; kChunkPages, past num_pages any page's
    const uint16_t* const* values = nullptr;
    const uint16_t* const* next_keys = nullptr;  // what is read after this chunk; kChunkPages
    bool asks = false;  // whether it asks for what comes next
    int head_size = 0;
    int num_rows = 0;
    int num_pages = 0;
};

// Asks for a line that comes next while another is worked on.
inline void ask(const uint16_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0); }

// scores = query x keys^T; those of pages past num_pages may be anything.
void score_vectors(const Chunk& chunk);
void score_tiles(const Chunk& chunk);
// out += weights x values.
void mix_vectors(const Chunk& chunk);
void mix_tiles(const Chunk& chunk);

}  // namespace quartet::QUARTET_ISA
