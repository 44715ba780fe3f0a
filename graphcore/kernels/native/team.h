// A team of threads that carries out one job together, again and again, on a machine that may be busy.
//
// A job is a row of phases, and a phase some units of work that may be done in any order by anybody. Each thread has a
// share of the units, cut into portions; it takes its own first, and when it then waits for long it takes those that the
// others have not come to. What ends a phase is that all of its units are done, not that all threads have arrived: a
// thread that has lost its core to a neighbour is waited for only while it holds a portion.
//
//     phase_     the phase that is open; a number that only grows, over all runs
//     ticket     of each thread's share: (phase, portions taken). One that shows an earlier phase has not been touched yet,
//                and whoever takes the first portion moves it on; so nobody has to reset anything between two phases
//     inside_    workers that may be looking at the job; a run returns when there are none
//
// Who waits spins for a moment, because on a quiet machine the others come within microseconds, then sleeps, so that the
// kernel has a core for whoever is late. A worker that sleeps has left the run first.
//
// Of C++ only what its headers define is used, here and in exports.cpp: a library then needs no C++ runtime, which torch
// brings its own of, and which a compiler without one would have to build first.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace graphcore {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    sched_yield();
#endif
}

// Holds a mutex for as long as it lives.
class Lock {
  public:
    explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
    ~Lock() { pthread_mutex_unlock(&mutex_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

  private:
    pthread_mutex_t& mutex_;
};

// Sleeps while the number is that value; may return early.
inline void sleep_on(std::atomic<uint32_t>& number, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    number.wait(value);
#endif
}

inline void wake_all(std::atomic<uint32_t>& number) {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    number.notify_all();
#endif
}

struct Range {
    int begin, end;
};

// The part of [0, count) that belongs to a thread: contiguous, sizes differ by one at most.
inline Range share(int count, int thread, int threads) {
    return {int(int64_t(count) * thread / threads), int(int64_t(count) * (thread + 1) / threads)};
}

constexpr int PORTIONS = 8;  // of a thread's share, where nothing else says how finely it can be cut

// The units of a phase. Portions are cut at multiples of `grain`, so that units which gain from each other stay together.
struct Deal {
    int units = 1, grain = 1;

    static Deal even(int units, int threads) { return {units, std::max(1, units / (threads * PORTIONS))}; }

    Range portion(int owner, int threads, int index) const {
        const Range all = share(units, owner, threads);
        const int first = (all.begin / grain + index) * grain;
        return {std::max(all.begin, first), std::min(all.end, first + grain)};
    }

    int portions(int owner, int threads) const {
        const Range all = share(units, owner, threads);
        return all.begin == all.end ? 0 : (all.end + grain - 1) / grain - all.begin / grain;
    }
};

// What derives from it defines all but `enter`. (Pure virtual functions would need the C++ runtime.)
class Job {
  public:
    virtual int phases() const { return 0; }
    virtual Deal deal(int, int) const { return {}; }  // of a phase among so many threads
    // What each thread computes for itself before its first portion of a phase.
    virtual void enter(int, int) {}  // phase, thread
    virtual void carry_out(int, Range, int) {}  // phase, units, thread

  protected:
    ~Job() = default;
};

class Team {
  public:
    // The team is smaller where the system gives fewer threads.
    explicit Team(int threads) : members_((Member*)std::aligned_alloc(alignof(Member), size_t(threads) * sizeof(Member))) {
        for (; size_ < threads; size_++) {
            Member& member = *new (members_ + size_) Member{.team = this, .thread = size_};
            if (size_ && pthread_create(&member.worker, nullptr, serve, &member)) break;
        }
    }

    ~Team() {
        is_over_.store(true);
        open_phase(phase_ + 1);
        for (int thread = 1; thread < size_; thread++) pthread_join(members_[thread].worker, nullptr);
        std::free(members_);
    }

    int size() const { return size_; }

    // Returns when all phases are done. One caller at a time; others wait.
    // linger: nanoseconds for which workers spin for the next run; on a busy machine they do not.
    void run(Job& job, int64_t linger) {
        const Lock one_caller(callers_);
        job_ = &job, count_ = uint32_t(job.phases()), first_ = phase_ + 1;
        const int lateness = lateness_.load(std::memory_order_relaxed);
        if (lateness) lateness_.store(lateness - 1, std::memory_order_relaxed);
        linger_.store(lateness ? 0 : linger, std::memory_order_relaxed);
        is_open_.store(true);
        open_phase(first_);
        for (uint32_t phase = first_; phase - first_ < count_; phase = phase_) {
            take_part(phase, 0);
            if (!await_end_of(phase, 0)) sleep_through(phase);
        }
        is_open_.store(false);
        for (uint32_t left; (left = inside_);)
            if (!await_other(inside_, left, SPIN)) sleep_on(inside_, left);
    }

    // Seconds that callers of `run` have slept because another thread was late.
    double seconds_late() const { return double(slept_.load(std::memory_order_relaxed)) * 1e-9; }

  private:
    static constexpr int64_t STEAL = 3000, SPIN = 20000;  // nanoseconds of waiting before others' portions are taken, and before sleep
    static constexpr int PATIENCE = 64;                   // runs for which the machine counts as busy after a thread was late
    static constexpr int COUNT_BITS = 24;

    struct alignas(64) Member {
        std::atomic<uint64_t> ticket{0};
        Team* team;
        int thread;
        pthread_t worker{};  // the caller's is none of ours
    };

    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
    }

    static void* serve(void* member) {
        static_cast<Member*>(member)->team->serve(static_cast<Member*>(member)->thread);
        return nullptr;
    }

    void serve(int thread) {
        uint32_t seen = 0;
        for (bool is_late = false;;) {
            if (is_late || !await_other(phase_, seen, linger_.load(std::memory_order_relaxed))) sleep_in(seen);
            is_late = false;
            inside_++;
            seen = phase_;
            if (is_over_.load()) return;  // told before the phase changes for the last time
            if (is_open_.load())
                while (!is_late && seen - first_ < count_) {
                    take_part(seen, thread);
                    is_late = !await_end_of(seen, thread);
                    if (!is_late) seen = phase_;
                }
            if (--inside_ == 0 && !is_open_) wake_all(inside_);
        }
    }

    // The index of a portion of the owner's share that nobody had taken, or -1.
    int take(uint32_t phase, int owner, int portions) {
        std::atomic<uint64_t>& ticket = members_[owner].ticket;
        uint64_t seen = ticket.load(std::memory_order_relaxed);
        while (true) {
            const int32_t ahead = int32_t(uint32_t(seen >> COUNT_BITS) - phase);
            const int taken = ahead < 0 ? 0 : int(seen & ((1 << COUNT_BITS) - 1));
            if (ahead > 0 || taken >= portions) return -1;
            const uint64_t next = (uint64_t(phase) << COUNT_BITS) + uint64_t(taken) + 1;
            if (ticket.compare_exchange_weak(seen, next, std::memory_order_acq_rel)) return taken;
        }
    }

    // Carries out what is left of the thread's own share, and if it steals of the others' too.
    void take_part(uint32_t phase, int thread, bool steals = false) {
        const int index = int(phase - first_);
        const Deal deal = job_->deal(index, size_);
        int done = 0;
        for (int step = 0; step < (steals ? size_ : 1); step++) {
            const int owner = (thread + step) % size_, portions = deal.portions(owner, size_);
            for (int portion; (portion = take(phase, owner, portions)) >= 0; done++) {
                if (!done) job_->enter(index, thread);
                job_->carry_out(index, deal.portion(owner, size_, portion), thread);
            }
        }
        if (!done) return;
        int all = 0;
        for (int owner = 0; owner < size_; owner++) all += deal.portions(owner, size_);
        if (done_.fetch_add(done, std::memory_order_acq_rel) + done < all) return;
        done_.store(0, std::memory_order_relaxed);
        open_phase(phase + 1);
    }

    void open_phase(uint32_t phase) {
        phase_ = phase;
        if (sleepers_ && sleepers_.exchange(0)) wake_all(phase_);
    }

    // Sleeps while the phase is open; may return early. Sleepers are counted before the phase is looked at for the last time,
    // and it changes before they are counted, so that nobody is forgotten; it never has an earlier value again.
    void sleep_in(uint32_t phase) {
        sleepers_++;
        if (phase_ == phase) sleep_on(phase_, phase);
    }

    // Sleeps until the phase has ended.
    void sleep_through(uint32_t phase) {
        const int64_t began = now();
        while (phase_ == phase) sleep_in(phase);
        slept_.fetch_add(now() - began, std::memory_order_relaxed);
    }

    // Waits for the end of the phase and helps who is late; false if that took too long.
    bool await_end_of(uint32_t phase, int thread) {
        if (await_other(phase_, phase, STEAL)) return true;
        take_part(phase, thread, true);
        if (await_other(phase_, phase, SPIN)) return true;
        lateness_.store(PATIENCE, std::memory_order_relaxed);
        return false;
    }

    // Spins until the number has another value; false if that took longer than the nanoseconds.
    static bool await_other(const std::atomic<uint32_t>& number, uint32_t value, int64_t nanoseconds) {
        for (int i = 0; i < 64; i++, pause())
            if (number.load(std::memory_order_acquire) != value) return true;
        for (const int64_t began = now(); now() - began < nanoseconds;)
            for (int i = 0; i < 16; i++, pause())
                if (number.load(std::memory_order_acquire) != value) return true;
        return false;
    }

    Member* const members_;
    int size_ = 0;
    pthread_mutex_t callers_ = PTHREAD_MUTEX_INITIALIZER;
    Job* job_ = nullptr;
    uint32_t first_ = 0, count_ = 0;  // phases of the job
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<uint32_t> inside_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};  // workers and callers asleep in the open phase
    alignas(64) std::atomic<int> done_{0};  // portions of the open phase
    alignas(64) std::atomic<bool> is_open_{false}, is_over_{false};
    std::atomic<int> lateness_{0};
    std::atomic<int64_t> linger_{0}, slept_{0};
};

}  // namespace graphcore
