#include "attention.h"
#include "cpu.h"
#include "simd.h"
#include "tiles.h"

namespace quartet {
namespace {

// Pages whose scores are held at a time.
constexpr int kChunkPages = 8;
constexpr int kChunk = kChunkPages * kPage;

struct Scratch {
    alignas(64) float scores[kQueryRows][kChunk];
    alignas(64) uint16_t weights[kQueryRows][kChunk];
    alignas(64) float largest[kQueryRows];
    alignas(64) float total[kQueryRows];
    const uint16_t* keys[kChunkPages];
    const uint16_t* values[kChunkPages];

    // After it: query bf16 [16][head_size], out float [16][head_size], one page of values.
    uint16_t* query() { return reinterpret_cast<uint16_t*>(this + 1); }
    float* out(int head_size) { return reinterpret_cast<float*>(query() + kQueryRows * head_size); }
    uint16_t* tail(int head_size) { return reinterpret_cast<uint16_t*>(out(head_size) + kQueryRows * head_size); }
};

// --- vectors --------------------------------------------------------------------------------------

template <int Rows>
void score_rows(const uint16_t* keys, const uint16_t* query, int head_size, float* out) {
    __m512 sum[Rows];
    for (auto& row : sum) row = _mm512_setzero_ps();
    for (int d = 0; d < head_size; d += 2) {
        const __m512i line = _mm512_loadu_si512(keys + d * kPage);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
            sum[r] = dot_bf16(sum[r], line, broadcast4(query + r * head_size + d));
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) _mm512_store_ps(out + r * kChunk, sum[r]);
}

void score_vectors(Scratch& s, int head_size, int rows, int num_pages) {
    for (int page = 0; page < num_pages; ++page) {
        int r = 0;
        for (; r + 4 <= rows; r += 4)
            score_rows<4>(s.keys[page], s.query() + r * head_size, head_size, &s.scores[r][page * kPage]);
        const uint16_t* query = s.query() + r * head_size;
        float* out = &s.scores[r < kQueryRows ? r : 0][page * kPage];
        switch (rows - r) {
            case 1: score_rows<1>(s.keys[page], query, head_size, out); break;
            case 2: score_rows<2>(s.keys[page], query, head_size, out); break;
            case 3: score_rows<3>(s.keys[page], query, head_size, out); break;
        }
    }
}

// Adds to 32 columns of `Rows` rows of out.
template <int Rows>
void mix_rows(const Scratch& s, int first_row, int head_size, int d, int num_pages, float* out) {
    __m512 sum[Rows][2];
    for (int r = 0; r < Rows; ++r)
        for (int h = 0; h < 2; ++h) sum[r][h] = _mm512_loadu_ps(out + r * head_size + d + h * 16);
    for (int page = 0; page < num_pages; ++page)
        for (int pair = 0; pair < kPage / 2; ++pair) {
            const uint16_t* line = s.values[page] + (pair * head_size + d) * 2;
            const __m512i v0 = _mm512_loadu_si512(line), v1 = _mm512_loadu_si512(line + 32);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const __m512i p = broadcast4(&s.weights[first_row + r][page * kPage + 2 * pair]);
                sum[r][0] = dot_bf16(sum[r][0], v0, p);
                sum[r][1] = dot_bf16(sum[r][1], v1, p);
            }
        }
    for (int r = 0; r < Rows; ++r)
        for (int h = 0; h < 2; ++h) _mm512_storeu_ps(out + r * head_size + d + h * 16, sum[r][h]);
}

void mix_vectors(Scratch& s, int head_size, int rows, int num_pages) {
    for (int d = 0; d < head_size; d += 32) {
        int r = 0;
        for (; r + 6 <= rows; r += 6) mix_rows<6>(s, r, head_size, d, num_pages, s.out(head_size) + r * head_size);
        float* out = s.out(head_size) + r * head_size;
        switch (rows - r) {
            case 1: mix_rows<1>(s, r, head_size, d, num_pages, out); break;
            case 2: mix_rows<2>(s, r, head_size, d, num_pages, out); break;
            case 3: mix_rows<3>(s, r, head_size, d, num_pages, out); break;
            case 4: mix_rows<4>(s, r, head_size, d, num_pages, out); break;
            case 5: mix_rows<5>(s, r, head_size, d, num_pages, out); break;
        }
    }
}

// --- tiles: 0-3 sums [rows, 16], 4 query [rows, 32], 5 keys, 6 weights [rows, 16], 7 values -------

void configure_attention_tiles(int rows) {
    if (current_tiles == rows) return;
    TileConfig config;
    for (int tile = 0; tile < 5; ++tile) config.set(tile, rows, 64);
    config.set(5, 16, 64);
    config.set(6, rows, 32);
    config.set(7, 8, 64);
    _tile_loadconfig(&config);
    current_tiles = rows;
}

void score_tiles(Scratch& s, int head_size, int num_pages) {
    for (int page = 0; page < num_pages; page += 4) {
        // Pages past the last repeat it: their scores are not looked at.
        const uint16_t* keys[4];
        for (int i = 0; i < 4; ++i) keys[i] = s.keys[page + i < num_pages ? page + i : num_pages - 1];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < head_size; d += 32) {
            _tile_loadd(4, s.query() + d, 2 * head_size);
            _tile_loadd(5, keys[0] + d * kPage, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(5, keys[1] + d * kPage, 64);
            _tile_dpbf16ps(1, 4, 5);
            _tile_loadd(5, keys[2] + d * kPage, 64);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(5, keys[3] + d * kPage, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        float* out = &s.scores[0][page * kPage];
        _tile_stored(0, out, 4 * kChunk);
        _tile_stored(1, out + 16, 4 * kChunk);
        _tile_stored(2, out + 32, 4 * kChunk);
        _tile_stored(3, out + 48, 4 * kChunk);
    }
}

void mix_tiles(Scratch& s, int head_size, int num_pages) {
    const long value_stride = 4L * head_size, out_stride = 4L * head_size;
    for (int d = 0; d < head_size; d += 32) {
        float* out = s.out(head_size) + d;
        _tile_loadd(0, out, out_stride);
        _tile_loadd(1, out + 16, out_stride);
        for (int page = 0; page < num_pages; ++page) {
            _tile_loadd(6, &s.weights[0][page * kPage], 2 * kChunk);
            _tile_loadd(7, s.values[page] + d * 2, value_stride);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, s.values[page] + (d + 16) * 2, value_stride);
            _tile_dpbf16ps(1, 6, 7);
        }
        _tile_stored(0, out, out_stride);
        _tile_stored(1, out + 16, out_stride);
    }
}

// --- softmax --------------------------------------------------------------------------------------

// One row's scores of positions [start, start + 16 * num_pages) become weights; those outside [low, high] weigh 0.
void weigh_row(Scratch& s, int row, int head_size, int num_pages, int start, int low, int high, float scale) {
    float* scores = s.scores[row];
    const __m512 minus_infinity = _mm512_set1_ps(-__builtin_inff());
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i lows = _mm512_set1_epi32(low), highs = _mm512_set1_epi32(high);
    const bool masked = start < low || start + num_pages * kPage - 1 > high;
    __m512 largest = minus_infinity;
    const __m512 factor = _mm512_set1_ps(scale * 1.44269504f);
    for (int page = 0; page < num_pages; ++page) {
        __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + page * kPage), factor);
        if (masked) {
            const __m512i positions = _mm512_add_epi32(_mm512_set1_epi32(start + page * kPage), lanes);
            const __mmask16 seen =
                _mm512_cmple_epi32_mask(positions, highs) & _mm512_cmpge_epi32_mask(positions, lows);
            x = _mm512_mask_mov_ps(minus_infinity, seen, x);
        }
        _mm512_store_ps(scores + page * kPage, x);
        // With NaN as the first operand max gives the second: NaN must reach the sum, and does through exp2 below.
        largest = _mm512_max_ps(x, largest);
    }
    const float before = s.largest[row];
    const float chunk_largest = _mm512_reduce_max_ps(largest);
    const float now = chunk_largest > before ? chunk_largest : before;
    __m512 sum = _mm512_setzero_ps();
    const bool none = now == -__builtin_inff();
    const __m512 base = _mm512_set1_ps(none ? 0.0f : now);
    for (int page = 0; page < num_pages; ++page) {
        const __m512 x = _mm512_load_ps(scores + page * kPage);
        const __mmask16 seen = _mm512_cmp_ps_mask(x, minus_infinity, _CMP_NEQ_UQ);
        __m512 weight = _mm512_maskz_mov_ps(seen, exp2_approx(_mm512_sub_ps(x, base)));
        // exp2_approx clamps NaN away.
        weight = _mm512_mask_mov_ps(weight, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
        sum = _mm512_add_ps(sum, weight);
        store_bf16(&s.weights[row][page * kPage], weight);
    }
    const float chunk_total = _mm512_reduce_add_ps(sum);
    if (now == before || before == -__builtin_inff()) {
        // Either the earlier rows keep their scale or there are none.
        s.total[row] += chunk_total;
    } else {
        const __m512 shrink = exp2_approx(_mm512_set1_ps(before - now));
        s.total[row] = s.total[row] * _mm512_cvtss_f32(shrink) + chunk_total;
        float* out = s.out(head_size) + row * head_size;
        for (int d = 0; d < head_size; d += 16) _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), shrink));
    }
    s.largest[row] = now;
}

}  // namespace

