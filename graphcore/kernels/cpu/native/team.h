// A thread pool with work stealing that runs one job after another, on a machine that may be busy.
//
// A job is a sequence of phases. A phase has units of work, which any thread may do in any order. Each thread has a share of
// the units, cut into portions. It takes its own portions first. If it then has to wait for long, it takes portions that
// other threads have not started. A phase ends when all of its units are done, even if some threads have not arrived. So a
// thread that has lost its core to another program holds up the team only while it has a portion.
//
//     phase_     the number of the open phase. It only grows, over all runs.
//     ticket     (phase, portions taken) for each thread's share. If its phase is an earlier one, no portion of the open phase
//                has been taken. Taking the first portion updates the phase, so nothing is reset between two phases.
//     inside_    the number of workers that may be reading the job. A run returns when it is 0.
//
// A thread that waits spins first, because on a quiet machine the others arrive within microseconds. Then it sleeps, so that
// the operating system can give the core to a late thread. A worker leaves the run before it sleeps.
//
// This file and exports.cpp use only header-only parts of the C++ standard library, so that the built library links no C++
// runtime: torch brings its own, and a compiler without one would have to build it first.
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

// Holds a mutex during its lifetime.
class Lock {
  public:
    explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
    ~Lock() { pthread_mutex_unlock(&mutex_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

  private:
    pthread_mutex_t& mutex_;
};

// Sleeps while number equals value. It may return early.
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

// Returns the part of [0, count) that belongs to a thread. Parts are contiguous, and their sizes differ by at most one.
inline Range share(int count, int thread, int threads) {
    return {int(int64_t(count) * thread / threads), int(int64_t(count) * (thread + 1) / threads)};
}

constexpr int PORTIONS = 8;  // portions of a thread's share, unless a job sets its own grain

// The division of a phase's units. Portions are cut at multiples of `grain`, so that units that share work stay together.
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

// The interface of jobs. A derived class defines every function; only `enter` is optional. The functions are not pure
// virtual, because these would need the C++ runtime.
class Job {
  public:
    virtual int phases() const { return 0; }
    virtual Deal deal(int, int) const { return {}; }  // phase, number of threads
    // Prepares a thread before its first portion of a phase.
    virtual void enter(int, int) {}  // phase, thread
    virtual void carry_out(int, Range, int) {}  // phase, units, thread

  protected:
    ~Job() = default;
};

// A phase of a job whose threads come from elsewhere. Each of them takes portions until none is left.
struct SharedPhase {
    Job& job;
    int phase;
    Deal deal;
    int threads;
    std::atomic<int> taken{0};

    void take_part(int thread) {
        bool has_entered = false;
        for (int owner = 0, before = 0, mine = taken++; owner < threads; before += deal.portions(owner, threads), owner++)
            for (; mine - before < deal.portions(owner, threads); mine = taken++) {
                if (!has_entered) job.enter(phase, thread);
                has_entered = true;
                job.carry_out(phase, deal.portion(owner, threads, mine - before), thread);
            }
    }
};

class Team {
  public:
    // Starts the workers; the caller of `run` is thread 0. The team is smaller if the system gives fewer threads.
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

    // Runs a job and returns when all phases are done. Concurrent callers run one after another.
    // linger: nanoseconds for which workers spin while they wait for the next run, unless the machine is busy.
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

    // Returns the seconds that callers of `run` slept because another thread was late.
    double seconds_late() const { return double(slept_.load(std::memory_order_relaxed)) * 1e-9; }

  private:
    static constexpr int64_t STEAL = 3000, SPIN = 20000;  // nanoseconds that a thread waits before it steals portions, and before it sleeps
    static constexpr int PATIENCE = 64;                   // runs for which the machine counts as busy after a thread was late
    static constexpr int COUNT_BITS = 24;

    struct alignas(64) Member {
        std::atomic<uint64_t> ticket{0};
        Team* team;
        int thread;
        pthread_t worker{};  // not set for thread 0, the caller
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
            if (is_over_.load()) return;  // is_over_ is set before the phase changes for the last time
            if (is_open_.load())
                while (!is_late && seen - first_ < count_) {
                    take_part(seen, thread);
                    is_late = !await_end_of(seen, thread);
                    if (!is_late) seen = phase_;
                }
            if (--inside_ == 0 && !is_open_) wake_all(inside_);
        }
    }

    // Takes a portion of the owner's share and returns its index, or -1 if none is left.
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

    // Carries out the portions left in the thread's own share and, if `steals`, those left in the others' shares.
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
        const bool is_callers = thread == 0 && !steals;  // ends a phase without units, which no portion ends
        if (!done && !is_callers) return;
        int all = 0;
        for (int owner = 0; owner < size_; owner++) all += deal.portions(owner, size_);
        if (all && (!done || done_.fetch_add(done, std::memory_order_acq_rel) + done < all)) return;
        done_.store(0, std::memory_order_relaxed);
        open_phase(phase + 1);
    }

    void open_phase(uint32_t phase) {
        phase_ = phase;
        if (sleepers_ && sleepers_.exchange(0)) wake_all(phase_);
    }

    // Sleeps while the phase is open; may return early. A thread adds itself to sleepers_ before it reads phase_ for the
    // last time, and open_phase changes phase_ before it reads sleepers_, so no sleeper is missed. phase_ never has an
    // earlier value again.
    void sleep_in(uint32_t phase) {
        sleepers_++;
        if (phase_ == phase) sleep_on(phase_, phase);
    }

    // Sleeps until the phase has ended, and counts the time in slept_.
    void sleep_through(uint32_t phase) {
        const int64_t began = now();
        while (phase_ == phase) sleep_in(phase);
        slept_.fetch_add(now() - began, std::memory_order_relaxed);
    }

    // Waits for the end of the phase, and helps threads that are late. Returns false if the phase took too long.
    bool await_end_of(uint32_t phase, int thread) {
        if (await_other(phase_, phase, STEAL)) return true;
        take_part(phase, thread, true);
        if (await_other(phase_, phase, SPIN)) return true;
        lateness_.store(PATIENCE, std::memory_order_relaxed);
        return false;
    }

    // Spins until number differs from value. Returns false if that takes longer than `nanoseconds`.
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
    uint32_t first_ = 0, count_ = 0;  // number of the job's first phase, and how many there are
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<uint32_t> inside_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};  // workers and callers asleep in the open phase
    alignas(64) std::atomic<int> done_{0};  // portions of the open phase that are done
    alignas(64) std::atomic<bool> is_open_{false}, is_over_{false};
    std::atomic<int> lateness_{0};
    std::atomic<int64_t> linger_{0}, slept_{0};
};

}  // namespace graphcore
