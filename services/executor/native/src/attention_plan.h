// How a batch's attention is cut into tasks of like size for the pool's threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "memory.h"

namespace quartet {

// Rows of a flat batch, as in Step.
struct AttentionRows {
    int num_rows = 0;
    const int32_t* query_start_loc = nullptr;  // [num_rows + 1]
    const int32_t* seq_lens = nullptr;         // [num_rows], this step's tokens included
    const int32_t* block_tables = nullptr;     // [num_rows, table_width]
    int table_width = 0;
};

// A sequence's tokens are cut into stretches of up to kQueryRows query rows, and the keys that a stretch sees into
// splits at fixed positions, whose partial results whoever ends last puts together. Both follow from the sequence's
// own lengths alone: neither the batch around it nor the number of threads changes its result.
class AttentionPlan {
  public:
    // One task: some tokens of one row against one split of their keys, for num_kv_heads KV heads.
    struct Work {
        int row, first_token, num_tokens;
        int kv_head, num_kv_heads;
        bool is_last_split;  // the one that sees the newest key
    };

    AttentionPlan(const AttentionKernels& kernels, const CacheShape& shape, int num_heads);

    // Once a step; `window` is the first layer's. The rows' arrays are read until the plan is made anew.
    // False when memory is short.
    bool make(const AttentionRows& rows, int window);
    void set_window(int window) {
        if (window != window_) cut(window);
    }

    int num_tasks() const { return static_cast<int>(pieces_.size()); }
    Work work(int task) const;
    // query: bf16, the work's first query head of its first token, token_stride to the next one; out likewise.
    // Any thread, once per task.
    void attend(int task, const uint16_t* pool, const uint16_t* query, int token_stride, uint16_t* out, int out_stride,
                int isa, uint8_t* scratch);

  private:
    struct Stretch {
        int row, first_token, num_tokens, first_position;
        int num_kv_heads;             // of a task
        int split_pages;
        int first_split, num_splits;  // as the window has it
        size_t partial;               // of floats, [KV heads of the model, splits, rows, partial_stride]
    };
    struct Piece {
        int stretch, split, kv_head;
    };

    int query_rows(const Stretch& stretch) const { return stretch.num_tokens * heads_per_kv_; }
    int first_page(const Stretch& stretch) const;
    int end_page(const Stretch& stretch) const;
    void cut(int window);
    void cut_stretches(int first, int end);
    float* partial(const Stretch& stretch, int split, int kv_head) const;
    void merge(const Stretch& stretch, int kv_head, uint16_t* out, int out_stride) const;

    const AttentionKernels& kernels_;
    CacheShape shape_;
    int heads_per_kv_, kv_group_;
    AttentionRows rows_;
    int window_ = 0;
    std::vector<Stretch> stretches_;
    std::vector<Piece> pieces_;
    Buffer partials_;
    // Per stretch and KV head, how many splits are not done.
    std::unique_ptr<std::atomic<int>[]> left_;
    size_t left_size_ = 0;
};

}  // namespace quartet
