// A whole forward pass of a Llama-like decoder in bf16 on CPU, sums and the residual in f32.
//
// All threads go through one list of stages; what a stage computes is cut into tasks that do not
// depend on each other (team.h). Per layer:
//
//     norm -> qkv -> rotate, write KV -> attention -> output (+ residual)
//          -> norm -> gate and up -> (silu * up) -> down (+ residual)

#include <algorithm>
#include <system_error>

#include "attention.h"
#include "matmul.h"
#include "rows.h"
#include "team.h"

struct Layer {
    Matrix qkv, output, gate_up, down;
    const float* attention_norm;  // [hidden]
    const float* mlp_norm;        // [hidden]
    const float* qk_norm;         // [num_heads + num_kv_heads, head_dim] or null
};

struct Model {
    Heads heads;
    int64_t num_layers, hidden, vocab;
    float eps;
    const Layer* layers;
    const bf16* embedding;  // [vocab, hidden]
    const float* norm;      // [hidden]
    Matrix head;
    const float* cosine;  // [positions, head_dim]
    const float* sine;    // [positions, head_dim], the first half negative
};

enum Stage { EMBED, NORM, QKV, ROTATE, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD };  // STAGES in Python

namespace {

constexpr int64_t ROWS_AT_ONCE = 4;

// Memory of one pass, between the stages.
struct Rows {
    int64_t hidden_width, qkv_width, inner, act_width;
    float* hidden;  // [tokens, hidden_width]: the residual stream
    bf16* x;        // [tokens, hidden_width]
    float* qkv;     // [tokens, qkv_width]
    bf16* query;    // [tokens, inner]
    bf16* attended;  // [tokens, inner]
    bf16* act;      // [tokens, act_width]
    int64_t bytes;

    Rows(const Model& model, int64_t tokens, char* memory) {
        const Heads& heads = model.heads;
        hidden_width = round_up(model.hidden, PANEL);
        inner = heads.num_heads * heads.head_dim;
        qkv_width = model.layers->qkv.num_panels * PANEL;
        act_width = model.layers->gate_up.num_panels * LANES;
        char* at = memory;
        hidden = take<float>(at, tokens * hidden_width);
        x = take<bf16>(at, tokens * hidden_width);
        qkv = take<float>(at, tokens * qkv_width);
        query = take<bf16>(at, tokens * inner);
        attended = take<bf16>(at, tokens * inner);
        act = take<bf16>(at, tokens * act_width);
        bytes = at - memory;
    }

    template <typename T>
    static T* take(char*& at, int64_t count) {
        T* memory = reinterpret_cast<T*>(at);
        at += round_up(count * sizeof(T), 64);
        return memory;
    }
};

class Pass {
   public:
    Pass(const Model& model, const Batch& batch, Team& team, Attention& attention,
         const Rows& rows, Laps* laps)
        : model_(model), batch_(batch), team_(team), attention_(attention), r_(rows), laps_(laps) {}

    // Keys and values of all layers: [num_layers, 2, slots, num_kv_heads, kv_bytes].
    void run(char* kv, int64_t half_layer, float* logits) {
        embed();
        for (int64_t i = 0; i < model_.num_layers; i++) {
            const Layer& layer = model_.layers[i];
            char* keys = kv + 2 * i * half_layer;
            char* values = keys + half_layer;
            normalize(layer.attention_norm);
            project(layer.qkv);
            rotate_and_write(layer, keys, values);
            attention_.attend(team_, r_.query, keys, values, r_.attended);
            lap(ATTENTION);
            add(r_.attended, r_.inner, layer.output, OUTPUT);
            normalize(layer.mlp_norm);
            gate(layer.gate_up);
            add(r_.act, r_.act_width, layer.down, DOWN);
        }
        if (batch_.num_logits_rows) head(logits);
    }

   private:
    void lap(Stage stage) {
        if (laps_) laps_->lap(stage);
    }

    template <typename Work>
    void for_rows(int64_t count, const Work& work) {
        team_.share(ceil_div(count, ROWS_AT_ONCE), [&](int64_t task) {
            const int64_t end = std::min((task + 1) * ROWS_AT_ONCE, count);
            for (int64_t row = task * ROWS_AT_ONCE; row < end; row++) work(row);
        });
    }

    void embed() {
        for_rows(batch_.num_tokens, [&](int64_t row) {
            const bf16* from = model_.embedding + batch_.token_ids[row] * model_.hidden;
            float* to = r_.hidden + row * r_.hidden_width;
            for (int64_t i = 0; i < r_.hidden_width; i += LANES) {
                const __mmask16 lanes = model_.hidden > i ? first_lanes(model_.hidden - i) : 0;
                _mm512_storeu_ps(to + i, widen(_mm256_maskz_loadu_epi16(lanes, from + i)));
            }
        });
        lap(EMBED);
    }

    void normalize(const float* weight) {
        for_rows(batch_.num_tokens, [&](int64_t row) {
            const int64_t at = row * r_.hidden_width;
            norm(r_.hidden + at, weight, model_.hidden, model_.eps, r_.x + at);
        });
        lap(NORM);
    }

    void project(const Matrix& w) {
        multiply(team_, r_.x, r_.hidden_width, batch_.num_tokens, w,
                 [&](int64_t row, int64_t rows, int64_t panel, const float* sums) {
                     for (int64_t i = 0; i < rows; i++)
                         std::memcpy(r_.qkv + (row + i) * r_.qkv_width + panel * PANEL,
                                     sums + i * PANEL, PANEL * sizeof(float));
                 });
        lap(QKV);
    }

