#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "sampling.h"
#include "simd.h"

namespace quartet {
namespace {

constexpr int kBlock = 256;  // tokens, 16 of each lane
constexpr int64_t kFailedTokenId = 0xffffffff;
// Weights are exp(-a) while `a` is below this, then 0.
constexpr float kWeightless = 79.0f;
// So many candidates are tried first where the share of all weights decides.
constexpr int kFirstCandidates = 128, kMoreCandidates = 2048;
// Fewer rows than this are not worth waking threads.
constexpr int kFewRows = 4;

struct RowParams {
    float temperature;
    int64_t top_k;
    double top_p, min_p, noise;
};

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

// exp(-a) of the eight a in [0, 79) to the last bit or two.
__m512d exp_negative(__m512d a) {
    const __m512d whole = _mm512_roundscale_pd(_mm512_mul_pd(a, _mm512_set1_pd(-1.4426950408889634)),
                                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512d r = _mm512_fnmsub_pd(whole, _mm512_set1_pd(0x1.62e42fefa39efp-1), a);
    r = _mm512_fnmadd_pd(whole, _mm512_set1_pd(0x1.abc9e3b39803fp-56), r);
    __m512d p = _mm512_set1_pd(1.0 / 6227020800);
    for (double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0,
                             1.0, 1.0})
        p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / factorial));
    return _mm512_scalef_pd(p, whole);
}

struct Weights {
    __m512d low, high;
};

Weights weights_of(__m512 distance) {
    const __mmask16 has = _mm512_cmp_ps_mask(distance, _mm512_set1_ps(kWeightless), _CMP_LT_OQ);
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(distance));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(distance, 1));
    return {_mm512_maskz_mov_pd(has & 0xff, exp_negative(low)), _mm512_maskz_mov_pd(has >> 8, exp_negative(high))};
}

// The first place at which the running sum passes `target`, among `count` weights; else the last with any.
int walk(const double* weights, int count, double target) {
    double sum = 0;
    int last = 0;
    for (int i = 0; i < count; ++i) {
        if (weights[i] == 0) continue;
        last = i;
        sum += weights[i];
        if (sum > target) break;
    }
    return last;
}

// What a uniform number asks of a running sum: never the whole of it, which rounding could leave unreached.
double share(double part, double whole) { return std::min(part * whole, std::nextafter(whole, 0.0)); }

int32_t bits(float x) {
    int32_t value;
    std::memcpy(&value, &x, sizeof value);
    return value;
}

float from_bits(int32_t x) {
    float value;
    std::memcpy(&value, &x, sizeof value);
    return value;
}

class Row {
  public:
    Row(const float* logits, int vocab_size, const SampleScratch& scratch)
        : logits_(logits), vocab_size_(vocab_size), num_blocks_((vocab_size + kBlock - 1) / kBlock), scratch_(scratch) {}

    // False where no token can be drawn.
    bool find_best() {
        const __m512 lowest = _mm512_set1_ps(-INFINITY);
        __m512 best = lowest;
        unsigned unordered = 0;
        for (int block = 0; block < num_blocks_; ++block) {
            __m512 even = lowest, odd = lowest;
            if ((block + 1) * kBlock <= vocab_size_) {
                const float* x = logits_ + block * kBlock;
                for (int i = 0; i < kBlock; i += 32) {
                    const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
                    unordered |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
                    even = _mm512_max_ps(even, a);
                    odd = _mm512_max_ps(odd, b);
                }
            } else {
                for (int i = block * kBlock; i < vocab_size_; i += 16) {
                    const __m512 a = load(i);
                    unordered |= _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
                    even = _mm512_max_ps(even, a);
                }
            }
            even = _mm512_max_ps(even, odd);
            _mm512_store_ps(scratch_.maxima() + 16 * block, even);
            best = _mm512_max_ps(best, even);
        }
        best_ = _mm512_reduce_max_ps(best);
        return !unordered && std::isfinite(best_);
    }

    int first_best() const {
        const __m512 best = _mm512_set1_ps(best_);
        for (int block = 0; block < num_blocks_; ++block) {
            if (!_mm512_cmp_ps_mask(_mm512_load_ps(scratch_.maxima() + 16 * block), best, _CMP_EQ_OQ)) continue;
            for (int i = block * kBlock;; i += 16)
                if (const unsigned found = _mm512_cmp_ps_mask(load(i), best, _CMP_EQ_OQ)) return i + __builtin_ctz(found);
        }
        return 0;
    }

