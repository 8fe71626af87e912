#include "decoder.h"

#include <algorithm>
#include <cstring>

namespace quartet {
namespace {

// out = product + bias, or out += product + bias.
struct FloatSink final : Sink {
    const RowKernels& kernels;
    const Matrix& matrix;
    float* out;
    bool adds;

    FloatSink(const RowKernels& k, const Matrix& m, float* o, bool a) : kernels(k), matrix(m), out(o), adds(a) {}

    void take(int strip, int first_row, int num_rows, const float* values) const override {
        const int column = strip * kStrip, count = std::min(kStrip, matrix.num_columns - column);
        const size_t stride = matrix.num_columns;
        const auto put = adds ? kernels.add : kernels.store;
        put(values, num_rows, matrix.bias + column, count, out + first_row * stride + column, stride);
    }
};

// silu(gate) * up of a paired matrix, as bf16 rows.
struct GatedSink final : Sink {
    const RowKernels& kernels;
    const Matrix& matrix;
    const RowBuffer& out;

    GatedSink(const RowKernels& k, const Matrix& m, const RowBuffer& o) : kernels(k), matrix(m), out(o) {}

    void take(int strip, int first_row, int num_rows, const float* values) const override {
        const int column = strip * 16, count = std::min(16, matrix.num_columns / 2 - column);
        kernels.gate(values, num_rows, matrix.bias + strip * kStrip, count, out.row(first_row) + column, out.stride());
    }
};

// Rows that are normed, or put in another form, by one chunk of a job.
constexpr int kNormRows = 8;

size_t rounded(size_t bytes) { return (bytes + 127) / 128 * 128; }

}  // namespace

void RowBuffer::set_width(int num_inner) {
    padded_ = (num_inner + kInnerUnit - 1) / kInnerUnit * kInnerUnit;
    // Rows a power of two apart would share few sets of the first cache.
    stride_ = padded_ % 256 ? padded_ : padded_ + 32;
    int8_stride_ = padded_ % 512 ? padded_ : padded_ + 64;
}

bool RowBuffer::reserve(int num_rows) {
    const size_t rows = (num_rows + kRowBlock - 1) / kRowBlock * kRowBlock, groups = padded_ / kRowGroup;
    return bf16_.reserve(rows * stride_ * 2) && floats_.reserve(rows * stride_ * 4) &&
           int8_.reserve(rows * int8_stride_) && scales_.reserve(rows * groups * 4) && sums_.reserve(rows * groups * 4);
}

void RowBuffer::prepare(const RowKernels& kernels, RowForm form, int index) const {
    const size_t at = index, groups = padded_ / kRowGroup;
    switch (form) {
        case RowForm::kBf16: return;
        case RowForm::kFloat: return kernels.widen(row(index), padded_, floats_.as<float>() + at * stride_);
        case RowForm::kInt8By32:
        case RowForm::kInt8By64:
            return kernels.quantize(row(index), padded_, form == RowForm::kInt8By32 ? kRowGroup : kInt8Group,
                                    int8_.as<int8_t>() + at * int8_stride_, scales_.as<float>() + at * groups,
                                    sums_.as<int32_t>() + at * groups);
    }
}

Activations RowBuffer::view() const {
    return {bf16_.as<uint16_t>(), floats_.as<float>(), stride_, int8_.as<int8_t>(), int8_stride_, scales_.as<float>(),
            sums_.as<int32_t>(), padded_ / kRowGroup};
}

Decoder::Decoder(const DecoderConfig& config)
    : config_(config),
      kernels_(kernels_for(config.isa)),
      cache_{config.num_kv_heads, config.head_size, config.block_size},
      pool_(config.num_threads, kernels_.products.release_tiles),
      layers_(config.num_layers),
      plan_(kernels_.attention, cache_, config.num_heads) {
    normed_.set_width(config.hidden_size);
    attended_.set_width(config.num_heads * config.head_size);
    activated_.set_width(config.intermediate_size);
}

void Decoder::set_vector(int layer, VectorKind kind, const float* values, int count) {
    (kind == kFinalNorm ? final_norm_ : layers_[layer].vectors[kind]).assign(values, values + count);
}

bool Decoder::reserve(int num_rows) {
    if (scratch_stride_ == 0) {
        // Attention's, and a rotated query after it.
        const size_t query_bytes = sizeof(uint16_t) * config_.num_heads * config_.head_size;
        size_t most = rounded(kernels_.attention.scratch_bytes(config_.head_size)) + query_bytes;
        most = std::max(most, kernels_.products.scratch_bytes(head_));
        for (const auto& layer : layers_)
            for (const auto& matrix : layer.matrices) most = std::max(most, kernels_.products.scratch_bytes(matrix));
        if (!scratch_.reserve(rounded(most) * pool_.num_threads())) return false;
        scratch_stride_ = rounded(most);
    }
    const size_t rows = num_rows, query_size = static_cast<size_t>(config_.num_heads) * config_.head_size;
    const size_t key_size = static_cast<size_t>(config_.num_kv_heads) * config_.head_size;
    return hidden_.reserve(rows * config_.hidden_size * 4) && qkv_.reserve(rows * (query_size + 2 * key_size) * 4) &&
           query_.reserve(rows * query_size * 2) && normed_.reserve(num_rows) && attended_.reserve(num_rows) &&
           activated_.reserve(num_rows);
}

void Decoder::multiply(const Matrix& matrix, const RowBuffer& x, int num_rows, const Sink& sink) {
    const Activations rows = x.view();
    int per_chunk = std::clamp(matrix.num_strips / (16 * pool_.num_threads()), 1, 9);
    if (num_rows == 1) per_chunk = std::max(per_chunk / kStripsTogether, 1) * kStripsTogether;
    const int num_chunks = (matrix.num_strips + per_chunk - 1) / per_chunk;
    pool_.run(num_chunks, [&](int chunk, int thread) {
        uint8_t* scratch = scratch_.as<uint8_t>() + thread * scratch_stride_;
        const int end = std::min((chunk + 1) * per_chunk, matrix.num_strips);
        const bool continues = pool_.continues(num_chunks, chunk, thread);
        kernels_.products.multiply(matrix, rows, num_rows, chunk * per_chunk, end, continues, config_.isa, scratch,
                                   sink);
    });
}

void Decoder::norm_rows(const Step& step, const std::vector<float>& weight, const Matrix& next) {
    const RowForm form = row_form(next, step.num_tokens);
    pool_.run((step.num_tokens + kNormRows - 1) / kNormRows, [&](int chunk, int) {
        for (int t = chunk * kNormRows; t < std::min((chunk + 1) * kNormRows, step.num_tokens); ++t) {
            kernels_.rows.norm(hidden_.as<float>() + static_cast<size_t>(t) * config_.hidden_size, weight.data(),
                               config_.hidden_size, config_.rms_norm_eps, normed_.row(t));
            normed_.prepare(kernels_.rows, form, t);
        }
    });
}

// A token's query heads of one KV head, bf16 [num_heads / num_kv_heads, head_size].
void Decoder::rotate_query(const Step& step, int layer, int token, int kv_head, uint16_t* out) const {
    const int head_size = config_.head_size, heads_per_kv = config_.num_heads / config_.num_kv_heads;
    const std::vector<float>& weight = layers_[layer].vectors[kQueryNorm];
    const float* query = qkv_row(token) + kv_head * heads_per_kv * head_size;
    const size_t angle = static_cast<size_t>(step.positions[token]) * (head_size / 2);
    for (int head = 0; head < heads_per_kv; ++head)
        kernels_.rows.rotate_head(query + head * head_size, weight.empty() ? nullptr : weight.data(),
                                  config_.rms_norm_eps, step.cos + angle, step.sin + angle, head_size,
                                  out + head * head_size);
}

void Decoder::write_key_value(const Step& step, int layer, int token, int kv_head) const {
    const int head_size = config_.head_size;
    const std::vector<float>& weight = layers_[layer].vectors[kKeyNorm];
    const float* raw_key = qkv_row(token) + (config_.num_heads + kv_head) * head_size;
    const float* raw_value = raw_key + config_.num_kv_heads * head_size;
    const size_t angle = static_cast<size_t>(step.positions[token]) * (head_size / 2);
    // Heads of more than 512 elements are refused at creation.
    alignas(64) uint16_t key[512], value[512];
    kernels_.rows.rotate_head(raw_key, weight.empty() ? nullptr : weight.data(), config_.rms_norm_eps, step.cos + angle,
                              step.sin + angle, head_size, key);
    kernels_.rows.round(raw_value, head_size, value);
    kernels_.attention.write_cache(cache_, step.kv_pools[layer], step.slot_mapping[token], kv_head, key, value);
}

void Decoder::attention(const Step& step, int layer) {
    const int num_kv_heads = config_.num_kv_heads, query_size = config_.num_heads * config_.head_size;
    const int kv_size = query_size / num_kv_heads;
    plan_.set_window(layers_[layer].window);
    uint16_t* queries = query_.as<uint16_t>();
    // A decode row's token is rotated and written by the tasks that attend for it. Chunks are as long as a page: threads
    // that write to one page take its lines from each other.
    pool_.run((step.num_tokens - step.num_decodes + kPage - 1) / kPage, [&](int chunk, int) {
        const int first = step.num_decodes + chunk * kPage, end = std::min(first + kPage, step.num_tokens);
        for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head)
            for (int t = first; t < end; ++t) {
                rotate_query(step, layer, t, kv_head, queries + static_cast<size_t>(t) * query_size + kv_head * kv_size);
                write_key_value(step, layer, t, kv_head);
            }
    });
    pool_.run(plan_.num_tasks(), [&](int task, int thread) {
        const AttentionPlan::Work work = plan_.work(task);
        const int token = work.first_token, offset = work.kv_head * kv_size;
        uint8_t* scratch = scratch_.as<uint8_t>() + thread * scratch_stride_;
        const uint16_t* query = queries + static_cast<size_t>(token) * query_size + offset;
        if (work.row < step.num_decodes) {
            // Each split rotates the query for itself, the last one sees the new key.
            const size_t own_bytes = rounded(kernels_.attention.scratch_bytes(config_.head_size));
            uint16_t* rotated = reinterpret_cast<uint16_t*>(scratch + own_bytes);
            for (int k = 0; k < work.num_kv_heads; ++k) {
                rotate_query(step, layer, token, work.kv_head + k, rotated + k * kv_size);
                if (work.is_last_split) write_key_value(step, layer, token, work.kv_head + k);
            }
            query = rotated;
        }
        plan_.attend(task, step.kv_pools[layer], query, query_size, attended_.row(token) + offset, attended_.stride(),
                     config_.isa, scratch);
    });
}

