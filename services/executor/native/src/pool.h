#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace quartet {

// Threads that share the chunks of one job after another. Each has a range of them, which it does in order so that what
// it reads next is known, and then takes from the end of another's, so that a thread which the system has set aside
// delays the job by one chunk and not by its share. A thread that waits spins, then yields, then sleeps: on a busy
// machine spinning would take from what it waits for. Between begin() and end() it sleeps later than outside.
class Pool {
  public:
    using Function = void (*)(const void* context, int chunk, int thread);

    // The caller of run() is thread 0; `on_idle` is called by the others before they sleep.
    Pool(int num_threads, void (*on_idle)());
    ~Pool();
    Pool(const Pool&) = delete;

    int num_threads() const { return num_threads_; }
    void begin();
    void end();

    // body(chunk, thread) for every chunk in [0, num_chunks); returns when all are done.
    template <class Body>
    void run(int num_chunks, const Body& body) {
        run_function(num_chunks, [](const void* context, int chunk, int thread) {
            (*static_cast<const Body*>(context))(chunk, thread);
        }, &body);
    }

    // Whether the thread is going to do chunk + 1 next, unless another takes it.
    bool continues(int num_chunks, int chunk, int thread) const {
        return chunk >= range_end(num_chunks, thread - 1) && chunk + 1 < range_end(num_chunks, thread);
    }

  private:
    // Epoch (24 bits), end (20), next chunk (20): one word, so that a chunk is taken of one job only.
    struct alignas(64) Range {
        std::atomic<uint64_t> word{0};
    };

    // A thread's range begins where the one before ends.
    int range_end(int num_chunks, int thread) const {
        return static_cast<int>(static_cast<int64_t>(num_chunks) * (thread + 1) / num_threads_);
    }
    void run_function(int num_chunks, Function function, const void* context);
    bool take_chunk(int thread);
    bool take_from(Range& range, bool own, int thread);
    bool has_chunk() const;
    void work(int thread);
    void wait_done(int num_chunks);
    void wake_workers();

    const int num_threads_;
    std::unique_ptr<Range[]> ranges_;  // a thread's each
    uint64_t epoch_ = 0;
    std::atomic<int> num_chunks_{0};
    std::atomic<Function> function_{nullptr};
    std::atomic<const void*> context_{nullptr};
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) std::atomic<bool> active_{false};
    std::atomic<bool> stopping_{false};
    std::atomic<uint32_t> wakes_{0};
    std::atomic<int> num_asleep_{0};
    std::atomic<bool> caller_asleep_{false};
    std::atomic<uint32_t> ends_{0};
    void (*on_idle_)();
    std::vector<std::thread> workers_;
};

}  // namespace quartet
