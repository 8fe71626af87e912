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

Pool::Pool(int num_threads, void (*on_idle)())
    : num_threads_(num_threads), ranges_(new Range[num_threads]), on_idle_(on_idle) {
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
    num_chunks_.store(num_chunks, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    ++epoch_;
    for (int thread = 0, first = 0; thread < num_threads(); ++thread) {
        const uint64_t end = range_end(num_chunks, thread);
        ranges_[thread].word.store(epoch_ << 2 * kChunkBits | end << kChunkBits | first);
        first = static_cast<int>(end);
    }
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
    if (take_from(ranges_[thread], true, thread)) return true;
    for (int i = 1; i < num_threads(); ++i)
        if (take_from(ranges_[(thread + i) % num_threads()], false, thread)) return true;
    return false;
}

bool Pool::take_from(Range& range, bool own, int thread) {
    uint64_t word = range.word.load(std::memory_order_acquire);
    for (;;) {
        const uint64_t next = word & kChunkMask, end = word >> kChunkBits & kChunkMask;
        if (next >= end) return false;
        // Of this job if the exchange succeeds: a job with a chunk left is not followed by another.
        const Function function = function_.load(std::memory_order_relaxed);
        const void* context = context_.load(std::memory_order_relaxed);
        const int num_chunks = num_chunks_.load(std::memory_order_relaxed);
        const uint64_t left = own ? word + 1 : word - (uint64_t{1} << kChunkBits);
        if (!range.word.compare_exchange_weak(word, left, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        function(context, static_cast<int>(own ? next : end - 1), thread);
        if (num_done_.fetch_add(1) + 1 == num_chunks && caller_asleep_.load()) {
            ends_.fetch_add(1);
            futex(ends_, FUTEX_WAKE, 1);
        }
        return true;
    }
}

bool Pool::has_chunk() const {
    for (int thread = 0; thread < num_threads(); ++thread) {
        const uint64_t word = ranges_[thread].word.load();
        if ((word & kChunkMask) < (word >> kChunkBits & kChunkMask)) return true;
    }
    return false;
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
