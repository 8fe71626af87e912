#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace quartet {

// Threads that share the chunks of one job after another, each taking the next free chunk, so that a thread
// which the system has set aside delays the job by one chunk and not by its share. A thread that waits spins,
// then yields, then sleeps: on a busy machine spinning would take from what it waits for. Between begin() and
// end() it sleeps later than outside.
class Pool {
  public:
    using Function = void (*)(const void* context, int chunk, int thread);

    // The caller of run() is thread 0; `on_idle` is called by the others before they sleep.
    Pool(int num_threads, void (*on_idle)());
    ~Pool();
    Pool(const Pool&) = delete;

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
    void begin();
    void end();

    // body(chunk, thread) for every chunk in [0, num_chunks); returns when all are done.
    template <class Body>
    void run(int num_chunks, const Body& body) {
        run_function(num_chunks, [](const void* context, int chunk, int thread) {
            (*static_cast<const Body*>(context))(chunk, thread);
        }, &body);
    }

  private:
    void run_function(int num_chunks, Function function, const void* context);
    bool take_chunk(int thread);
    bool has_chunk() const;
    void work(int thread);
    void wait_done(int num_chunks);
    void wake_workers();

    // epoch (24 bits), number of chunks (20), next chunk (20): one word, so that a chunk is taken of one job only.
    alignas(64) std::atomic<uint64_t> state_{0};
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
