#include "rows.h"

#include <cstring>

#include "matrix.h"
#include "simd.h"

namespace quartet::QUARTET_ISA {
namespace {

float inverse_rms(const float* x, int count, float eps) {
    Floats squares = zeros();
    for (int i = 0; i < count; i += 16) {
        const Floats v = load_some(x + i, count - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(count) + eps);
}

void norm(const float* x, const float* weight, int count, float eps, uint16_t* out) {
    const Floats factor = all(inverse_rms(x, count, eps));
    for (int i = 0; i < count; i += 16) {
        const Floats v = mul(load_some(x + i, count - i), factor);
        store_bf16_some(out + i, mul(v, load_some(weight + i, count - i)), count - i);
    }
}

void rotate_head(const float* x, const float* norm_weight, float eps, const float* cos, const float* sin, int head_size,
                 uint16_t* out) {
    const int half = head_size / 2;
    const Floats factor = all(norm_weight ? inverse_rms(x, head_size, eps) : 1.0f);
    for (int i = 0; i < half; i += 16) {
        Floats a = load(x + i), b = load(x + half + i);
        if (norm_weight) {
            a = mul(mul(a, factor), load(norm_weight + i));
            b = mul(mul(b, factor), load(norm_weight + half + i));
        }
        const Floats c = load(cos + i), s = load(sin + i);
        store_bf16(out + i, fms(a, c, mul(b, s)));
        store_bf16(out + half + i, fma(b, c, mul(a, s)));
    }
}

void round(const float* x, int count, uint16_t* out) {
    for (int i = 0; i < count; i += 16) store_bf16(out + i, load(x + i));
}

void store_rows(const float* values, int num_rows, const float* bias, int count, float* out, size_t stride) {
    for (int r = 0; r < num_rows; ++r, values += kStrip, out += stride)
        for (int c = 0; c < count; c += 16) store_some(out + c, add(load(values + c), load(bias + c)), count - c);
}

void add_rows(const float* values, int num_rows, const float* bias, int count, float* out, size_t stride) {
    for (int r = 0; r < num_rows; ++r, values += kStrip, out += stride)
        for (int c = 0; c < count; c += 16) {
            const Floats product = add(load(values + c), load(bias + c));
            store_some(out + c, add(product, load_some(out + c, count - c)), count - c);
        }
}

void gate_rows(const float* values, int num_rows, const float* bias, int count, uint16_t* out, size_t stride) {
    const Floats gate_bias = load(bias), up_bias = load(bias + 16);
    for (int r = 0; r < num_rows; ++r, values += kStrip, out += stride) {
        const Floats gate = add(load(values), gate_bias), up = add(load(values + 16), up_bias);
        store_bf16_some(out, mul(silu(gate), up), count);
    }
}

template <int Group>
void quantize_by(const uint16_t* row, int padded_inner, int8_t* units, float* scales, int32_t* sums) {
    for (int g = 0; g < padded_inner / Group; ++g, row += Group, units += Group) {
        const uint32_t bits = static_cast<uint32_t>(largest_magnitude(row, Group)) << 16;
        float most;
        std::memcpy(&most, &bits, sizeof most);
        // The reciprocal of less would not be finite.
        const Floats inverse = all(most > 1e-30f ? 127.0f / most : 0.0f);
        [[maybe_unused]] Ints total = all_ints(0);
        for (int i = 0; i < Group / 16; ++i) {
            const Ints nearest = nearest_ints(mul(load_bf16(row + 16 * i), inverse));
            store_int8(units + 16 * i, nearest);
            if constexpr (Group == kRowGroup) total = add(total, nearest);
        }
        scales[g] = most / 127.0f;
        if constexpr (Group == kRowGroup) sums[g] = sum(total);
    }
}

void quantize(const uint16_t* row, int padded_inner, int group, int8_t* units, float* scales, int32_t* sums) {
    group == kRowGroup ? quantize_by<kRowGroup>(row, padded_inner, units, scales, sums)
                       : quantize_by<kInt8Group>(row, padded_inner, units, scales, sums);
}

void widen(const uint16_t* row, int padded_inner, float* out) {
    for (int k = 0; k < padded_inner; k += 16) store(out + k, load_bf16(row + k));
}

}  // namespace

const RowKernels kRows = {norm, rotate_head, round, store_rows, add_rows, gate_rows, quantize, widen};

}  // namespace quartet::QUARTET_ISA