    void rotate_and_write(const Layer& layer, char* keys, char* values) {
        const Heads& heads = model_.heads;
        const int64_t dim = heads.head_dim;
        for_rows(batch_.num_tokens, [&](int64_t row) {
            float* head = r_.qkv + row * r_.qkv_width;
            const float* cosine = model_.cosine + batch_.positions[row] * dim;
            const float* sine = model_.sine + batch_.positions[row] * dim;
            for (int64_t i = 0; i < heads.num_heads + heads.num_kv_heads; i++, head += dim) {
                if (layer.qk_norm) norm(head, layer.qk_norm + i * dim, dim, model_.eps);
                rotate(head, cosine, sine, dim);
            }
            head = r_.qkv + row * r_.qkv_width;
            narrow(head, r_.query + row * r_.inner, r_.inner);
            const int64_t slot = batch_.slot_mapping[row];
            write(head + r_.inner, slot, keys);
            write(head + r_.inner + heads.num_kv_heads * dim, slot, values);
        });
        lap(ROTATE);
    }

    // All KV heads of one token.
    void write(const float* from, int64_t slot, char* cache) const {
        const Heads& heads = model_.heads;
        char* to = cache + slot * heads.num_kv_heads * heads.kv_bytes();
        for (int64_t i = 0; i < heads.num_kv_heads; i++, to += heads.kv_bytes()) {
            const float* numbers = from + i * heads.head_dim;
            if (heads.int8_kv)
                quantize(numbers, heads.head_dim, reinterpret_cast<int8_t*>(to));
            else
                narrow(numbers, reinterpret_cast<bf16*>(to), heads.head_dim);
        }
    }

    void add(const bf16* x, int64_t stride, const Matrix& w, Stage stage) {
        multiply(team_, x, stride, batch_.num_tokens, w,
                 [&](int64_t row, int64_t rows, int64_t panel, const float* sums) {
                     for (int64_t i = 0; i < rows; i++) {
                         float* to = r_.hidden + (row + i) * r_.hidden_width + panel * PANEL;
                         for (int64_t lane = 0; lane < PANEL; lane += LANES) {
                             const __m512 x = _mm512_load_ps(sums + i * PANEL + lane);
                             _mm512_storeu_ps(to + lane, _mm512_loadu_ps(to + lane) + x);
                         }
                     }
                 });
        lap(stage);
    }

    // A panel holds 16 columns of the gate and the same 16 of what it gates.
    void gate(const Matrix& w) {
        multiply(team_, r_.x, r_.hidden_width, batch_.num_tokens, w,
                 [&](int64_t row, int64_t rows, int64_t panel, const float* sums) {
                     for (int64_t i = 0; i < rows; i++) {
                         const __m512 gate = _mm512_load_ps(sums + i * PANEL);
                         const __m512 up = _mm512_load_ps(sums + i * PANEL + LANES);
                         bf16* to = r_.act + (row + i) * r_.act_width + panel * LANES;
                         _mm256_storeu_si256((__m256i*)to, narrow(silu(gate) * up));
                     }
                 });
        lap(GATE_UP);
    }

    void head(float* logits) {
        for_rows(batch_.num_logits_rows, [&](int64_t row) {
            norm(r_.hidden + batch_.logits_rows[row] * r_.hidden_width, model_.norm,
                 model_.hidden, model_.eps, r_.x + row * r_.hidden_width);
        });
        const Matrix& w = model_.head;
        multiply(team_, r_.x, r_.hidden_width, batch_.num_logits_rows, w,
                 [&](int64_t row, int64_t rows, int64_t panel, const float* sums) {
                     const int64_t left = model_.vocab - panel * PANEL;
                     for (int64_t i = 0; i < rows; i++)
                         std::memcpy(logits + (row + i) * model_.vocab + panel * PANEL,
                                     sums + i * PANEL,
                                     std::min<int64_t>(left, PANEL) * sizeof(float));
                 });
        lap(HEAD);
    }

    const Model& model_;
    const Batch& batch_;
    Team& team_;
    Attention& attention_;
    const Rows r_;
    Laps* laps_;  // of the first thread
};

}  // namespace

extern "C" {

// Of Matrix, Layer, Model and Batch, for whoever declares them again.
void decoder_struct_bytes(int64_t* sizes) {
    for (const size_t size : {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Batch)})
        *sizes++ = size;
}

// panels: room for round_up(n, 32) * round_up(k, 2) numbers.
void decoder_pack_bf16(const bf16* w, int64_t n, int64_t k, bf16* panels) {
    pack(w, n, k, panels);
}

void decoder_pack_int8(const int8_t* w, int64_t n, int64_t k, int8_t* panels) {
    pack(w, n, k, panels);
}

int64_t decoder_memory_bytes(const Model* model, int64_t num_tokens) {
    return Rows(*model, num_tokens, nullptr).bytes;
}

// Null where there are no more threads to be had.
Crew* decoder_crew(int num_threads) try {
    return new Crew(num_threads);
} catch (const std::system_error&) {
    return nullptr;
}

void decoder_dismiss(Crew* crew) { delete crew; }

// kv [num_layers, 2, half_layer bytes]; logits [num_logits_rows, vocab] f32; memory as
// decoder_memory_bytes has it, aligned to 64 bytes; laps [8 * num_layers + 2, 3] (team.h).
void decoder_forward(const Model* model, const Batch* batch, char* kv, int64_t half_layer,
                     float* logits, char* memory, Crew* crew, double* laps) {
    Team team(crew->size());
    Attention attention(model->heads, *batch);
    Laps first_laps(laps);
    const Rows rows(*model, batch->num_tokens, memory);
    crew->run([&](int index) {
        Pass(*model, *batch, team, attention, rows, index == 0 ? &first_laps : nullptr)
            .run(kv, half_layer, logits);
    });
}
}
