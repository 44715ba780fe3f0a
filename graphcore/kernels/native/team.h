// A team of threads that runs one function together, again and again.
//
// Workers spin for a moment after each run, because the next decode step is microseconds away, and sleep when it does
// not come: a team that is not used costs nothing, and a busy neighbour on the machine is let through.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace graphcore {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

class Team {
  public:
    using Function = void (*)(void* argument, int thread, Team& team);

    explicit Team(int threads) : size_(threads) {
        for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
    }

    ~Team() {
        function_ = nullptr;
        wake();
        for (auto& worker : workers_) worker.join();
    }

    int size() const { return size_; }

    // Runs function(argument, thread, team) on every thread and returns when all have ended.
    // One caller at a time; others wait.
    void run(Function function, void* argument) {
        const std::lock_guard<std::mutex> one_caller(callers_);
        function_ = function;
        argument_ = argument;
        running_.store(size_ - 1, std::memory_order_relaxed);
        wake();
        function(argument, 0, *this);
        for (int spins = 0; running_.load(std::memory_order_acquire); spins++) wait_briefly(spins);
    }

    // Returns on every thread once all threads have come here.
    void barrier() {
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) wait_briefly(spins);
    }

  private:
    static constexpr int SPINS = 4000;        // about 50 microseconds: longer than any step of a barrier on idle cores
    static constexpr int IDLE_SPINS = 20000;  // between two runs

    static void wait_briefly(int spins) {
        if (spins < SPINS)
            pause();
        else
            std::this_thread::yield();  // a neighbour has the other core
    }

    void wake() {
        run_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) run_.notify_all();
    }

    void work(int thread) {
        uint32_t seen = 0;
        while (true) {
            for (int spins = 0; run_.load(std::memory_order_acquire) == seen && spins < IDLE_SPINS; spins++) pause();
            if (run_.load(std::memory_order_acquire) == seen) {
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                run_.wait(seen, std::memory_order_acquire);
                sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            }
            seen++;
            if (function_ == nullptr) return;
            function_(argument_, thread, *this);
            running_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int size_;
    std::mutex callers_;
    std::vector<std::thread> workers_;
    Function function_ = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<uint32_t> run_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// The part of [0, count) that belongs to a thread: contiguous, sizes differ by one at most.
struct Range {
    int begin, end;
};

inline Range share(int count, int thread, int threads) {
    return {int(int64_t(count) * thread / threads), int(int64_t(count) * (thread + 1) / threads)};
}

}  // namespace graphcore
