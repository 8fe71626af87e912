#include "attention_plan.h"

#include <algorithm>
#include <cmath>

namespace quartet {
namespace {

// A task of few query rows reads memory, and this much of it for each page, KV heads beside each other: what the
// hardware fetches beyond a short run is of use then.
constexpr size_t kRunBytes = 8192;
// Most query rows per KV head of such a task.
constexpr int kFewRows = 16;
// What it reads in all: some microseconds' worth, so that even a short context keeps some threads busy.
constexpr size_t kSplitBytes = 128 << 10;
// Pages of a split for many query rows, whose partial results cost more.
constexpr int kLongSplit = 128;

// The smallest number of KV heads that divides all and fills a run.
int group_kv_heads(const CacheShape& shape) {
    int group = 1;
    while (group < shape.num_kv_heads &&
           (shape.num_kv_heads % group || group * shape.head_stride() * sizeof(uint16_t) < kRunBytes))
        ++group;
    return group;
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionKernels& kernels, const CacheShape& shape, int num_heads)
    : kernels_(kernels), shape_(shape), heads_per_kv_(num_heads / shape.num_kv_heads), kv_group_(group_kv_heads(shape)) {}

int AttentionPlan::first_page(const Stretch& stretch) const {
    return window_ ? std::max(stretch.first_position - window_ + 1, 0) / kPage : 0;
}

int AttentionPlan::end_page(const Stretch& stretch) const {
    return (stretch.first_position + stretch.num_tokens - 1) / kPage + 1;
}

bool AttentionPlan::make(const AttentionRows& rows, int window) {
    rows_ = rows;
    stretches_.clear();
    const int most_tokens = std::max(kQueryRows / heads_per_kv_, 1);
    int few_pages = kLongSplit;
    while (few_pages > 8 && sizeof(uint16_t) * few_pages * kv_group_ * shape_.head_stride() > kSplitBytes)
        few_pages /= 2;
    size_t num_floats = 0;
    for (int row = 0; row < rows.num_rows; ++row) {
        const int start = rows.query_start_loc[row], end = rows.query_start_loc[row + 1];
        for (int token = start; token < end; token += most_tokens) {
            Stretch stretch = {};
            stretch.row = row;
            stretch.first_token = token;
            stretch.num_tokens = std::min(most_tokens, end - token);
            stretch.first_position = rows.seq_lens[row] - end + token;
            const int num_rows = query_rows(stretch);
            const bool few = num_rows <= kFewRows && kFewRows * kv_group_ <= kQueryRows;
            stretch.num_kv_heads = few ? kv_group_ : 1;
            stretch.split_pages = few ? few_pages : kLongSplit;
            stretch.partial = num_floats;
            // A window leaves splits out.
            const size_t most_splits = (end_page(stretch) - 1) / stretch.split_pages + 1;
            if (most_splits > 1) num_floats += shape_.num_kv_heads * most_splits * num_rows * shape_.partial_stride();
            stretches_.push_back(stretch);
        }
    }
    if (!partials_.reserve(num_floats * sizeof(float))) return false;
    const size_t num_left = stretches_.size() * shape_.num_kv_heads;
    if (num_left > left_size_) {
        left_ = std::make_unique<std::atomic<int>[]>(num_left);
        left_size_ = num_left;
    }
    cut(window);
    return true;
}

void AttentionPlan::cut(int window) {
    window_ = window;
    pieces_.clear();
    for (size_t i = 0; i < stretches_.size(); ++i) {
        Stretch& stretch = stretches_[i];
        stretch.first_split = first_page(stretch) / stretch.split_pages;
        stretch.num_splits = (end_page(stretch) - 1) / stretch.split_pages + 1 - stretch.first_split;
        for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head)
            left_[i * shape_.num_kv_heads + kv_head].store(stretch.num_splits, std::memory_order_relaxed);
    }
    // Prompts, whose tasks take longest, are the last rows and go first.
    for (int end = static_cast<int>(stretches_.size()); end > 0;) {
        int first = end - 1;
        while (first > 0 && stretches_[first - 1].row == stretches_[end - 1].row &&
               stretches_[first - 1].num_kv_heads == stretches_[end - 1].num_kv_heads)
            --first;
        cut_stretches(first, end);
        end = first;
    }
}

void AttentionPlan::cut_stretches(int first, int end) {
    // Stretches of one row: those that read the same keys follow each other, while the cache has them.
    const int num_kv_heads = stretches_[first].num_kv_heads;
    const int end_split = stretches_[end - 1].first_split + stretches_[end - 1].num_splits;
    for (int kv_head = 0; kv_head < shape_.num_kv_heads; kv_head += num_kv_heads)
        for (int split = stretches_[first].first_split; split < end_split; ++split)
            for (int i = end - 1; i >= first; --i) {
                const int own = split - stretches_[i].first_split;
                if (own >= 0 && own < stretches_[i].num_splits) pieces_.push_back({i, own, kv_head});
            }
}

AttentionPlan::Work AttentionPlan::work(int task) const {
    const Piece& piece = pieces_[task];
    const Stretch& stretch = stretches_[piece.stretch];
    return {stretch.row,   stretch.first_token,  stretch.num_tokens,
            piece.kv_head, stretch.num_kv_heads, piece.split == stretch.num_splits - 1};
}

float* AttentionPlan::partial(const Stretch& stretch, int split, int kv_head) const {
    // A task's KV heads lie beside each other.
    const size_t before = static_cast<size_t>(kv_head) * stretch.num_splits + split * stretch.num_kv_heads;
    return partials_.as<float>() + stretch.partial + before * query_rows(stretch) * shape_.partial_stride();
}

void AttentionPlan::attend(int index, const uint16_t* pool, const uint16_t* query, int token_stride, uint16_t* out,
                           int out_stride, int isa, uint8_t* scratch) {
    const Piece& piece = pieces_[index];
    const Stretch& stretch = stretches_[piece.stretch];
    const int split = stretch.first_split + piece.split;
    AttentionTask task;
    task.token_stride = token_stride;
    task.out_stride = out_stride;
    task.num_tokens = stretch.num_tokens;
    task.kv_head = piece.kv_head;
    task.num_kv_heads = stretch.num_kv_heads;
    task.first_position = stretch.first_position;
    task.seq_len = rows_.seq_lens[stretch.row];
    task.window = window_;
    task.first_page = std::max(first_page(stretch), split * stretch.split_pages);
    task.end_page = std::min(end_page(stretch), (split + 1) * stretch.split_pages);
    task.block_table = rows_.block_tables + static_cast<size_t>(stretch.row) * rows_.table_width;
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_size));
    for (int head = 0; head < heads_per_kv_; head += kQueryRows) {
        task.num_heads = std::min(kQueryRows, heads_per_kv_ - head);
        task.query = query + static_cast<size_t>(head) * shape_.head_size;
        task.out = out + static_cast<size_t>(head) * shape_.head_size;
        if (stretch.num_splits > 1)
            task.partial = partial(stretch, piece.split, piece.kv_head) +
                           static_cast<size_t>(head) * shape_.partial_stride();
        kernels_.attend(shape_, pool, task, scale, isa, scratch);
    }
    if (stretch.num_splits == 1) return;
    std::atomic<int>& left = left_[static_cast<size_t>(piece.stretch) * shape_.num_kv_heads + piece.kv_head];
    if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    left.store(stretch.num_splits, std::memory_order_relaxed);  // for the next layer
    merge(stretch, piece.kv_head, out, out_stride);
}

void AttentionPlan::merge(const Stretch& stretch, int kv_head, uint16_t* out, int out_stride) const {
    const size_t row_stride = shape_.partial_stride();
    const size_t split_stride = row_stride * stretch.num_kv_heads * query_rows(stretch);
    const float* row = partial(stretch, 0, kv_head);
    for (int k = 0; k < stretch.num_kv_heads; ++k)
        for (int token = 0; token < stretch.num_tokens; ++token)
            for (int head = 0; head < heads_per_kv_; ++head, row += row_stride)
                kernels_.merge_partials(shape_, row, split_stride, stretch.num_splits,
                                        out + static_cast<size_t>(token) * out_stride +
                                            static_cast<size_t>(k * heads_per_kv_ + head) * shape_.head_size);
}

}  // namespace quartet