    int draw(const RowParams& params) {
        temperature_ = params.temperature;
        const int64_t top_k = params.top_k < vocab_size_ ? params.top_k : 0;
        if (top_k > 0) {
            gather(edge_of(top_k));
        } else if (params.top_p < 1) {
            gather_share(params.top_p);
        } else if (params.min_p > 0) {
            gather(min_p_limit(params.min_p));
        } else {
            return draw_of_all(params.noise);
        }
        float limit = params.min_p > 0 ? min_p_limit(params.min_p) : kWeightless;
        if (top_k > 0 || params.top_p < 1) limit = std::min(limit, rank_limit(top_k, params.top_p));
        return draw_of_candidates(limit, params.noise);
    }

  private:
    __m512 load(int i) const {
        return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), first_lanes(vocab_size_ - i), logits_ + i);
    }

    __m512 distance(__m512 logit) const {
        return _mm512_div_ps(_mm512_sub_ps(_mm512_set1_ps(best_), logit), _mm512_set1_ps(temperature_));
    }

    float distance(float logit) const { return (best_ - logit) / temperature_; }

    static float min_p_limit(double min_p) { return 0.0f - static_cast<float>(std::log(min_p)); }

    int draw_of_all(double noise) {
        const double whole = add_all();
        const double target = share(noise, whole);
        double before;
        const int block = find_block(num_blocks_, target, &before);
        alignas(64) double weights[kBlock];
        const int start = block * kBlock, count = std::min(kBlock, vocab_size_ - start);
        for (int i = 0; i < count; i += 16) {
            const Weights w = weights_of(distance(load(start + i)));
            _mm512_store_pd(weights + i, w.low);
            _mm512_store_pd(weights + i + 8, w.high);
        }
        return start + walk(weights, count, target - before);
    }

    // Fills in the blocks' sums; returns the sum of these.
    double add_all() {
        const __m512 weightless = _mm512_set1_ps(kWeightless);
        double whole = 0;
        for (int block = 0; block < num_blocks_; ++block) {
            __m512d low = _mm512_setzero_pd(), high = low;
            const int end = std::min((block + 1) * kBlock, vocab_size_);
            for (int i = block * kBlock; i < end; i += 16) {
                const __m512 a = distance(load(i));
                // Where most tokens are masked.
                if (!_mm512_cmp_ps_mask(a, weightless, _CMP_LT_OQ)) continue;
                const Weights w = weights_of(a);
                low = _mm512_add_pd(low, w.low);
                high = _mm512_add_pd(high, w.high);
            }
            scratch_.sums()[block] = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
            whole += scratch_.sums()[block];
        }
        return whole;
    }

    // The block in which the running sum of all passes `target`, and the sum before it.
    int find_block(int num_blocks, double target, double* before) const {
        const double* sums = scratch_.sums();
        double sum = 0;
        int found = 0;
        *before = 0;
        for (int block = 0; block < num_blocks; ++block) {
            if (sums[block] == 0) continue;
            found = block, *before = sum;
            sum += sums[block];
            if (sum > target) break;
        }
        return found;
    }

    // A distance within which at least `count` tokens are; weightless where fewer have a weight.
    float edge_of(int64_t count) const {
        const int num_vectors = num_blocks_;
        if (count * 2 > 16 * num_vectors) return kWeightless;
        const auto reached = [&](float logit) {
            const __m512 edge = _mm512_set1_ps(logit);
            int found = 0;
            for (int i = 0; i < num_vectors; ++i)
                found += __builtin_popcount(
                    _mm512_cmp_ps_mask(_mm512_load_ps(scratch_.maxima() + 16 * i), edge, _CMP_GE_OQ));
            return found;
        };
        // Where so many of the maxima are, so many tokens are.
        float low = best_ - kWeightless * temperature_, high = best_;
        if (!std::isfinite(low) || reached(low) < count) return kWeightless;
        for (int round = 0; round < 24; ++round) {
            const float middle = low + (high - low) * 0.5f;
            const int found = reached(middle);
            (found >= count ? low : high) = middle;
            if (found >= count && found <= count + count / 8 + 8) break;
        }
        return std::min(distance(low), kWeightless);
    }

    // All tokens with a weight that are no further than `edge` become candidates.
    void gather(float edge) {
        // Rounding makes ties of logits that differ: a little more is looked at, the distance decides.
        const float span = edge * temperature_;
        const __m512 cut = _mm512_set1_ps(best_ - (span + span * 0x1p-18f + 0x1p-110f) - std::fabs(best_) * 0x1p-22f);
        const __m512 furthest = _mm512_set1_ps(edge), weightless = _mm512_set1_ps(kWeightless);
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        int count = 0;
        for (int block = 0; block < num_blocks_; ++block) {
            if (!_mm512_cmp_ps_mask(_mm512_load_ps(scratch_.maxima() + 16 * block), cut, _CMP_GE_OQ)) continue;
            const int end = std::min((block + 1) * kBlock, vocab_size_);
            for (int i = block * kBlock; i < end; i += 16) {
                const __m512 logit = load(i);
                if (!_mm512_cmp_ps_mask(logit, cut, _CMP_GE_OQ)) continue;
                const __m512 a = distance(logit);
                const __mmask16 taken = _mm512_cmp_ps_mask(a, furthest, _CMP_LE_OQ) &
                                        _mm512_cmp_ps_mask(a, weightless, _CMP_LT_OQ);
                _mm512_storeu_ps(scratch_.distances() + count, _mm512_maskz_compress_ps(taken, a));
                _mm512_storeu_si512(scratch_.ids() + count, _mm512_maskz_compress_epi32(
                                                                taken, _mm512_add_epi32(lanes, _mm512_set1_epi32(i))));
                count += __builtin_popcount(taken);
            }
        }
        num_candidates_ = count;
        for (int i = 0; i < count; i += 16) {
            const Weights w = weights_of(_mm512_loadu_ps(scratch_.distances() + i));
            _mm512_storeu_pd(scratch_.weights() + i, w.low);
            _mm512_storeu_pd(scratch_.weights() + i + 8, w.high);
        }
    }

    // Candidates that hold top_p of all weights.
    void gather_share(double top_p) {
        target_ = share(top_p, add_all());
        for (int count : {kFirstCandidates, kMoreCandidates}) {
            const float edge = edge_of(count);
            gather(edge);
            if (edge >= kWeightless || sum_within(kWeightless) >= target_) return;
        }
        gather(kWeightless);
    }

    // The sum of the candidates' weights up to a distance.
    double sum_within(float limit) const {
        const __m512 furthest = _mm512_set1_ps(limit);
        __m512d low = _mm512_setzero_pd(), high = low;
        for (int i = 0; i < num_candidates_; i += 16) {
            const __mmask16 within = _mm512_cmp_ps_mask(_mm512_loadu_ps(scratch_.distances() + i), furthest, _CMP_LE_OQ) &
                                     first_lanes(num_candidates_ - i);
            low = _mm512_mask_add_pd(low, within & 0xff, low, _mm512_loadu_pd(scratch_.weights() + i));
            high = _mm512_mask_add_pd(high, within >> 8, high, _mm512_loadu_pd(scratch_.weights() + i + 8));
        }
        return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
    }

    int count_within(float limit) const {
        const __m512 furthest = _mm512_set1_ps(limit);
        int count = 0;
        for (int i = 0; i < num_candidates_; i += 16)
            count += __builtin_popcount(
                _mm512_cmp_ps_mask(_mm512_loadu_ps(scratch_.distances() + i), furthest, _CMP_LE_OQ) &
                first_lanes(num_candidates_ - i));
        return count;
    }

    // The largest distance that top_k and top_p keep; ties at it stay.
    float rank_limit(int64_t top_k, double top_p) {
        float limit = kWeightless;
        if (top_k > 0) {
            if (num_candidates_ >= top_k) limit = reach<true>(static_cast<double>(top_k));
            if (!(top_p < 1)) return limit;
            // Of those that tie at the edge, top_p's share counts no more than top_k asks for.
            const float nearer = std::nextafter(limit, -1.0f);
            double whole = sum_within(nearer);
            if (limit < kWeightless) {
                alignas(64) double at_edge[8];
                _mm512_store_pd(at_edge, exp_negative(_mm512_set1_pd(limit)));
                whole += static_cast<double>(top_k - count_within(nearer)) * at_edge[0];
            }
            target_ = share(top_p, whole);
        }
        return std::min(limit, reach<false>(target_));
    }

    // The smallest distance of a candidate up to which their number (kCounts) or weight is `target`; the largest
    // where it never is. Halves the range of distances, and goes on with the candidates in it.
    template <bool kCounts>
    float reach(double target) {
        const float* distances = scratch_.distances();
        const double* weights = scratch_.weights();
        int count = num_candidates_;
        int32_t low = -1, high = 0;
        for (int i = 0; i < count; ++i) high = std::max(high, bits(distances[i]));
        double before = 0;
        for (int round = 0; high - low > 1; ++round) {
            // Distances lie evenly at first, then by their bits.
            int32_t middle = bits((from_bits(std::max(low, 0)) + from_bits(high)) * 0.5f);
            if (round >= 12 || middle <= low || middle >= high) middle = low + (high - low) / 2;
            const __m512i edge = _mm512_set1_epi32(middle);
            __m512d sum_low = _mm512_setzero_pd(), sum_high = sum_low;
            int num_within = 0;
            for (int i = 0; i < count; i += 16) {
                const __mmask16 within = _mm512_cmple_epi32_mask(_mm512_loadu_si512(distances + i), edge) &
                                         first_lanes(count - i);
                num_within += __builtin_popcount(within);
                if (kCounts) continue;
                sum_low = _mm512_mask_add_pd(sum_low, within & 0xff, sum_low, _mm512_loadu_pd(weights + i));
                sum_high = _mm512_mask_add_pd(sum_high, within >> 8, sum_high, _mm512_loadu_pd(weights + i + 8));
            }
            const double sum = before + (kCounts ? num_within : _mm512_reduce_add_pd(_mm512_add_pd(sum_low, sum_high)));
            const bool nearer = sum >= target;
            if (nearer) {
                high = middle;
            } else {
                low = middle, before = sum;
            }
            int kept = 0;
            for (int i = 0; i < count; i += 16) {
                const __m512i a = _mm512_loadu_si512(distances + i);
                const __mmask16 within = _mm512_cmple_epi32_mask(a, edge);
                const __mmask16 stays = (nearer ? within : ~within) & first_lanes(count - i);
                if (!kCounts) {
                    const __m512d w_low = _mm512_loadu_pd(weights + i), w_high = _mm512_loadu_pd(weights + i + 8);
                    double* out = scratch_.active_weights() + kept;
                    _mm512_storeu_pd(out, _mm512_maskz_compress_pd(stays & 0xff, w_low));
                    _mm512_storeu_pd(out + __builtin_popcount(stays & 0xff), _mm512_maskz_compress_pd(stays >> 8, w_high));
                }
                _mm512_storeu_si512(scratch_.active_distances() + kept, _mm512_maskz_compress_epi32(stays, a));
                kept += __builtin_popcount(stays);
            }
            distances = scratch_.active_distances(), weights = scratch_.active_weights();
            count = kept;
            if (count <= 1) break;
        }
        return count == 1 ? distances[0] : from_bits(high);
    }

    int draw_of_candidates(float limit, double noise) {
        const int num_blocks = (num_candidates_ + kBlock - 1) / kBlock;
        const __m512 furthest = _mm512_set1_ps(limit);
        double* weights = scratch_.weights();
        double whole = 0;
        for (int block = 0; block < num_blocks; ++block) {
            __m512d sum = _mm512_setzero_pd();
            const int end = std::min((block + 1) * kBlock, num_candidates_);
            for (int i = block * kBlock; i < end; i += 16) {
                const __mmask16 kept = _mm512_cmp_ps_mask(_mm512_loadu_ps(scratch_.distances() + i), furthest, _CMP_LE_OQ) &
                                       first_lanes(num_candidates_ - i);
                const __m512d low = _mm512_maskz_loadu_pd(kept & 0xff, weights + i);
                const __m512d high = _mm512_maskz_loadu_pd(kept >> 8, weights + i + 8);
                _mm512_storeu_pd(weights + i, low);
                _mm512_storeu_pd(weights + i + 8, high);
                sum = _mm512_add_pd(sum, _mm512_add_pd(low, high));
            }
            scratch_.sums()[block] = _mm512_reduce_add_pd(sum);
            whole += scratch_.sums()[block];
        }
        const double target = share(noise, whole);
        double before;
        const int start = kBlock * find_block(num_blocks, target, &before);
        const int count = std::min(kBlock, num_candidates_ - start);
        return scratch_.ids()[start + walk(weights + start, count, target - before)];
    }

    const float* logits_;
    int vocab_size_, num_blocks_;
    const SampleScratch& scratch_;
    float best_ = 0, temperature_ = 1;
    int num_candidates_ = 0;
    double target_ = 0;
};

}  // namespace

