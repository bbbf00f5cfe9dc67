// Causal attention over the paged KV cache, for decode rows and prefill chunks alike.
//
// The queries that share a KV head are rows of a matrix. Keys are taken in parts of PART tokens from
// the first one on; a part's keys and values are packed as matmul.h has it, its scores are whole in
// f32, and its result is merged into what the parts before it left ("Flash-Decoding", Dao et al.
// 2023):
//
//     part 0 [max, sum, values] -> merge -> part 1 -> merge -> ...      each row of queries for itself
//
// A query's parts, and the order within them, depend on its position alone. So its result is the
// same, to the bit, decoded or prefilled, in chunks of any size and beside any others. A decode row's
// parts are computed by different threads and merged, in the same order, by the last one.

#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "kv_rows.h"
#include "part.h"

constexpr int64_t QUERY_ROWS = 112;  // of a prefill tile, about

struct Batch {
    int64_t num_tokens, num_seqs, num_logits_rows;
    const int64_t* token_ids;     // [num_tokens]
    const int64_t* positions;     // [num_tokens]
    const int64_t* slot_mapping;  // [num_tokens] where KV is written
    const int64_t* query_starts;  // [num_seqs + 1]
    const int64_t* context_lens;  // [num_seqs], the chunk included
    const int64_t* block_tables;  // [num_seqs, table_width]
    int64_t table_width, block_size;
    const int64_t* logits_rows;  // [num_logits_rows] tokens
};

// Some neighbouring queries of a sequence.
struct Tile {
    int64_t first_token, count;  // in the batch
    int64_t position;            // of the first
    const int64_t* table;
    int64_t num_parts() const { return ceil_div(position + count, PART); }
};

// What one thread does at a time: one KV head of a prefill tile, all its parts; or all KV heads of
// a decode row, one part.
struct Item {
    int64_t tile, first_kv_head, end_kv_head, first_part, end_part;
    int64_t result;  // of a single part: where its first head's is kept; -1: merged at once
};

// One layer's attention of one batch; the plan is made once for all layers.
class Attention {
   public:
    Attention(const Heads& heads, const Batch& batch) : heads_(heads), batch_(batch) {
        for (int64_t seq = 0; seq < batch.num_seqs; seq++) plan(seq);
        results_.resize(num_results_ * Softmax::size(heads.group(), heads.padded()));
        for (const Item& item : items_) most_rows_ = std::max(most_rows_, rows_of(item));
        parts_left_ = std::make_unique<std::atomic<int64_t>[]>(tiles_.size());
        for (size_t i = 0; i < tiles_.size(); i++) parts_left_[i] = tiles_[i].num_parts();
    }

    // query, out [num_tokens, num_heads, head_dim]; keys, values [slots, num_kv_heads, kv_bytes].
    void attend(Team& team, const bf16* query, const char* keys, const char* values, bf16* out) {
        team.share(items_.size(), [&](int64_t i) {
            thread_local Room room;
            room.fit(most_rows_, heads_.padded());
            attend(items_[i], query, keys, values, out, room);
        });
    }

   private:
    struct Room {  // of one thread
        KvRows keys, values;
        std::vector<bf16> query, packed, weights;
        std::vector<float> scores, part, merged;

        void fit(int64_t num_rows, int64_t width) {
            grow(query, num_rows * width);
            grow(packed, PART * width);
            grow(weights, num_rows * PART);
            grow(scores, num_rows * PART);
            grow(part, Softmax::size(num_rows, width));
            grow(merged, Softmax::size(num_rows, width));
        }
    };

    void plan(int64_t seq) {
        const int64_t start = batch_.query_starts[seq], end = batch_.query_starts[seq + 1];
        const int64_t before = batch_.context_lens[seq] - (end - start);
        const int64_t step = std::max<int64_t>(QUERY_ROWS / heads_.group(), 1);
        for (int64_t first = start; first < end; first += step) {
            const int64_t count = std::min(step, end - first);
            tiles_.push_back({first, count, before + first - start,
                              batch_.block_tables + seq * batch_.table_width});
            plan_tile(tiles_.size() - 1);
        }
    }

