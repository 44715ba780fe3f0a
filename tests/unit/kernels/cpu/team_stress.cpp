// Runs many random jobs on one team. Fails if a phase begins before the previous phase is complete, if a unit is done twice
// or not at all, or if a run returns while a thread still works.
//
//     team_stress THREADS RUNS SEED
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "team.h"

using namespace graphcore;

struct Random final : Job {
    std::mt19937 random;
    std::vector<Deal> deals;
    std::vector<std::vector<int>> times;  // how often each unit of a phase was done
    std::atomic<int> inside{0}, faults{0};

    explicit Random(unsigned seed) : random(seed) {
        const int count = 1 + int(random() % 6);
        for (int phase = 0; phase < count; phase++) {
            const int units = int(random() % 40);  // none in some phases
            deals.push_back({units, 1 + int(random() % 5)});
            times.emplace_back(units, 0);
        }
    }

    int phases() const override { return int(deals.size()); }
    Deal deal(int phase, int) const override { return deals[phase]; }

    void enter(int phase, int) override {
        if (phase) for (const int count : times[phase - 1]) faults += count != 1;
    }

    void carry_out(int phase, Range units, int thread) override {
        inside++;
        enter(phase, thread);
        const int trouble = (units.begin * 7 + phase * 13 + thread) % 97;
        if (trouble == 0) std::this_thread::sleep_for(std::chrono::microseconds(60));
        if (trouble == 1) std::this_thread::yield();
        for (int unit = units.begin; unit < units.end; unit++) times[phase][unit]++;
        faults += units.begin >= units.end;
        inside--;
    }

    int check() {
        faults += inside.load();
        for (const auto& phase : times) for (const int count : phase) faults += count != 1;
        return faults.load();
    }
};

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]), runs = std::atoi(arguments[2]);
    std::mt19937 random(unsigned(std::atoi(arguments[3])));
    Team team(threads);
    for (int run = 0; run < runs; run++) {
        Random job(random());
        team.run(job, run % 3 ? 0 : 100000);
        if (const int faults = job.check()) return std::printf("run %d: %d faults\n", run, faults), 1;
        if (run % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
    std::puts("whole");
}
