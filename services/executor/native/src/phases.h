// Where a decoder's time went.
#pragma once

#include <chrono>

namespace quartet {

// Part of the ABI: append only.
enum class Phase : int {
    kSmall = 0,  // embedding, norms, quantising of rows
    kProducts = 1,
    kAttention = 2,  // with rotation and the writing of keys and values
    kHead = 3,
};
constexpr int kNumPhases = 4;

// Cumulative wall time per phase, as the calling thread sees it: waiting for the pool's others included.
class PhaseTimes {
  public:
    void start() { last_ = Clock::now(); }
    // What passed since the last mark was this phase's.
    void mark(Phase phase) {
        const Clock::time_point now = Clock::now();
        spent_[static_cast<int>(phase)] += now - last_;
        last_ = now;
    }
    double seconds(int phase) const { return std::chrono::duration<double>(spent_[phase]).count(); }

  private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point last_;
    Clock::duration spent_[kNumPhases] = {};
};

}  // namespace quartet
