// Causal attention over a paged cache of bf16 keys and values.
//
// The pool of a layer is cut into pages of 16 slots, in block order (block_size is a multiple of 16); of each page
// and KV head the keys are [head_size / 2][16 slots][2] and then the values [8 slot pairs][head_size][2], so that both
// products read whole lines without a transposition, and what belongs together is one run of memory: hardware fetches
// ahead within 4 KiB.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quartet {

constexpr int kPage = 16;
// Query rows (tokens x heads that share a KV head) of one call.
constexpr int kQueryRows = 64;

struct CacheShape {
    int num_kv_heads = 0;
    int head_size = 0;  // a multiple of 32
    int block_size = 0;

    // Elements from a page to the next, from a KV head of a page to the next, and from its keys to its values.
    size_t page_stride() const { return num_kv_heads * head_stride(); }
    size_t head_stride() const { return 2 * values_offset(); }
    size_t values_offset() const { return static_cast<size_t>(kPage) * head_size; }
    // Of a partial result's row: its sum of weighted values, then its largest score and its sum of weights.
    int partial_stride() const { return head_size + kPage; }
};

// One sequence's stretch of tokens against some pages, for one KV head or some that follow each other.
struct AttentionTask {
    // bf16; token t's query head h of KV head k is at query + t * token_stride + (k * num_heads + h) * head_size, with k
    // and h counted from the first of the task.
    const uint16_t* query = nullptr;
    uint16_t* out = nullptr;          // the same layout with out_stride
    float* partial = nullptr;         // instead of out, [KV heads, num_tokens, num_heads, partial_stride], see below
    int token_stride = 0;
    int out_stride = 0;
    int num_tokens = 0;
    int num_heads = 0;                // query heads of a KV head
    int kv_head = 0;                  // the first one
    int num_kv_heads = 1;             // times num_tokens * num_heads rounded up to 16: at most kQueryRows
    int first_position = 0;           // of the first token
    int seq_len = 0;                  // slots at this position and later hold nothing of this sequence
    int window = 0;                   // 0: all earlier positions
    int first_page = 0;               // of the pages attended to
    int end_page = 0;
    const int32_t* block_table = nullptr;
};

struct AttentionKernels {
    size_t (*scratch_bytes)(int head_size);
    // key, value: bf16 [head_size] of one KV head.
    void (*write_cache)(const CacheShape& shape, uint16_t* pool, int64_t slot, int kv_head, const uint16_t* key,
                        const uint16_t* value);
    void (*attend)(const CacheShape& shape, const uint16_t* pool, const AttentionTask& task, float scale, int isa,
                   uint8_t* scratch);
    // One row's partial results, `split_stride` floats apart, into its output, bf16 [head_size].
    void (*merge_partials)(const CacheShape& shape, const float* partial, size_t split_stride, int num_splits,
                           uint16_t* out);
};

namespace avx512 {
extern const AttentionKernels kAttention;
}
namespace avx2 {
extern const AttentionKernels kAttention;
}

}  // namespace quartet