size_t attention_scratch_bytes(int head_size) {
    return sizeof(Scratch) + static_cast<size_t>(head_size) * (kQueryRows * (2 + 4) + kPage * 2) + 64;
}

void write_cache(const CacheShape& shape, uint16_t* keys, uint16_t* values, int64_t slot, int kv_head,
                 const uint16_t* key, const uint16_t* value) {
    const int lane = slot % kPage;
    const size_t head = slot / kPage * shape.page_elements() + kv_head * shape.head_elements();
    uint32_t* key_out = reinterpret_cast<uint32_t*>(keys + head) + lane;
    for (int d = 0; d < shape.head_size; d += 2) {
        uint32_t pair;
        __builtin_memcpy(&pair, key + d, 4);
        key_out[d / 2 * kPage] = pair;
    }
    // Another thread may write the other slot of the pair: only the own halves are stored.
    uint16_t* value_out = values + head + lane / 2 * shape.head_size * 2;
    const __mmask32 mine = lane % 2 ? 0xaaaaaaaa : 0x55555555;
    for (int d = 0; d < shape.head_size; d += 16) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(value + d)));
        wide = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
        _mm512_mask_storeu_epi16(value_out + 2 * d, mine, wide);
    }
}

void attend(const CacheShape& shape, const uint16_t* keys, const uint16_t* values, const AttentionTask& task,
            float scale, int isa, uint8_t* scratch) {
    Scratch& s = *reinterpret_cast<Scratch*>(scratch);
    const int head_size = shape.head_size, rows = task.num_tokens * task.num_heads;
    float* out = s.out(head_size);
    for (int t = 0; t < task.num_tokens; ++t)
        __builtin_memcpy(s.query() + t * task.num_heads * head_size, task.query + (size_t)t * task.token_stride,
                         sizeof(uint16_t) * task.num_heads * head_size);
    __builtin_memset(out, 0, sizeof(float) * rows * head_size);
    for (int r = 0; r < rows; ++r) s.largest[r] = -__builtin_inff(), s.total[r] = 0;

    const bool tiles = isa & kAmx;
    if (tiles) configure_attention_tiles(rows);
    const int last_position = task.first_position + task.num_tokens - 1;
    const int origin = task.window && task.first_position >= task.window ? task.first_position - task.window + 1 : 0;
    const int pages_per_block = shape.block_size / kPage;
    for (int first = origin / kPage; first <= last_position / kPage; first += kChunkPages) {
        const int left = last_position / kPage + 1 - first;
        const int num_pages = left < kChunkPages ? left : kChunkPages;
        for (int i = 0; i < num_pages; ++i) {
            const int page = first + i;
            const size_t at = ((size_t)task.block_table[page / pages_per_block] * pages_per_block +
                               page % pages_per_block) * shape.page_elements() +
                              task.kv_head * shape.head_elements();
            s.keys[i] = keys + at;
            s.values[i] = values + at;
            const int filled = task.seq_len - page * kPage;
            if (filled < kPage) {
                // Unwritten slots may hold NaN, which a weight of 0 does not take away.
                uint16_t* tail = s.tail(head_size);
                for (int pair = 0; pair < kPage / 2; ++pair) {
                    const __mmask32 kept = (filled > 2 * pair ? 0x55555555u : 0) | (filled > 2 * pair + 1 ? 0xaaaaaaaau : 0);
                    for (int d = 0; d < head_size; d += 16) {
                        const size_t offset = ((size_t)pair * head_size + d) * 2;
                        _mm512_storeu_si512(tail + offset, _mm512_maskz_loadu_epi16(kept, values + at + offset));
                    }
                }
                s.values[i] = tail;
            }
        }
        tiles ? score_tiles(s, head_size, num_pages) : score_vectors(s, head_size, rows, num_pages);
        for (int t = 0, row = 0; t < task.num_tokens; ++t) {
            const int high = task.first_position + t;
            const int low = task.window && high >= task.window ? high - task.window + 1 : 0;
            for (int h = 0; h < task.num_heads; ++h, ++row)
                weigh_row(s, row, head_size, num_pages, first * kPage, low, high, scale);
        }
        tiles ? mix_tiles(s, head_size, num_pages) : mix_vectors(s, head_size, rows, num_pages);
    }
    for (int t = 0, row = 0; t < task.num_tokens; ++t)
        for (int h = 0; h < task.num_heads; ++h, ++row) {
            const __m512 inverse = _mm512_set1_ps(1.0f / s.total[row]);
            uint16_t* target = task.out + (size_t)t * task.out_stride + h * head_size;
            for (int d = 0; d < head_size; d += 16)
                store_bf16(target + d, _mm512_mul_ps(_mm512_loadu_ps(out + row * head_size + d), inverse));
        }
}

}  // namespace quartet
