#include "attention.h"

#include "attention_products.h"
#include "cpu.h"
#include "simd.h"

namespace quartet {
namespace {

// Up to so many rows vectors are the faster ones, with AMX at hand: a tile of few rows costs as much as a full one.
constexpr int kVectorRows = 6;
constexpr float kMinusInfinity = -__builtin_inff();
// Powers of two that a score may be above the row's base before what was summed is scaled down to a new one.
constexpr float kSlack = 6.0f;

struct Scratch {
    alignas(64) float scores[kBlockRows * kScoreStride];
    alignas(64) uint16_t weights[kBlockRows * kScoreStride];
    alignas(64) float total[kQueryRows][16];  // lanes not yet added up
    float base[kQueryRows];                   // what weights are relative to, a power of two's exponent

    // After it: query bf16 [kQueryRows][head_size], out float [kQueryRows][head_size], one page of values.
    uint16_t* query() { return reinterpret_cast<uint16_t*>(this + 1); }
    float* out(int head_size) { return reinterpret_cast<float*>(query() + kQueryRows * head_size); }
    uint16_t* tail(int head_size) { return reinterpret_cast<uint16_t*>(out(head_size) + kQueryRows * head_size); }
};

// 2^x to about 1e-4, less than bf16 rounds away. 0 of -infinity, NaN of NaN.
inline __m512 exp2_weight(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0.07802452f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.22606716f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69583354f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992520f));
    return _mm512_scalef_ps(p, x);
}

// Positions [low, high] that a row sees of a chunk's [0, 16 * num_pages): its pages [first_page, end_page).
struct Seen {
    int low, high, first_page, end_page;

    Seen(int low_, int high_, int num_pages)
        : low(low_),
          high(high_),
          first_page(low_ <= 0 ? 0 : low_ < num_pages * kPage ? low_ / kPage : num_pages),
          end_page(high_ < 0 ? 0 : high_ / kPage < num_pages ? high_ / kPage + 1 : num_pages) {
        if (first_page > end_page) first_page = end_page;
    }
    // The lanes of a page that are seen.
    __mmask16 lanes(int page) const {
        const int start = page * kPage;
        return first_lanes(high + 1 - start) & static_cast<__mmask16>(~first_lanes(low - start));
    }
};

// Scores that are not seen, of pages that partly are, become -infinity.
void mask_row(float* scores, const Seen& seen) {
    if (seen.first_page == seen.end_page) return;
    const __m512 hidden = _mm512_set1_ps(kMinusInfinity);
    const int first = seen.first_page, last = seen.end_page - 1;
    _mm512_mask_storeu_ps(scores + first * kPage, static_cast<__mmask16>(~seen.lanes(first)), hidden);
    _mm512_mask_storeu_ps(scores + last * kPage, static_cast<__mmask16>(~seen.lanes(last)), hidden);
}

// One row's scores become weights; what was summed up before is scaled where the base changes.
void weigh_row(const float* scores, uint16_t* weights, int num_pages, const Seen& seen, float factor, float& base,
               float* total, float* out, int head_size) {
    __m512 largest = _mm512_set1_ps(kMinusInfinity);
    // With NaN as the first operand max gives the second: NaN must reach the sum, and does through exp2 below.
    for (int page = seen.first_page; page < seen.end_page; ++page)
        largest = _mm512_max_ps(_mm512_load_ps(scores + page * kPage), largest);
    largest = _mm512_mul_ps(largest, _mm512_set1_ps(factor));
    __m512 sum = _mm512_load_ps(total);
    if (_mm512_cmp_ps_mask(largest, _mm512_set1_ps(base + kSlack), _CMP_GT_OQ)) {
        const float now = _mm512_reduce_max_ps(largest);
        if (base != kMinusInfinity) {
            const __m512 shrink = exp2_approx(_mm512_set1_ps(base - now));
            sum = _mm512_mul_ps(sum, shrink);
            for (int d = 0; d < head_size; d += 16)
                _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), shrink));
        }
        base = now;
    }
    const __m512 factors = _mm512_set1_ps(factor), bases = _mm512_set1_ps(base == kMinusInfinity ? 0.0f : base);
    int page = 0;
    for (; page < seen.first_page; ++page) store_bf16(weights + page * kPage, _mm512_setzero_ps());
    for (; page < seen.end_page; ++page) {
        const __m512 weight = exp2_weight(_mm512_fmsub_ps(_mm512_load_ps(scores + page * kPage), factors, bases));
        sum = _mm512_add_ps(sum, weight);
        store_bf16(weights + page * kPage, weight);
    }
    for (; page < num_pages; ++page) store_bf16(weights + page * kPage, _mm512_setzero_ps());
    _mm512_store_ps(total, sum);
}