    void plan_tile(int64_t tile) {
        const int64_t num_parts = tiles_[tile].num_parts(), num_kv_heads = heads_.num_kv_heads;
        if (tiles_[tile].count > 1) {
            for (int64_t kv = 0; kv < num_kv_heads; kv++)
                items_.push_back({tile, kv, kv + 1, 0, num_parts, -1});
            return;
        }
        for (int64_t part = 0; part < num_parts; part++, num_results_ += num_kv_heads)
            items_.push_back({tile, 0, num_kv_heads, part, part + 1, num_results_});
    }

    int64_t rows_of(const Item& item) const { return tiles_[item.tile].count * heads_.group(); }

    void attend(const Item& item, const bf16* query, const char* keys, const char* values,
                bf16* out, Room& room) {
        if (item.result < 0) {
            attend_tile(item, query, keys, values, out, room);
            return;
        }
        find_rows(item, item.first_part, keys, values, room);
        for (int64_t kv = 0; kv < heads_.num_kv_heads; kv++) {
            gather_queries(item, kv, query, room.query.data());
            attend_part(item, item.first_part, room, result(item.result + kv));
            room.keys.next_head(heads_);
            room.values.next_head(heads_);
        }
        if (--parts_left_[item.tile] == 0) finish(item, out, room);
    }

    void attend_tile(const Item& item, const bf16* query, const char* keys, const char* values,
                     bf16* out, Room& room) {
        const int64_t rows = rows_of(item), width = heads_.padded();
        const Softmax part = Softmax::at(room.part.data(), rows);
        const Softmax merged = Softmax::at(room.merged.data(), rows);
        merged.clear(rows, width);
        gather_queries(item, item.first_kv_head, query, room.query.data());
        for (int64_t i = item.first_part; i < item.end_part; i++) {
            find_rows(item, i, keys, values, room);
            attend_part(item, i, room, part);
            merged.merge(part, rows, width);
        }
        write(tiles_[item.tile], item.first_kv_head, merged, out);
    }

    // The last part of a decode row is there: merge all of them.
    void finish(const Item& item, bf16* out, Room& room) {
        const Tile& tile = tiles_[item.tile];
        const int64_t rows = rows_of(item), width = heads_.padded();
        const int64_t num_parts = tile.num_parts(), num_kv_heads = heads_.num_kv_heads;
        const int64_t first = item.result - item.first_part * num_kv_heads;
        const Softmax merged = Softmax::at(room.merged.data(), rows);
        for (int64_t kv = 0; kv < num_kv_heads; kv++) {
            merged.clear(rows, width);
            for (int64_t i = 0; i < num_parts; i++)
                merged.merge(result(first + i * num_kv_heads + kv), rows, width);
            write(tile, kv, merged, out);
        }
        parts_left_[item.tile] = num_parts;  // for the next layer
    }

    Softmax result(int64_t index) {
        const int64_t size = Softmax::size(heads_.group(), heads_.padded());
        return Softmax::at(results_.data() + index * size, heads_.group());
    }

    // [tokens, group, head_dim] of one KV head, contiguous.
    void gather_queries(const Item& item, int64_t kv_head, const bf16* query, bf16* to) const {
        const Tile& tile = tiles_[item.tile];
        const int64_t run = heads_.group() * heads_.head_dim;
        for (int64_t i = 0; i < tile.count; i++) {
            const int64_t token = tile.first_token + i;
            const bf16* from = query + token * heads_.num_heads * heads_.head_dim + kv_head * run;
            std::memcpy(to + i * run, from, run * sizeof(bf16));
        }
    }

    // The keys and values of a part's tokens, of the item's first KV head.
    void find_rows(const Item& item, int64_t part, const char* keys, const char* values,
                   Room& room) const {
        const Tile& tile = tiles_[item.tile];
        const int64_t first = part * PART;
        const int64_t count = std::min(PART, tile.position + tile.count - first);
        int64_t offsets[PART];
        int64_t block = first / batch_.block_size, place = first % batch_.block_size;
        for (int64_t i = 0; i < count; i++) {  // a division for each would take longer than its sums
            const int64_t slot = tile.table[block] * batch_.block_size + place;
            offsets[i] = (slot * heads_.num_kv_heads + item.first_kv_head) * heads_.kv_bytes();
            if (++place == batch_.block_size) block++, place = 0;
        }
        for (int64_t i = count; i < round_up(count, PANEL); i++) offsets[i] = offsets[count - 1];
        const int64_t num_heads = item.end_kv_head - item.first_kv_head;
        room.keys.find(heads_, keys, offsets, count, num_heads);
        room.values.find(heads_, values, offsets, count, num_heads);
        if (!heads_.int8_kv)
            touch(room.keys.rows, room.values.rows, num_heads * heads_.kv_bytes());
    }

