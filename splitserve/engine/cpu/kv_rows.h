// Keys or values of some tokens, found in the paged cache: in place, or widened from int8.

#pragma once

#include <algorithm>
#include <vector>

#include "part.h"

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
    float scale;
    int32_t int8_kv;  // keys and values are int8, each with a scale behind it (rows.h)
    int64_t kv_bytes() const { return int8_kv ? head_dim + sizeof(float) : head_dim * sizeof(bf16); }
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t padded() const { return round_up(head_dim, PANEL); }
};

template <typename T>
inline void grow(std::vector<T>& room, size_t size) {
    if (room.size() < size) room.resize(size);
}

class KvRows {
   public:
    TokenRows rows;  // of one KV head

    // Of `count` tokens, each `offsets[i]` bytes behind `from`; num_heads of them lie together.
    void find(const Heads& heads, const char* from, const int64_t* offsets, int64_t count,
              int64_t num_heads) {
        rows.count = count;
        rows.scales = nullptr;
        if (heads.int8_kv) {
            widen_all(heads, from, offsets, num_heads);
            return;
        }
        for (int64_t i = 0; i < round_up(count, PANEL); i++)
            rows.rows[i] = reinterpret_cast<const bf16*>(from + offsets[i]);
    }

    void next_head(const Heads& heads) {
        for (int64_t i = 0; i < round_up(rows.count, PANEL); i++) rows.rows[i] += heads.head_dim;
        if (rows.scales) rows.scales += PART;
    }

   private:
    void widen_all(const Heads& heads, const char* from, const int64_t* offsets,
                   int64_t num_heads) {
        const int64_t dim = heads.head_dim;
        grow(widened_, PART * num_heads * dim);
        grow(scales_, num_heads * PART);
        rows.scales = scales_.data();
        for (int64_t i = 0; i < round_up(rows.count, PANEL); i++) {
            bf16* to = widened_.data() + i * num_heads * dim;
            rows.rows[i] = to;
            for (int64_t head = 0; head < num_heads; head++) {
                const char* at = from + offsets[i] + head * heads.kv_bytes();
                scales_[head * PART + i] =
                    widen(reinterpret_cast<const int8_t*>(at), dim, to + head * dim);
            }
        }
    }

    std::vector<bf16> widened_;   // [PART, heads, head_dim]
    std::vector<float> scales_;  // [heads, PART]
};

// Bring rows of `num_bytes` into the cache by reading a byte of each cache line. Those loads are all
// under way at once, where those of the sums to come would each wait for their turn; and eight
// places at a time keep as many prefetchers of the processor busy. (Prefetch instructions, measured
// in place of the loads, are dropped.)
inline void touch(const TokenRows& keys, const TokenRows& values, int64_t num_bytes) {
    constexpr int64_t STREAMS = 4;
    const int64_t steps = ceil_div(keys.count, STREAMS);
    for (int64_t i = 0; i < steps; i++) {
        for (int64_t at = 0; at < num_bytes; at += 64) {
            for (int64_t stream = 0; stream < STREAMS; stream++) {
                const int64_t row = std::min(stream * steps + i, keys.count - 1);
                for (const bf16* from : {keys.rows[row], values.rows[row]})
                    (void)*(reinterpret_cast<const volatile char*>(from) + at);
            }
        }
    }
}
