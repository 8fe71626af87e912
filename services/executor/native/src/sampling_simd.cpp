#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "sampling.h"
#include "simd.h"

namespace quartet::QUARTET_ISA {
namespace {

constexpr int kBlock = kSampleBlock;
// Weights are exp(-a) while `a` is below this, then 0.
constexpr float kWeightless = 79.0f;
// So many candidates are tried first where the share of all weights decides.
constexpr int kFirstCandidates = 128, kMoreCandidates = 2048;

// exp(-a) of a in [0, 79) to the last bit or two.
Doubles exp_negative(Doubles a) {
    const Doubles whole = nearest(mul(a, all_doubles(-1.4426950408889634)));
    Doubles r = fms(whole, all_doubles(-0x1.62e42fefa39efp-1), a);
    r = fma(whole, all_doubles(-0x1.abc9e3b39803fp-56), r);
    Doubles p = all_doubles(1.0 / 6227020800);
    for (double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0,
                             1.0, 1.0})
        p = fma(p, r, all_doubles(1.0 / factorial));
    return times_power(p, whole);
}

Doubles weights_of(Floats distance) {
    return where(less(distance, all(kWeightless)), exp_negative(to_doubles(distance)));
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

int32_t bits_of(float x) {
    int32_t value;
    std::memcpy(&value, &x, sizeof value);
    return value;
}

float float_of(int32_t x) {
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
        const Floats lowest = all(-INFINITY);
        Floats best = lowest;
        Mask not_numbers = first_lanes(0);
        for (int block = 0; block < num_blocks_; ++block) {
            Floats even = lowest, odd = lowest;
            if ((block + 1) * kBlock <= vocab_size_) {
                const float* x = logits_ + block * kBlock;
                for (int i = 0; i < kBlock; i += 32) {
                    const Floats a = load(x + i), b = load(x + i + 16);
                    not_numbers = either(not_numbers, unordered(a, b));
                    even = max(even, a);
                    odd = max(odd, b);
                }
            } else {
                for (int i = block * kBlock; i < vocab_size_; i += 16) {
                    const Floats a = logits(i);
                    not_numbers = either(not_numbers, unordered(a, a));
                    even = max(even, a);
                }
            }
            even = max(even, odd);
            store(scratch_.maxima() + 16 * block, even);
            best = max(best, even);
        }
        best_ = largest(best);
        return !bits(not_numbers) && std::isfinite(best_);
    }

    int first_best() const {
        const Floats best = all(best_);
        for (int block = 0; block < num_blocks_; ++block) {
            if (!bits(equal(maxima(block), best))) continue;
            for (int i = block * kBlock;; i += 16)
                if (const unsigned found = bits(equal(logits(i), best))) return i + __builtin_ctz(found);
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
    Floats logits(int i) const { return load_or(logits_ + i, vocab_size_ - i, all(-INFINITY)); }
    Floats maxima(int block) const { return load(scratch_.maxima() + 16 * block); }

    Floats distance(Floats logit) const { return div(sub(all(best_), logit), all(temperature_)); }

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
            store(weights + i, weights_of(distance(logits(start + i))));
        }
        return start + walk(weights, count, target - before);
    }

    // Fills in the blocks' sums; returns the sum of these.
    double add_all() {
        double whole = 0;
        for (int block = 0; block < num_blocks_; ++block) {
            Doubles block_sum = all_doubles(0);
            const int end = std::min((block + 1) * kBlock, vocab_size_);
            for (int i = block * kBlock; i < end; i += 16) {
                const Floats a = distance(logits(i));
                // Where most tokens are masked.
                if (!bits(less(a, all(kWeightless)))) continue;
                block_sum = add(block_sum, weights_of(a));
            }
            scratch_.sums()[block] = sum(block_sum);
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
        if (count * 2 > 16 * num_blocks_) return kWeightless;
        const auto reached = [&](float logit) {
            const Floats edge = all(logit);
            int found = 0;
            for (int i = 0; i < num_blocks_; ++i) found += __builtin_popcount(bits(less_equal(edge, maxima(i))));
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
        const Floats cut = all(best_ - (span + span * 0x1p-18f + 0x1p-110f) - std::fabs(best_) * 0x1p-22f);
        const Floats furthest = all(edge), weightless = all(kWeightless);
        int count = 0;
        for (int block = 0; block < num_blocks_; ++block) {
            if (!bits(less_equal(cut, maxima(block)))) continue;
            const int end = std::min((block + 1) * kBlock, vocab_size_);
            for (int i = block * kBlock; i < end; i += 16) {
                const Floats logit = logits(i);
                if (!bits(less_equal(cut, logit))) continue;
                const Floats a = distance(logit);
                const Mask taken = both(less_equal(a, furthest), less(a, weightless));
                store_packed(scratch_.distances() + count, taken, a);
                store_packed(scratch_.ids() + count, taken, add(lane_numbers(), all_ints(i)));
                count += __builtin_popcount(bits(taken));
            }
        }
        num_candidates_ = count;
        for (int i = 0; i < count; i += 16) store(scratch_.weights() + i, weights_of(load(scratch_.distances() + i)));
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

    // Of the candidates from the i-th on, those within a distance.
    Mask within(int i, Floats furthest) const {
        return both(less_equal(load(scratch_.distances() + i), furthest), first_lanes(num_candidates_ - i));
    }

    // The sum of the candidates' weights up to a distance.
    double sum_within(float limit) const {
        Doubles weight_sum = all_doubles(0);
        for (int i = 0; i < num_candidates_; i += 16)
            weight_sum = add(weight_sum, where(within(i, all(limit)), load_doubles(scratch_.weights() + i)));
        return sum(weight_sum);
    }

    int count_within(float limit) const {
        int count = 0;
        for (int i = 0; i < num_candidates_; i += 16) count += __builtin_popcount(bits(within(i, all(limit))));
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
                alignas(64) double at_edge[16];
                store(at_edge, exp_negative(all_doubles(limit)));
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
        for (int i = 0; i < count; ++i) high = std::max(high, bits_of(distances[i]));
        double before = 0;
        for (int round = 0; high - low > 1; ++round) {
            // Distances lie evenly at first, then by their bits.
            int32_t middle = bits_of((float_of(std::max(low, 0)) + float_of(high)) * 0.5f);
            if (round >= 12 || middle <= low || middle >= high) middle = low + (high - low) / 2;
            const Ints edge = all_ints(middle);
            Doubles weight_sum = all_doubles(0);
            int num_within = 0;
            for (int i = 0; i < count; i += 16) {
                const Mask nearer = both(less_equal(load_ints(distances + i), edge), first_lanes(count - i));
                num_within += __builtin_popcount(bits(nearer));
                if (!kCounts) weight_sum = add(weight_sum, where(nearer, load_doubles(weights + i)));
            }
            const double so_far = before + (kCounts ? num_within : sum(weight_sum));
            const bool reached = so_far >= target;
            if (reached) {
                high = middle;
            } else {
                low = middle, before = so_far;
            }
            int kept = 0;
            for (int i = 0; i < count; i += 16) {
                const Ints a = load_ints(distances + i);
                const Mask nearer = less_equal(a, edge);
                const Mask stays = both(reached ? nearer : inverse(nearer), first_lanes(count - i));
                if (!kCounts) store_packed(scratch_.active_weights() + kept, stays, load_doubles(weights + i));
                store_packed(reinterpret_cast<int32_t*>(scratch_.active_distances() + kept), stays, a);
                kept += __builtin_popcount(bits(stays));
            }
            distances = scratch_.active_distances(), weights = scratch_.active_weights();
            count = kept;
            if (count <= 1) break;
        }
        return count == 1 ? distances[0] : float_of(high);
    }

    int draw_of_candidates(float limit, double noise) {
        const int num_blocks = (num_candidates_ + kBlock - 1) / kBlock;
        double* weights = scratch_.weights();
        double whole = 0;
        for (int block = 0; block < num_blocks; ++block) {
            Doubles block_sum = all_doubles(0);
            const int end = std::min((block + 1) * kBlock, num_candidates_);
            for (int i = block * kBlock; i < end; i += 16) {
                const Doubles kept = where(within(i, all(limit)), load_doubles(weights + i));
                store(weights + i, kept);
                block_sum = add(block_sum, kept);
            }
            scratch_.sums()[block] = sum(block_sum);
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

int draw(const float* logits, int vocab_size, const SampleScratch& scratch, const RowParams* params) {
    Row row(logits, vocab_size, scratch);
    if (!row.find_best()) return -1;
    return params ? row.draw(*params) : row.first_best();
}

}  // namespace

const SamplingKernels kSampling = {draw};

}  // namespace quartet::QUARTET_ISA