bool SampleScratch::reserve(int vocab_size) {
    const size_t blocks = (vocab_size + kBlock - 1) / kBlock, tokens = (blocks + 1) * kBlock;
    return maxima_.reserve(blocks * 16 * 4) && sums_.reserve(blocks * 8) && distances_.reserve(tokens * 4) &&
           ids_.reserve(tokens * 4) && weights_.reserve(tokens * 8) && active_distances_.reserve(tokens * 4) &&
           active_weights_.reserve(tokens * 8);
}

int Sampler::sample(const SampleStep& step) {
    for (SampleScratch& scratch : scratch_)
        if (!scratch.reserve(step.vocab_size)) return -1;
    const auto sample_row = [&](int i, int thread) {
        Row row(step.logits + i * step.stride, step.vocab_size, scratch_[thread]);
        const int64_t at = step.rows[i];
        const bool failed = !row.find_best();
        step.failed[i] = failed;
        if (failed) {
            step.token_ids[i] = kFailedTokenId;
        } else if (!step.is_random[at]) {
            step.token_ids[i] = row.first_best();
        } else {
            step.token_ids[i] = row.draw({step.temperature[at], step.top_k[at], step.top_p[at], step.min_p[at],
                                          uniform(step.seed[at], step.choice_index[at], step.output_indices[i])});
        }
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
