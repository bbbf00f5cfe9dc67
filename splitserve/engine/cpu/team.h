// Threads that go through the same stages together, sharing each one's tasks.

#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <thread>
#include <vector>

// Threads that sleep until there is something to run, so that an idle process needs no core.
class Crew {
   public:
    explicit Crew(int size) {
        for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { serve(i); });
    }
    ~Crew() {
        work_ = nullptr;
        begin();
        for (std::thread& thread : threads_) thread.join();
    }
    Crew(const Crew&) = delete;

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    // `work(index)` on every thread, the caller's as index 0; returns when all are done.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        begin();
        work(0);
        for (int left = busy_; left; left = busy_) busy_.wait(left);
    }

   private:
    void begin() {
        busy_ = static_cast<int>(threads_.size());
        round_++;
        round_.notify_all();
    }

    void serve(int index) {
        for (int64_t seen = 0;; seen++) {
            round_.wait(seen);
            if (!work_) return;
            (*work_)(index);
            if (--busy_ == 0) busy_.notify_one();
        }
    }

    std::vector<std::thread> threads_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<int64_t> round_{0};
    std::atomic<int> busy_{0};
};

class Team {
   public:
    explicit Team(int size) : size_(size) {}

    // Run `work(task)` for every task below `count`, wherever a thread is free, and wait for all.
    template <typename Work>
    void share(int64_t count, const Work& work) {
        if (size_ == 1) {
            for (int64_t task = 0; task < count; task++) work(task);
            return;
        }
        const int64_t stage = stage_.load(std::memory_order_relaxed);
        for (int64_t task = next_++; task < count; task = next_++) work(task);
        if (++arrived_ == size_) {
            next_ = 0;
            arrived_ = 0;
            stage_.store(stage + 1, std::memory_order_release);
        } else {
            wait_while(stage);
        }
    }

   private:
    // A thread whose core another process needs would hold up all: after some microseconds, yield.
    void wait_while(int64_t stage) const {
        constexpr int SPINS = 2000;
        for (int i = 0; stage_.load(std::memory_order_acquire) == stage; i++) {
            if (i < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
    }

    const int size_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> stage_{0};
};

// What a thread did when: for each stage its number, its start on the monotonic clock, and how long
// it took, in s.
class Laps {
   public:
    explicit Laps(double* rows) : rows_(rows), since_(now()) {}

    void lap(int stage) {
        const double until = now();
        for (const double x : {double(stage), since_, until - since_}) *rows_++ = x;
        since_ = until;
    }

   private:
    static double now() {
        const auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration<double>(since).count();
    }

    double* rows_;
    double since_;
};