bool Decoder::forward(const Step& step) {
    const int num_tokens = step.num_tokens, hidden_size = config_.hidden_size;
    const AttentionRows rows{step.num_rows, step.query_start_loc, step.seq_lens, step.block_tables, step.table_width};
    if (!reserve(num_tokens) || !plan_.make(rows, layers_[0].window)) return false;
    pool_.begin();
    times_.start();
    float* hidden = hidden_.as<float>();
    const Matrix& embedding = separate_embedding_.num_strips ? separate_embedding_ : head_;
    pool_.run(num_tokens, [&](int t, int) {
        embedding.unpack_column(static_cast<int>(step.token_ids[t]), hidden + static_cast<size_t>(t) * hidden_size);
    });
    const RowKernels& kernels = kernels_.rows;
    const auto prepare = [&](const RowBuffer& rows, const Matrix& next) {
        const RowForm form = row_form(next, num_tokens);
        if (form == RowForm::kBf16) return;
        pool_.run((num_tokens + kNormRows - 1) / kNormRows, [&](int chunk, int) {
            for (int t = chunk * kNormRows; t < std::min((chunk + 1) * kNormRows, num_tokens); ++t)
                rows.prepare(kernels, form, t);
        });
    };
    for (int index = 0; index < config_.num_layers; ++index) {
        const Layer& layer = layers_[index];
        const Matrix* matrices = layer.matrices;
        norm_rows(step, layer.vectors[kInputNorm], matrices[kQkv]);
        times_.mark(Phase::kSmall);
        multiply(matrices[kQkv], normed_, num_tokens, FloatSink(kernels, matrices[kQkv], qkv_.as<float>(), false));
        times_.mark(Phase::kProducts);
        attention(step, index);
        times_.mark(Phase::kAttention);
        prepare(attended_, matrices[kOutput]);
        times_.mark(Phase::kSmall);
        multiply(matrices[kOutput], attended_, num_tokens, FloatSink(kernels, matrices[kOutput], hidden, true));
        times_.mark(Phase::kProducts);
        norm_rows(step, layer.vectors[kPostAttentionNorm], matrices[kGateUp]);
        times_.mark(Phase::kSmall);
        multiply(matrices[kGateUp], normed_, num_tokens, GatedSink(kernels, matrices[kGateUp], activated_));
        times_.mark(Phase::kProducts);
        prepare(activated_, matrices[kDown]);
        times_.mark(Phase::kSmall);
        multiply(matrices[kDown], activated_, num_tokens, FloatSink(kernels, matrices[kDown], hidden, true));
        times_.mark(Phase::kProducts);
    }
    pool_.run((num_tokens + kNormRows - 1) / kNormRows, [&](int chunk, int) {
        for (int t = chunk * kNormRows; t < std::min((chunk + 1) * kNormRows, num_tokens); ++t) {
            const size_t at = static_cast<size_t>(t) * hidden_size;
            kernels.norm(hidden + at, final_norm_.data(), hidden_size, config_.rms_norm_eps, step.hidden + at);
        }
    });
    times_.mark(Phase::kSmall);
    pool_.end();
    kernels_.products.release_tiles();
    return true;
}

