// From rows of logits to tokens, by the rules of sampler.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "pool.h"

namespace quartet {

// Part of the ABI. S rows; the columns are SamplingRows', read at rows[i].
struct SampleStep {
    int32_t num_rows;
    int32_t vocab_size;
    int64_t stride;                 // floats from one row of logits to the next
    const float* logits;            // [S, stride], the first vocab_size of each row count
    const int64_t* rows;            // [S]
    const int64_t* output_indices;  // [S]
    const uint8_t* is_random;
    const float* temperature;
    const int64_t* top_k;
    const double* top_p;
    const double* min_p;
    const uint64_t* seed;
    const uint64_t* choice_index;
    int64_t* token_ids;  // out [S]; 0xffffffff where failed
    uint8_t* failed;     // out [S], 0 or 1: a NaN, an infinite maximum, or nothing but masked tokens
};

constexpr int kSampleBlock = 256;  // tokens, 16 of each lane

// A row's tokens that truncation may keep, in their order, with a = (largest logit - logit) / temperature and
// exp(-a); and what else a thread needs while it draws. Memory that is not touched is not there.
class SampleScratch {
  public:
    bool reserve(int vocab_size);

    float* maxima() const { return maxima_.as<float>(); }   // of each lane of each block
    double* sums() const { return sums_.as<double>(); }     // of each block's weights
    float* distances() const { return distances_.as<float>(); }
    int32_t* ids() const { return ids_.as<int32_t>(); }
    double* weights() const { return weights_.as<double>(); }
    float* active_distances() const { return active_distances_.as<float>(); }
    double* active_weights() const { return active_weights_.as<double>(); }

  private:
    Buffer maxima_, sums_, distances_, ids_, weights_, active_distances_, active_weights_;
};

struct RowParams {
    float temperature;
    int64_t top_k;
    double top_p, min_p;
    double noise;  // in [0, 1)
};

struct SamplingKernels {
    // A row's token: of the largest logit without `params`. -1 where none can be drawn.
    int (*draw)(const float* logits, int vocab_size, const SampleScratch& scratch, const RowParams* params);
};

namespace avx512 {
extern const SamplingKernels kSampling;
}
namespace avx2 {
extern const SamplingKernels kSampling;
}

class Sampler {
  public:
    Sampler(const SamplingKernels& kernels, int num_threads)
        : kernels_(kernels), pool_(num_threads, nullptr), scratch_(num_threads) {}

    // How many rows failed; -1 when memory is short.
    int sample(const SampleStep& step);

  private:
    const SamplingKernels& kernels_;
    Pool pool_;
    std::vector<SampleScratch> scratch_;
};

}  // namespace quartet
