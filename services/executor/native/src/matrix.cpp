#include "matrix.h"

#include <cmath>
#include <cstring>

namespace quartet {
namespace {

float bf16_to_float(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

float fp16_to_float(uint16_t value) {
    const int exponent = value >> 10 & 31, fraction = value & 1023;
    float result;
    if (exponent == 0) {
        result = static_cast<float>(fraction) * 0x1p-24f;
    } else {
        const uint32_t bits = (exponent == 31 ? 255u : exponent + 112u) << 23 | static_cast<uint32_t>(fraction) << 13;
        std::memcpy(&result, &bits, sizeof result);
    }
    return value >> 15 ? -result : result;
}

// The bf16 value that is next above or equal.
uint16_t bf16_above(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

}  // namespace

int Matrix::source_row(int strip, int column, bool paired) const {
    if (!paired) {
        const int row = strip * kStrip + column;
        return row < num_columns ? row : -1;
    }
    const int half = num_columns / 2, row = strip * 16 + column % 16;
    if (row >= half) return -1;
    return column < 16 ? row : half + row;
}

bool Matrix::allocate(Arena& arena, Format format_, int num_columns_, int num_inner_, bool paired) {
    format = format_;
    num_columns = num_columns_;
    num_inner = num_inner_;
    padded_inner = (num_inner + kInnerUnit - 1) / kInnerUnit * kInnerUnit;
    const int columns_per_strip = paired ? 16 : kStrip, columns = paired ? num_columns / 2 : num_columns;
    num_strips = (columns + columns_per_strip - 1) / columns_per_strip;
    const size_t elements = static_cast<size_t>(padded_inner) * kStrip;
    switch (format) {
        case Format::kBf16: strip_bytes = 2 * elements; break;
        case Format::kInt8: strip_bytes = padded_inner / kInt8Group * kInt8GroupBytes; break;
        case Format::kInt4: strip_bytes = padded_inner / kInt4Group * kInt4GroupBytes; break;
    }
    const size_t column_bytes = static_cast<size_t>(num_strips) * kStrip * sizeof(float);
    // What is past the last column is computed too; it must be memory, and not NaN for speed's sake.
    weights = static_cast<uint8_t*>(arena.allocate(strip_bytes * num_strips));
    bias = static_cast<float*>(arena.allocate(column_bytes));
    return weights && bias;
}

void Matrix::pack_bf16_row(int strip_index, int column, const uint16_t* row) {
    uint16_t* out = reinterpret_cast<uint16_t*>(weights + strip_index * strip_bytes) + 2 * column;
    for (int k = 0; k < num_inner; ++k) out[(k / 2) * 2 * kStrip + k % 2] = row[k];
}

void Matrix::pack_int8_row(int strip_index, int column, const uint16_t* row) {
    for (int g = 0; g < padded_inner / kInt8Group; ++g, row += kInt8Group) {
        const int count = num_inner - g * kInt8Group < kInt8Group ? num_inner - g * kInt8Group : kInt8Group;
        float largest = 0;
        for (int k = 0; k < count; ++k) largest = std::fmax(largest, std::fabs(bf16_to_float(row[k])));
        const uint16_t scale = bf16_above(largest / 127.0f);
        const float inverse = largest > 1e-30f ? 1.0f / bf16_to_float(scale) : 0.0f;
        uint8_t* group = weights + strip_index * strip_bytes + g * kInt8GroupBytes;
        std::memcpy(group + 2 * column, &scale, 2);
        uint8_t* out = group + 2 * kStrip + 4 * column;
        for (int k = 0; k < kInt8Group; ++k) {
            const float value = k < count ? bf16_to_float(row[k]) * inverse : 0.0f;
            out[(k / 4) * 4 * kStrip + k % 4] = static_cast<uint8_t>(std::lrintf(value));
        }
    }
}

void Matrix::pack_int4_row(int strip_index, int column, const uint8_t* blocks) {
    for (int g = 0; g < num_inner / kInt4Group; ++g, blocks += 20) {
        uint8_t* group = weights + strip_index * strip_bytes + g * kInt4GroupBytes;
        for (int i = 0; i < 2; ++i) {
            uint16_t value;
            std::memcpy(&value, blocks + 2 * i, 2);
            // One NaN for all: others would be rounded to something else.
            if ((value & 0x7fff) > 0x7c00) value = 0x7e00;
            std::memcpy(group + 2 * (i * kStrip + column), &value, 2);
        }
        uint8_t* lines = group + 4 * kStrip + (column / 16) * 256 + (column % 16) * 4;
        for (int line = 0; line < 4; ++line) std::memcpy(lines + 64 * line, blocks + 4 + 4 * line, 4);
    }
}

void Matrix::unpack_column(int column, float* out) const {
    const uint8_t* data = strip(column / kStrip);
    const int c = column % kStrip;
    switch (format) {
        case Format::kBf16: {
            const uint16_t* values = reinterpret_cast<const uint16_t*>(data) + 2 * c;
            for (int k = 0; k < num_inner; ++k) out[k] = bf16_to_float(values[(k / 2) * 2 * kStrip + k % 2]);
            return;
        }
        case Format::kInt8: {
            for (int k = 0; k < num_inner; ++k) {
                const uint8_t* group = data + k / kInt8Group * kInt8GroupBytes;
                uint16_t scale;
                std::memcpy(&scale, group + 2 * c, 2);
                const int at = k % kInt8Group;
                const uint8_t unit = group[2 * kStrip + at / 4 * 4 * kStrip + 4 * c + at % 4];
                out[k] = bf16_to_float(scale) * static_cast<int8_t>(unit);
            }
            return;
        }
        case Format::kInt4: {
            for (int k = 0; k < num_inner; ++k) {
                const uint8_t* group = data + k / kInt4Group * kInt4GroupBytes;
                uint16_t header[2];
                std::memcpy(&header[0], group + 2 * c, 2);
                std::memcpy(&header[1], group + 2 * kStrip + 2 * c, 2);
                const int byte = k % 16, shift = k % kInt4Group < 16 ? 0 : 4;
                const uint8_t packed = group[4 * kStrip + (c / 16) * 256 + byte / 4 * 64 + (c % 16) * 4 + byte % 4];
                out[k] = fp16_to_float(header[0]) * ((packed >> shift) & 15) + fp16_to_float(header[1]);
            }
            return;
        }
    }
}

}  // namespace quartet
