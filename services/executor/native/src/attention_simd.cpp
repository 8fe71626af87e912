#include "attention.h"

#include "attention_products.h"
#include "cpu.h"
#include "simd.h"

namespace quartet::QUARTET_ISA {
namespace {

// Up to so many rows vectors are the faster ones, with AMX at hand: a tile of few rows costs as much as a full one.
constexpr int kVectorRows = 2;
constexpr float kMinusInfinity = -__builtin_inff();
// Powers of two that a score may be above the row's base before what was summed is scaled down to a new one.
constexpr float kSlack = 6.0f;

struct Scratch {
    alignas(64) float scores[kBlockRows * kScoreStride];
    alignas(64) Operand weights[kBlockRows * kScoreStride];
    alignas(64) float total[kQueryRows][16];  // lanes not yet added up
    float base[kQueryRows];                   // what weights are relative to, a power of two's exponent

    // After it: query [kQueryRows][head_size], out float [kQueryRows][head_size], one page of values.
    Operand* query() { return reinterpret_cast<Operand*>(this + 1); }
    float* out(int head_size) { return reinterpret_cast<float*>(query() + kQueryRows * head_size); }
    uint16_t* tail(int head_size) { return reinterpret_cast<uint16_t*>(out(head_size) + kQueryRows * head_size); }
};

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
    Mask lanes(int page) const {
        const int start = page * kPage;
        return both(first_lanes(high + 1 - start), inverse(first_lanes(low - start)));
    }
};

// Scores that are not seen, of pages that partly are, become -infinity.
void mask_row(float* scores, const Seen& seen) {
    if (seen.first_page == seen.end_page) return;
    const Floats hidden = all(kMinusInfinity);
    const int first = seen.first_page, last = seen.end_page - 1;
    store_where(scores + first * kPage, inverse(seen.lanes(first)), hidden);
    store_where(scores + last * kPage, inverse(seen.lanes(last)), hidden);
}

// One row's scores become weights; what was summed up before is scaled where the base changes.
void weigh_row(const float* scores, Operand* weights, int num_pages, const Seen& seen, float factor, float& base,
               float* total, float* out, int head_size) {
    Floats most = all(kMinusInfinity);
    // With NaN as the first operand max gives the second: NaN must reach the sum, and does through exp2 below.
    for (int page = seen.first_page; page < seen.end_page; ++page) most = max(load(scores + page * kPage), most);
    most = mul(most, all(factor));
    Floats weight_sum = load(total);
    if (bits(less(all(base + kSlack), most))) {
        const float now = largest(most);
        if (base != kMinusInfinity) {
            const Floats shrink = exp2_approx(all(base - now));
            weight_sum = mul(weight_sum, shrink);
            for (int d = 0; d < head_size; d += 16) store(out + d, mul(load(out + d), shrink));
        }
        base = now;
    }
    const Floats factors = all(factor), bases = all(base == kMinusInfinity ? 0.0f : base);
    int page = 0;
    for (; page < seen.first_page; ++page) store_operands(weights + page * kPage, zeros());
    for (; page < seen.end_page; ++page) {
        const Floats weight = exp2_weight(fms(load(scores + page * kPage), factors, bases));
        weight_sum = add(weight_sum, weight);
        store_operands(weights + page * kPage, weight);
    }
    for (; page < num_pages; ++page) store_operands(weights + page * kPage, zeros());
    store(total, weight_sum);
}

// A copy of a page's values, zeros from slot `filled` on: what was never written may be NaN, which a weight of 0 does
// not take away.
void copy_filled(const uint16_t* values, int filled, int head_size, uint16_t* out) {
    for (int pair = 0; pair < kPage / 2; ++pair) {
        const Ints kept = all_ints((filled > 2 * pair ? 0xffff : 0) | (filled > 2 * pair + 1 ? ~0xffff : 0));
        for (int d = 0; d < 2 * head_size; d += 32) {
            const size_t at = static_cast<size_t>(pair) * 2 * head_size + d;
            store_ints(out + at, bits_and(load_ints(values + at), kept));
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
            out[i] = pool + (block * per_block + page % per_block) * shape.page_stride() +
                     (task.kv_head + kv_head) * shape.head_stride();
        }
    }
};

void score(const Chunk& chunk, bool tiles) {
    if constexpr (kHasTiles)
        if (tiles) return score_tiles(chunk);
    score_vectors(chunk);
}

void mix(const Chunk& chunk, bool tiles) {
    if constexpr (kHasTiles)
        if (tiles) return mix_tiles(chunk);
    mix_vectors(chunk);
}

// One KV head's query rows, from `first_row` of the task's on, against the chunk that starts at page `first`.
void attend_chunk(const AttentionTask& task, float factor, bool tiles, int first_row, int first, Chunk chunk,
                  Scratch& s) {
    const int rows = task.num_tokens * task.num_heads, head_size = chunk.head_size, start = first * kPage;
    for (int row = 0; row < rows; row += kBlockRows) {
        chunk.query = s.query() + (first_row + row) * head_size;
        chunk.out = s.out(head_size) + (first_row + row) * head_size;
        chunk.num_rows = rows - row < kBlockRows ? rows - row : kBlockRows;
        chunk.asks = row == 0;
        score(chunk, tiles);
        for (int r = 0; r < chunk.num_rows; ++r) {
            const int high = task.first_position + (row + r) / task.num_heads;
            const int low = task.window ? high - task.window + 1 : 0;
            const Seen seen(low - start, high - start, chunk.num_pages);
            float* scores = chunk.scores + r * kScoreStride;
            mask_row(scores, seen);
            weigh_row(scores, chunk.weights + r * kScoreStride, chunk.num_pages, seen, factor,
                      s.base[first_row + row + r], s.total[first_row + row + r], chunk.out + r * head_size, head_size);
        }
        mix(chunk, tiles);
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

size_t scratch_bytes(int head_size) {
    return sizeof(Scratch) + static_cast<size_t>(head_size) * (kQueryRows * (sizeof(Operand) + 4) + kPage * 2) + 64;
}

void write_cache(const CacheShape& shape, uint16_t* pool, int64_t slot, int kv_head, const uint16_t* key,
                 const uint16_t* value) {
    const int lane = slot % kPage;
    uint16_t* head = pool + slot / kPage * shape.page_stride() + kv_head * shape.head_stride();
    uint32_t* key_out = reinterpret_cast<uint32_t*>(head) + lane;
    for (int d = 0; d < shape.head_size; d += 2) {
        uint32_t pair;
        __builtin_memcpy(&pair, key + d, 4);
        key_out[d / 2 * kPage] = pair;
    }
    // Another thread may write the other slot of the pair: only the own halves are stored.
    uint16_t* value_out = head + shape.values_offset() + lane / 2 * shape.head_size * 2;
    for (int d = 0; d < shape.head_size; d += 16) store_every_second(value_out + 2 * d, value + d, lane % 2);
}

void attend(const CacheShape& shape, const uint16_t* pool, const AttentionTask& task, float scale, int isa,
            uint8_t* scratch) {
    Scratch& s = *reinterpret_cast<Scratch*>(scratch);
    const int head_size = shape.head_size;
    const bool tiles = kHasTiles && (isa & kAmx) && task.num_tokens * task.num_heads > kVectorRows;
    // Tiles write whole blocks of rows, so that the next KV head's start a new one.
    const int block = tiles ? kBlockRows : 1, rows_per_kv = (task.num_tokens * task.num_heads + block - 1) / block * block;
    const int rows = task.num_kv_heads * rows_per_kv;
    float* out = s.out(head_size);
    for_rows(task, rows_per_kv, head_size, [&](int row, int token, int offset) {
        copy_operands(s.query() + row * head_size, task.query + static_cast<size_t>(token) * task.token_stride + offset,
                      head_size);
        s.base[row] = kMinusInfinity;
    });
    __builtin_memset(out, 0, sizeof(float) * rows * head_size);
    __builtin_memset(s.total, 0, sizeof s.total[0] * rows);

    const Pages pages{shape, task, pool};
    const uint16_t *key_lists[2][kChunkPages], *value_list[kChunkPages];
    pages.find(task.first_page, 0, key_lists[0]);
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
            pages.find(stays ? first : first + kChunkPages, stays ? k + 1 : 0, key_lists[turn ^ 1]);
            for (int i = 0; i < kChunkPages; ++i) value_list[i] = chunk.keys[i] + shape.values_offset();
            if (filled < kPage) {
                copy_filled(value_list[last - first], filled, head_size, s.tail(head_size));
                value_list[last - first] = s.tail(head_size);
            }
            attend_chunk(task, scale * 1.44269504f, tiles, k * rows_per_kv, first, chunk, s);
        }
    }
    float* partial = task.partial;
    for_rows(task, rows_per_kv, head_size, [&](int row, int token, int offset) {
        const float total = sum(load(s.total[row]));
        const float* mixed = out + row * head_size;
        if (partial) {
            __builtin_memcpy(partial, mixed, sizeof(float) * head_size);
            partial[head_size] = s.base[row];
            partial[head_size + 1] = total;
            partial += shape.partial_stride();
            return;
        }
        const Floats inverse_total = all(1.0f / total);
        uint16_t* target = task.out + static_cast<size_t>(token) * task.out_stride + offset;
        for (int d = 0; d < head_size; d += 16) store_bf16(target + d, mul(load(mixed + d), inverse_total));
    });
}

void merge_partials(const CacheShape& shape, const float* partial, size_t split_stride, int num_splits, uint16_t* out) {
    const int head_size = shape.head_size;
    float most = kMinusInfinity, total = 0;
    for (int split = 0; split < num_splits; ++split) {
        const float base = partial[split * split_stride + head_size];
        if (base > most) most = base;
    }
    alignas(64) float mixed[512] = {};
    for (int split = 0; split < num_splits; ++split, partial += split_stride) {
        // A split that saw none of its keys has weights of 0 and a base of -infinity.
        if (partial[head_size] == kMinusInfinity && partial[head_size + 1] == 0) continue;
        const Floats factor = exp2_approx(all(partial[head_size] - most));
        total += first(factor) * partial[head_size + 1];
        for (int d = 0; d < head_size; d += 16) store(mixed + d, fma(load(partial + d), factor, load(mixed + d)));
    }
    const Floats inverse_total = all(1.0f / total);
    for (int d = 0; d < head_size; d += 16) store_bf16(out + d, mul(load(mixed + d), inverse_total));
}

}  // namespace

const AttentionKernels kAttention = {scratch_bytes, write_cache, attend, merge_partials};

}  // namespace quartet::QUARTET_ISA
