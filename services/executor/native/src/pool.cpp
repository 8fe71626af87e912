#include "pool.h"

#include <emmintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace quartet {
namespace {

constexpr int kChunkBits = 20;
constexpr uint64_t kChunkMask = (1u << kChunkBits) - 1;
// Rounds of `pause` (some 50 ns each) before a thread lets others have its core, rounds of that before it sleeps.
constexpr int kSpins = 400;
constexpr int kYields = 50;

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int num_threads, void (*on_idle)()) : on_idle_(on_idle) {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    stopping_ = true;
    wake_workers();
    for (auto& worker : workers_) worker.join();
}

void Pool::begin() {
    active_.store(true);
    if (num_asleep_.load() > 0) wake_workers();
}

void Pool::end() { active_.store(false, std::memory_order_release); }

void Pool::run_function(int num_chunks, Function function, const void* context) {
    if (num_chunks <= 1 || workers_.empty()) {
        for (int chunk = 0; chunk < num_chunks; ++chunk) function(context, chunk, 0);
        return;
    }
    // The last job is done, so nobody reads these now.
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 2 * kChunkBits) + 1;
    state_.store(epoch << 2 * kChunkBits | static_cast<uint64_t>(num_chunks) << kChunkBits);
    if (num_asleep_.load() > 0) wake_workers();
    while (take_chunk(0)) {
    }
    wait_done(num_chunks);
}

void Pool::wait_done(int num_chunks) {
    for (int spins = 0; num_done_.load(std::memory_order_acquire) != num_chunks; ++spins) {
        if (spins < kSpins) {
            _mm_pause();
        } else if (spins < kSpins + kYields) {
            sched_yield();
        } else {
            const uint32_t ends = ends_.load();
            caller_asleep_.store(true);
            // Whoever finishes the last chunk either is seen here or sees that the caller sleeps.
            if (num_done_.load() != num_chunks) futex(ends_, FUTEX_WAIT, ends);
            caller_asleep_.store(false);
        }
    }
}

void Pool::wake_workers() {
    wakes_.fetch_add(1);
    futex(wakes_, FUTEX_WAKE, INT_MAX);
}

bool Pool::take_chunk(int thread) {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
        const uint64_t chunk = state & kChunkMask, num_chunks = state >> kChunkBits & kChunkMask;
        if (chunk >= num_chunks) return false;
        // Of this job if the exchange succeeds: a job with a chunk left is not followed by another.
        const Function function = function_.load(std::memory_order_relaxed);
        const void* context = context_.load(std::memory_order_relaxed);
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire))
            continue;
        function(context, static_cast<int>(chunk), thread);
        if (num_done_.fetch_add(1) + 1 == static_cast<int>(num_chunks) && caller_asleep_.load()) {
            ends_.fetch_add(1);
            futex(ends_, FUTEX_WAKE, 1);
        }
        return true;
    }
}

bool Pool::has_chunk() const {
    const uint64_t state = state_.load();
    return (state & kChunkMask) < (state >> kChunkBits & kChunkMask);
}

void Pool::work(int thread) {
    int spins = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (take_chunk(thread)) {
            spins = 0;
        } else if (++spins < kSpins) {
            _mm_pause();
        } else if (active_.load(std::memory_order_acquire) && spins < kSpins + kYields) {
            sched_yield();
        } else {
            if (on_idle_) on_idle_();
            const uint32_t wakes = wakes_.load();
            num_asleep_.fetch_add(1);
            // Whoever makes work either is seen here or sees that somebody sleeps.
            if (!has_chunk() && !stopping_.load()) futex(wakes_, FUTEX_WAIT, wakes);
            num_asleep_.fetch_sub(1);
            spins = 0;
        }
    }
}

}  // namespace quartet
