#include "sampling.h"

#include <algorithm>

namespace quartet {
namespace {

constexpr int64_t kFailedTokenId = 0xffffffff;
// Fewer rows than this are not worth waking threads.
constexpr int kFewRows = 4;

uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// noise.py's uniform().
double uniform(uint64_t seed, uint64_t choice_index, uint64_t output_index) {
    constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
    const uint64_t key = mix((mix(seed + kGamma) ^ choice_index) + kGamma);
    return static_cast<double>(mix((key ^ output_index) + kGamma) >> 11) * 0x1p-53;
}

}  // namespace

bool SampleScratch::reserve(int vocab_size) {
    const size_t blocks = (vocab_size + kSampleBlock - 1) / kSampleBlock, tokens = (blocks + 1) * kSampleBlock;
    return maxima_.reserve(blocks * 16 * 4) && sums_.reserve(blocks * 8) && distances_.reserve(tokens * 4) &&
           ids_.reserve(tokens * 4) && weights_.reserve(tokens * 8) && active_distances_.reserve(tokens * 4) &&
           active_weights_.reserve(tokens * 8);
}

int Sampler::sample(const SampleStep& step) {
    for (SampleScratch& scratch : scratch_)
        if (!scratch.reserve(step.vocab_size)) return -1;
    const auto sample_row = [&](int i, int thread) {
        const int64_t at = step.rows[i];
        RowParams params = {step.temperature[at], step.top_k[at], step.top_p[at], step.min_p[at], 0.0};
        if (step.is_random[at]) params.noise = uniform(step.seed[at], step.choice_index[at], step.output_indices[i]);
        const int token = kernels_.draw(step.logits + i * step.stride, step.vocab_size, scratch_[thread],
                                        step.is_random[at] ? &params : nullptr);
        step.failed[i] = token < 0;
        step.token_ids[i] = token < 0 ? kFailedTokenId : token;
    };
    if (step.num_rows < kFewRows) {
        for (int i = 0; i < step.num_rows; ++i) sample_row(i, 0);
    } else {
        pool_.begin();
        pool_.run(step.num_rows, sample_row);
        pool_.end();
    }
    return static_cast<int>(std::count(step.failed, step.failed + step.num_rows, 1));
}

}  // namespace quartet
