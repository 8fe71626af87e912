// A decoder's forward pass over a flat batch and a paged cache.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "matrix.h"
#include "phases.h"
#include "pool.h"
#include "rows.h"

namespace quartet {

// Part of the ABI.
struct DecoderConfig {
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_size;
    int32_t vocab_size;
    int32_t block_size;
    int32_t num_threads;
    int32_t isa;  // mask of Isa, no more than detect_isa() and not nothing
    float rms_norm_eps;
};

// Part of the ABI. T tokens of R rows, decode rows (one token each) first; see ForwardBatch in Python.
struct Step {
    int32_t num_tokens;
    int32_t num_rows;
    int32_t num_decodes;
    int32_t table_width;
    const int64_t* token_ids;        // [T]
    const int64_t* positions;        // [T]
    const int64_t* slot_mapping;     // [T]
    const int32_t* query_start_loc;  // [R + 1]
    const int32_t* seq_lens;         // [R]
    const int32_t* block_tables;     // [R, table_width]
    uint16_t* const* kv_pools;       // a layer's each, see attention.h
    const float* cos;                // [positions, head_size / 2]
    const float* sin;
    uint16_t* hidden;                // out, [T, hidden_size] bf16, normed
};

// A product's input rows: bf16, and in the form that the product wants them.
class RowBuffer {
  public:
    void set_width(int num_inner);
    bool reserve(int num_rows);
    uint16_t* row(int index) const { return bf16_.as<uint16_t>() + static_cast<size_t>(index) * stride_; }
    int stride() const { return stride_; }
    void prepare(const RowKernels& kernels, RowForm form, int row) const;
    Activations view() const;

  private:
    int padded_ = 0, stride_ = 0, int8_stride_ = 0;
    Buffer bf16_, floats_, int8_, scales_, sums_;
};

enum MatrixKind : int { kQkv = 0, kOutput = 1, kGateUp = 2, kDown = 3, kHead = 4 };
enum VectorKind : int { kInputNorm = 0, kPostAttentionNorm = 1, kQueryNorm = 2, kKeyNorm = 3, kFinalNorm = 4 };

struct Layer {
    Matrix matrices[4];
    std::vector<float> vectors[4];
    int window = 0;
};

class Decoder {
  public:
    explicit Decoder(const DecoderConfig& config);

    Matrix& matrix(int layer, MatrixKind kind) { return kind == kHead ? head_ : layers_[layer].matrices[kind]; }
    // The input embedding when it is not the head's; packed the same way.
    Matrix& embedding() { return separate_embedding_; }
    void set_vector(int layer, VectorKind kind, const float* values, int count);
    void set_window(int layer, int window) { layers_[layer].window = window; }
    const DecoderConfig& config() const { return config_; }
    Pool& pool() { return pool_; }
    const PhaseTimes& times() const { return times_; }
    Arena& arena() { return arena_; }

    // False when memory is short; nothing has been written then.
    bool forward(const Step& step);
    // Reads all weights once; returns how many bytes.
    size_t read_weights();
    // hidden [num_rows, hidden_size] bf16 -> logits [num_rows, vocab_size] float.
    bool compute_logits(const uint16_t* hidden, int num_rows, float* logits);

  private:
    bool reserve(int num_rows);
    void multiply(const Matrix& matrix, const RowBuffer& x, int num_rows, const Sink& sink);
    void norm_rows(const Step& step, const std::vector<float>& weight, const Matrix& next);
    const float* qkv_row(int token) const {
        const int num_heads = config_.num_heads + 2 * config_.num_kv_heads;
        return qkv_.as<float>() + static_cast<size_t>(token) * num_heads * config_.head_size;
    }
    void rotate_query(const Step& step, int layer, int token, int kv_head, uint16_t* out) const;
    void write_key_value(const Step& step, int layer, int token, int kv_head) const;
    void attention(const Step& step, int layer);

    RowForm row_form(const Matrix& matrix, int num_rows) const {
        return kernels_.products.row_form(matrix.format, num_rows, config_.isa);
    }

    DecoderConfig config_;
    const Kernels& kernels_;
    CacheShape cache_;
    Pool pool_;
    Arena arena_;
    std::vector<Layer> layers_;
    Matrix head_, separate_embedding_;
    std::vector<float> final_norm_;
    AttentionPlan plan_;
    size_t scratch_stride_ = 0;
    Buffer scratch_, hidden_, qkv_, query_;
    RowBuffer normed_, attended_, activated_;
    PhaseTimes times_;
};

}  // namespace quartet
