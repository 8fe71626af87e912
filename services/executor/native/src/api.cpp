// The library's C functions, as services/executor/native/library.py declares them. 0 or null is failure.
#include <sys/mman.h>

#include <new>

#include "cpu.h"
#include "decoder.h"
#include "sampling.h"

using namespace quartet;

#define QUARTET_API extern "C" __attribute__((visibility("default")))

namespace {

// Packs the source's rows in parallel.
bool fill(Pool& pool, Arena& arena, Matrix& matrix, int format, int num_columns, int num_inner, bool paired, const void* data,
          const float* bias) {
    if (!matrix.allocate(arena, static_cast<Format>(format), num_columns, num_inner, paired)) return false;
    pool.begin();
    pool.run(matrix.num_strips, [&](int strip, int) {
        for (int column = 0; column < kStrip; ++column) {
            const int row = matrix.source_row(strip, column, paired);
            if (row < 0) continue;
            const size_t at = row;
            switch (matrix.format) {
                case Format::kBf16:
                    matrix.pack_bf16_row(strip, column, static_cast<const uint16_t*>(data) + at * num_inner);
                    break;
                case Format::kInt8:
                    matrix.pack_int8_row(strip, column, static_cast<const uint16_t*>(data) + at * num_inner);
                    break;
                case Format::kInt4:
                    matrix.pack_int4_row(strip, column, static_cast<const uint8_t*>(data) + at * num_inner / 32 * 20);
                    break;
            }
            if (bias) matrix.bias[strip * kStrip + column] = bias[row];
        }
    });
    pool.end();
    return true;
}

struct PlainSink final : Sink {
    float* out;
    int num_columns;

    PlainSink(float* o, int n) : out(o), num_columns(n) {}

    void take(int strip, int first_row, int num_rows, const float* values) const override {
        for (int r = 0; r < num_rows; ++r)
            for (int c = 0; c < kStrip && strip * kStrip + c < num_columns; ++c)
                out[static_cast<size_t>(first_row + r) * num_columns + strip * kStrip + c] = values[r * kStrip + c];
    }
};

// A mask of Isa that has kernels, and nothing that the CPU lacks.
bool is_usable(int isa) { return (isa & (kAvx512Bf16 | kAvx2)) && !(isa & ~detect_isa()); }

// Of the whole pages in this memory; whether the system took it.
bool advise(void* data, size_t num_bytes, int advice) {
    const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + 4095) / 4096 * 4096;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + num_bytes) / 4096 * 4096;
    return start >= end || madvise(reinterpret_cast<void*>(start), end - start, advice) == 0;
}

}  // namespace

QUARTET_API int quartet_isa() { return detect_isa(); }

QUARTET_API Decoder* quartet_decoder_new(const DecoderConfig* config) {
    if (!is_usable(config->isa)) return nullptr;
    if (config->head_size % 32 || config->head_size > 512 || config->block_size % kPage) return nullptr;
    return new (std::nothrow) Decoder(*config);
}

QUARTET_API void quartet_decoder_free(Decoder* decoder) { delete decoder; }

// data: bf16 [num_columns, num_inner], or for kInt4 GGML Q4_1 blocks; paired: two matrices that gate each other.
QUARTET_API int quartet_decoder_set_matrix(Decoder* decoder, int layer, int kind, int format, int num_columns,
                                           int num_inner, int paired, const void* data, const float* bias) {
    Matrix& matrix = decoder->matrix(layer, static_cast<MatrixKind>(kind));
    return fill(decoder->pool(), decoder->arena(), matrix, format, num_columns, num_inner, paired != 0, data, bias);
}

QUARTET_API int quartet_decoder_set_embedding(Decoder* decoder, const uint16_t* data) {
    const DecoderConfig& config = decoder->config();
    return fill(decoder->pool(), decoder->arena(), decoder->embedding(), static_cast<int>(Format::kBf16), config.vocab_size,
                config.hidden_size, false, data, nullptr);
}

QUARTET_API void quartet_decoder_set_vector(Decoder* decoder, int layer, int kind, const float* values, int count) {
    decoder->set_vector(layer, static_cast<VectorKind>(kind), values, count);
}

QUARTET_API void quartet_decoder_set_window(Decoder* decoder, int layer, int window) {
    decoder->set_window(layer, window);
}

QUARTET_API int quartet_decoder_forward(Decoder* decoder, const Step* step) { return decoder->forward(*step); }

QUARTET_API int quartet_decoder_logits(Decoder* decoder, const uint16_t* hidden, int num_rows, float* logits) {
    return decoder->compute_logits(hidden, num_rows, logits);
}

// Asks for huge pages where nothing was written yet: a sequence's pages of a cache lie far from each other. Only advice.
QUARTET_API void quartet_advise_huge_pages(void* data, size_t num_bytes) { advise(data, num_bytes, MADV_HUGEPAGE); }