// A copy of a page's values, zeros from slot `filled` on: what was never written may be NaN, which a weight of 0 does
// not take away.
void copy_filled(const uint16_t* values, int filled, int head_size, uint16_t* out) {
    for (int pair = 0; pair < kPage / 2; ++pair) {
        const __mmask32 kept = (filled > 2 * pair ? 0x55555555u : 0) | (filled > 2 * pair + 1 ? 0xaaaaaaaau : 0);
        for (int d = 0; d < 2 * head_size; d += 32) {
            const size_t at = static_cast<size_t>(pair) * 2 * head_size + d;
            _mm512_storeu_si512(out + at, _mm512_maskz_loadu_epi16(kept, values + at));
        }
    }
}

// Where a task's pages are.
struct Pages {
    const CacheShape& shape;
    const AttentionTask& task;
    const uint16_t* pool;
    const int per_block = shape.block_size / kPage;

    // kChunkPages of them, the last one again where there are no more.
    void find(int first, int kv_head, const uint16_t** out) const {
        for (int i = 0; i < kChunkPages; ++i) {
            const int page = first + i < task.end_page ? first + i : task.end_page - 1;
            const size_t block = task.block_table[page / per_block];
            out[i] = pool + (block * per_block + page % per_block) * shape.page_elements() +
                     (task.kv_head + kv_head) * shape.head_elements();
        }
    }
};

// One KV head's query rows, from `first_row` of the task's on, against the chunk that starts at page `first`.
void attend_chunk(const AttentionTask& task, float factor, bool tiles, int first_row, int first, Chunk chunk, Scratch& s) {
    const int rows = task.num_tokens * task.num_heads, head_size = chunk.head_size, start = first * kPage;
    for (int row = 0; row < rows; row += kBlockRows) {
        chunk.query = s.query() + (first_row + row) * head_size;
        chunk.out = s.out(head_size) + (first_row + row) * head_size;
        chunk.num_rows = rows - row < kBlockRows ? rows - row : kBlockRows;
        chunk.asks = row == 0;
        tiles ? score_tiles(chunk) : score_vectors(chunk);
        for (int r = 0; r < chunk.num_rows; ++r) {
            const int high = task.first_position + (row + r) / task.num_heads;
            const int low = task.window ? high - task.window + 1 : 0;
            const Seen seen(low - start, high - start, chunk.num_pages);
            float* scores = chunk.scores + r * kScoreStride;
            mask_row(scores, seen);
            weigh_row(scores, chunk.weights + r * kScoreStride, chunk.num_pages, seen, factor,
                      s.base[first_row + row + r], s.total[first_row + row + r], chunk.out + r * head_size, head_size);
        }
        tiles ? mix_tiles(chunk) : mix_vectors(chunk);
    }
}