    void attend_part(const Item& item, int64_t part, Room& room, const Softmax& result) const {
        const int64_t rows = rows_of(item), dim = heads_.head_dim, width = heads_.padded();
        float* scores = room.scores.data();
        bf16* weights = room.weights.data();
        const bf16* query = room.query.data();
        switch (rows) {
            case 1: score<1>(query, dim, room.keys.rows, scores); break;
            case 2: score<2>(query, dim, room.keys.rows, scores); break;
            case 3: score<3>(query, dim, room.keys.rows, scores); break;
            case 4: score<4>(query, dim, room.keys.rows, scores); break;
            default: score_packed(rows, room);
        }
        const int64_t before = tiles_[item.tile].position + 1 - part * PART;
        for (int64_t row = 0; row < rows; row++)
            weigh(scores + row * PART, room.keys.rows, room.values.rows,
                  before + row / heads_.group(),
                  heads_.scale * LOG2_E, result.most + row, result.sum + row, weights + row * PART);
        switch (rows) {
            case 1: add_up<1>(weights, room.values.rows, dim, result.values, width); break;
            case 2: add_up<2>(weights, room.values.rows, dim, result.values, width); break;
            case 3: add_up<3>(weights, room.values.rows, dim, result.values, width); break;
            case 4: add_up<4>(weights, room.values.rows, dim, result.values, width); break;
            default: add_up_packed(rows, room, result.values);
        }
    }

    void score_packed(int64_t rows, Room& room) const {
        const int64_t dim = heads_.head_dim;
        pack_keys(room.keys.rows, dim, room.packed.data());
        for_tiles(rows, [&](int64_t row, int64_t count) {
            for (int64_t key = 0; key < room.keys.rows.count; key += PANEL)
                multiply_tile(count, room.query.data() + row * dim, dim,
                              room.packed.data() + key * dim, dim / 2,
                              room.scores.data() + row * PART + key, PART);
        });
    }

    void add_up_packed(int64_t rows, Room& room, float* out) const {
        const int64_t width = heads_.padded(), num_pairs = ceil_div(room.values.rows.count, 2);
        pack_values(room.values.rows, heads_.head_dim, room.packed.data());
        for_tiles(rows, [&](int64_t row, int64_t count) {
            for (int64_t column = 0; column < width; column += PANEL)
                multiply_tile(count, room.weights.data() + row * PART, PART,
                              room.packed.data() + column * num_pairs * 2, num_pairs,
                              out + row * width + column, width);
        });
    }

    void write(const Tile& tile, int64_t kv_head, const Softmax& merged, bf16* out) const {
        const int64_t dim = heads_.head_dim, width = heads_.padded(), group = heads_.group();
        for (int64_t row = 0; row < tile.count * group; row++) {
            const int64_t token = tile.first_token + row / group;
            const int64_t head = kv_head * group + row % group;
            float* values = merged.values + row * width;
            const __m512 divisor = _mm512_set1_ps(merged.sum[row]);
            for (int64_t i = 0; i < width; i += LANES)
                _mm512_storeu_ps(values + i, _mm512_loadu_ps(values + i) / divisor);
            narrow(values, out + (token * heads_.num_heads + head) * dim, dim);
        }
    }

    const Heads heads_;
    const Batch batch_;
    std::vector<Tile> tiles_;
    std::vector<Item> items_;
    std::vector<float> results_;
    std::unique_ptr<std::atomic<int64_t>[]> parts_left_;  // [tiles], of decode rows
    int64_t num_results_ = 0;
    int64_t most_rows_ = 0;
};