// Takes pages from the system before they are used (Linux 5.14); what they hold stays. 0 where that is not possible.
QUARTET_API int quartet_populate(void* data, size_t num_bytes) {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
    return advise(data, num_bytes, kPopulateWrite);
}

// out: cumulative seconds of each Phase.
QUARTET_API void quartet_decoder_times(const Decoder* decoder, double* out) {
    for (int phase = 0; phase < kNumPhases; ++phase) out[phase] = decoder->times().seconds(phase);
}

// Reads the weights from front to back on all threads, as a step with one row must; returns the bytes read.
QUARTET_API size_t quartet_decoder_read_weights(Decoder* decoder) { return decoder->read_weights(); }

QUARTET_API Sampler* quartet_sampler_of(int isa, int num_threads) {
    return is_usable(isa) ? new (std::nothrow) Sampler(kernels_for(isa).sampling, num_threads) : nullptr;
}

QUARTET_API void quartet_sampler_free(Sampler* sampler) { delete sampler; }

// How many rows failed; -1 when memory is short.
QUARTET_API int quartet_sample(Sampler* sampler, const SampleStep* step) { return sampler->sample(*step); }

// One product and nothing else, for tests: x [num_rows, num_inner] bf16, out [num_rows, num_columns].
QUARTET_API int quartet_multiply(int isa, int format, int num_columns, int num_inner, const void* data, int num_rows,
                                 const uint16_t* x, float* out) {
    if (!is_usable(isa)) return 0;
    const Kernels& kernels = kernels_for(isa);
    Pool pool(1, nullptr);
    Arena arena;
    Matrix matrix;
    RowBuffer rows;
    rows.set_width(num_inner);
    Buffer scratch;
    if (!fill(pool, arena, matrix, format, num_columns, num_inner, false, data, nullptr) || !rows.reserve(num_rows) ||
        !scratch.reserve(kernels.products.scratch_bytes(matrix) + 64))
        return 0;
    for (int r = 0; r < num_rows; ++r) {
        for (int k = 0; k < num_inner; ++k) rows.row(r)[k] = x[static_cast<size_t>(r) * num_inner + k];
        rows.prepare(kernels.rows, kernels.products.row_form(matrix.format, num_rows, isa), r);
    }
    kernels.products.multiply(matrix, rows.view(), num_rows, 0, matrix.num_strips, false, isa,
                              scratch.as<uint8_t>(), PlainSink(out, num_columns));
    kernels.products.release_tiles();
    return 1;
}

// Attention and nothing else, for tests: `key` and `value` [num_tokens, num_kv_heads, head_size] bf16 go to the pool's
// slots, then `query` [num_tokens, num_heads, head_size] attends for all rows; out is like query.
QUARTET_API int quartet_attend(int isa, int num_threads, int num_heads, int num_kv_heads, int head_size, int block_size,
                               int window, int num_rows, const int32_t* query_start_loc, const int32_t* seq_lens,
                               const int32_t* block_tables, int table_width, const int64_t* slot_mapping,
                               const uint16_t* query, const uint16_t* key, const uint16_t* value, uint16_t* kv_pool,
                               uint16_t* out) {
    if (!is_usable(isa) || head_size % 32 || head_size > 512) return 0;
    const Kernels& kernels = kernels_for(isa);
    const CacheShape shape{num_kv_heads, head_size, block_size};
    for (int t = 0; t < query_start_loc[num_rows]; ++t)
        for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
            const size_t at = (static_cast<size_t>(t) * num_kv_heads + kv_head) * head_size;
            kernels.attention.write_cache(shape, kv_pool, slot_mapping[t], kv_head, key + at, value + at);
        }
    Pool pool(num_threads, kernels.products.release_tiles);
    AttentionPlan plan(kernels.attention, shape, num_heads);
    const size_t scratch_stride = (kernels.attention.scratch_bytes(head_size) + 127) / 128 * 128;
    Buffer scratch(scratch_stride * num_threads);
    if (!scratch.as<uint8_t>() || !plan.make({num_rows, query_start_loc, seq_lens, block_tables, table_width}, 0))
        return 0;
    plan.set_window(window);
    const int stride = num_heads * head_size;
    // Twice, as a decoder does with one plan: a layer each.
    for (int layer = 0; layer < 2; ++layer)
        pool.run(plan.num_tasks(), [&](int task, int thread) {
            const AttentionPlan::Work work = plan.work(task);
            const size_t at = static_cast<size_t>(work.first_token) * stride +
                              static_cast<size_t>(work.kv_head) * (num_heads / num_kv_heads) * head_size;
            plan.attend(task, kv_pool, query + at, stride, out + at, stride, isa,
                        scratch.as<uint8_t>() + thread * scratch_stride);
        });
    kernels.products.release_tiles();
    return 1;
}