size_t Decoder::read_weights() {
    constexpr size_t kChunk = size_t{1} << 20, kUnit = 256;
    size_t num_bytes = 0;
    pool_.begin();
    for (const auto& region : arena_.regions()) {
        const size_t used = region.used / kUnit * kUnit;
        pool_.run(static_cast<int>((used + kChunk - 1) / kChunk), [&](int chunk, int) {
            kernels_.products.read_bytes(region.begin + chunk * kChunk, std::min(kChunk, used - chunk * kChunk));
        });
        num_bytes += used;
    }
    pool_.end();
    return num_bytes;
}

bool Decoder::compute_logits(const uint16_t* hidden, int num_rows, float* logits) {
    if (!reserve(num_rows)) return false;
    pool_.begin();
    times_.start();
    const RowForm form = row_form(head_, num_rows);
    for (int r = 0; r < num_rows; ++r) {
        std::memcpy(normed_.row(r), hidden + static_cast<size_t>(r) * config_.hidden_size, 2 * config_.hidden_size);
        normed_.prepare(kernels_.rows, form, r);
    }
    multiply(head_, normed_, num_rows, FloatSink(kernels_.rows, head_, logits, false));
    times_.mark(Phase::kHead);
    pool_.end();
    kernels_.products.release_tiles();
    return true;
}

}  // namespace quartet