// body(row, token, offset of the row's head within the token) for the task's rows, [KV heads][tokens][heads]; a KV
// head's first is a multiple of rows_per_kv.
template <class Body>
void for_rows(const AttentionTask& task, int rows_per_kv, int head_size, const Body& body) {
    for (int k = 0; k < task.num_kv_heads; ++k) {
        int row = k * rows_per_kv;
        for (int t = 0; t < task.num_tokens; ++t)
            for (int h = 0; h < task.num_heads; ++h) body(row++, t, (k * task.num_heads + h) * head_size);
    }
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
    const int head_size = shape.head_size;
    const bool tiles = (isa & kAmx) && task.num_tokens * task.num_heads > kVectorRows;
    // Tiles write whole blocks of rows, so that the next KV head's start a new one.
    const int block = tiles ? kBlockRows : 1, rows_per_kv = (task.num_tokens * task.num_heads + block - 1) / block * block;
    const int rows = task.num_kv_heads * rows_per_kv;
    float* out = s.out(head_size);
    for_rows(task, rows_per_kv, head_size, [&](int row, int token, int offset) {
        __builtin_memcpy(s.query() + row * head_size, task.query + static_cast<size_t>(token) * task.token_stride + offset,
                         sizeof(uint16_t) * head_size);
        s.base[row] = kMinusInfinity;
    });
    __builtin_memset(out, 0, sizeof(float) * rows * head_size);
    __builtin_memset(s.total, 0, sizeof s.total[0] * rows);

    const Pages key_pages{shape, task, keys}, value_pages{shape, task, values};
    const uint16_t *key_lists[2][kChunkPages], *value_list[kChunkPages];
    key_pages.find(task.first_page, 0, key_lists[0]);
    Chunk chunk;
    chunk.scores = s.scores;
    chunk.weights = s.weights;
    chunk.values = value_list;
    chunk.head_size = head_size;
    int turn = 0;
    for (int first = task.first_page; first < task.end_page; first += kChunkPages) {
        chunk.num_pages = task.end_page - first < kChunkPages ? task.end_page - first : kChunkPages;
        const int last = first + chunk.num_pages - 1, filled = task.seq_len - last * kPage;
        for (int k = 0; k < task.num_kv_heads; ++k, turn ^= 1) {
            chunk.keys = key_lists[turn];
            chunk.next_keys = key_lists[turn ^ 1];
            const bool stays = k + 1 < task.num_kv_heads;
            key_pages.find(stays ? first : first + kChunkPages, stays ? k + 1 : 0, key_lists[turn ^ 1]);
            value_pages.find(first, k, value_list);
            if (filled < kPage) {
                copy_filled(value_list[last - first], filled, head_size, s.tail(head_size));
                value_list[last - first] = s.tail(head_size);
            }
            attend_chunk(task, scale * 1.44269504f, tiles, k * rows_per_kv, first, chunk, s);
        }
    }
    float* partial = task.partial;
    for_rows(task, rows_per_kv, head_size, [&](int row, int token, int offset) {
        const float total = _mm512_reduce_add_ps(_mm512_load_ps(s.total[row]));
        const float* sum = out + row * head_size;
        if (partial) {
            __builtin_memcpy(partial, sum, sizeof(float) * head_size);
            partial[head_size] = s.base[row];
            partial[head_size + 1] = total;
            partial += shape.partial_stride();
            return;
        }
        const __m512 inverse = _mm512_set1_ps(1.0f / total);
        uint16_t* target = task.out + static_cast<size_t>(token) * task.out_stride + offset;
        for (int d = 0; d < head_size; d += 16)
            store_bf16(target + d, _mm512_mul_ps(_mm512_loadu_ps(sum + d), inverse));
    });
}

void merge_partials(const CacheShape& shape, const float* partial, size_t split_stride, int num_splits, uint16_t* out) {
    const int head_size = shape.head_size;
    float largest = kMinusInfinity, total = 0;
    for (int split = 0; split < num_splits; ++split) {
        const float base = partial[split * split_stride + head_size];
        if (base > largest) largest = base;
    }
    alignas(64) float sum[512] = {};
    for (int split = 0; split < num_splits; ++split, partial += split_stride) {
        // A split that saw none of its keys has weights of 0 and a base of -infinity.
        if (partial[head_size] == kMinusInfinity && partial[head_size + 1] == 0) continue;
        const __m512 factor = exp2_approx(_mm512_set1_ps(partial[head_size] - largest));
        total += _mm512_cvtss_f32(factor) * partial[head_size + 1];
        for (int d = 0; d < head_size; d += 16)
            _mm512_store_ps(sum + d, _mm512_fmadd_ps(_mm512_loadu_ps(partial + d), factor, _mm512_load_ps(sum + d)));
    }
    const __m512 inverse = _mm512_set1_ps(1.0f / total);
    for (int d = 0; d < head_size; d += 16) store_bf16(out + d, _mm512_mul_ps(_mm512_load_ps(sum + d), inverse));
}

}  // namespace quartet
