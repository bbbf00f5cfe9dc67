// Attention of decode rows (one query each) over the paged KV cache, read in place.
//
// A context is cut into parts of PART tokens; threads take (row, part) pairs, and a row's parts are
// merged in order afterwards ("Flash-Decoding", Dao et al. 2023). The cut does not depend on the
// batch or on the number of threads, so neither does a row's result.
//
//     row 0, 150 tokens   [part 0][part 1]          each part: max, sum of exp, weighted values
//     row 1, 250 tokens   [part 2][part 3]          for every head, in f32
//
// Sums are f32 in vectors of 16 lanes, which the compiler splits where the CPU's are shorter.

#include <cstdint>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr int PART = 128;  // tokens, a multiple of LANES
constexpr float LOWEST = -__builtin_inff();

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

struct bfloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Floats load(const bfloat16* from) {
    const Halves halves = *reinterpret_cast<const Halves*>(from);
    return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}

inline void store(float* to, Floats x) { *reinterpret_cast<Floats*>(to) = x; }

inline void store(bfloat16* to, Floats x) {  // to the nearest, ties to even
    const Ints bits = (Ints)x;
    const Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Ints kept = x == x ? rounded : (bits >> 16) | 0x40;
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(kept, Halves);
}

inline Floats fill(float x) { return Floats{} + x; }

// e^x for x <= 0, to about 1e-7: 2^n * e^r with |r| <= ln(2) / 2, and a polynomial for e^r
// (Cephes, expf). 0 below -87; NaN stays NaN.
inline Floats exponential(Floats x) {
    const Floats held = x < -87.0f ? fill(-87.0f) : x;
    const Floats shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (held * 1.44269504f + shift) - shift;
    const Floats r = held - n * 0.693359375f - n * -2.12194440e-4f;
    Floats y = fill(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < -87.0f ? Floats{} : y * (Floats)power;
}

inline float largest(Floats x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

inline float total(Floats x) {
    x += __builtin_shuffle(x, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    x += __builtin_shuffle(x, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    x += __builtin_shuffle(x, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    x += __builtin_shuffle(x, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
    return x[0];
}

// The sums of 16 vectors as one vector: pairs are added lane against lane, four times.
inline Floats totals(Floats* v) {
    const Ints even1{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    const Ints even2{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const Ints even4{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const Ints even8{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const auto add = [](Floats a, Floats b, Ints even, int step) {
        return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + step);
    };
    for (int i = 0; i < 8; i++) v[i] = add(v[2 * i], v[2 * i + 1], even1, 1);
    for (int i = 0; i < 4; i++) v[i] = add(v[2 * i], v[2 * i + 1], even2, 2);
    for (int i = 0; i < 2; i++) v[i] = add(v[2 * i], v[2 * i + 1], even4, 4);
    return add(v[0], v[1], even8, 8);
}

struct Heads {
    int64_t num_heads, num_kv_heads, block_size;
    float scale;
    int64_t group() const { return num_heads / num_kv_heads; }
};

// Where the tokens of a part lie in a layer's keys or values.
struct Rows {
    int64_t offsets[PART];
    int count;
};

// scores[head][token] = scale * query . key, LOWEST behind the last token.
template <typename T, int D>
void score(const Heads& heads, const T* query, const T* keys, const Rows& rows, float* scores) {
    constexpr int V = D / LANES;
    constexpr int MOST = 4;  // query heads that share one read of the keys
    const int64_t group = heads.group();
    for (int64_t kv = 0; kv < heads.num_kv_heads; kv++) {
        for (int64_t first = 0; first < group; first += MOST) {
            const int width = group - first < MOST ? group - first : MOST;
            const int64_t head = kv * group + first;
            Floats q[MOST][V];
            for (int g = 0; g < width; g++)
                for (int v = 0; v < V; v++)
                    q[g][v] = load(query + (head + g) * D + v * LANES) * heads.scale;
            for (int t = 0; t < rows.count; t += LANES) {
                Floats sums[MOST][LANES];
                for (int i = 0; i < LANES; i++) {
                    // behind the end: the last token again, masked below
                    const int token = t + i < rows.count ? t + i : rows.count - 1;
                    const T* key = keys + rows.offsets[token] + kv * D;
                    Floats k[V];
                    for (int v = 0; v < V; v++) k[v] = load(key + v * LANES);
                    for (int g = 0; g < width; g++) {
                        Floats sum = q[g][0] * k[0];
                        for (int v = 1; v < V; v++) sum += q[g][v] * k[v];
                        sums[g][i] = sum;
                    }
                }
                for (int g = 0; g < width; g++) {
                    float* to = scores + (head + g) * PART + t;
                    store(to, totals(sums[g]));
                    for (int i = rows.count - t; i < LANES; i++) to[i] = LOWEST;
                }
            }
        }
    }
}

// sums[head] = the values of the part, weighted. G query heads share one read of the values.
template <typename T, int D, int G>
void weigh(const T* values, const Rows& rows, const float* weights, float* sums) {
    constexpr int V = D / LANES;
    Floats sum[G][V] = {};
    for (int t = 0; t < rows.count; t++) {
        const T* value = values + rows.offsets[t];
        for (int v = 0; v < V; v++) {
            const Floats x = load(value + v * LANES);
            for (int g = 0; g < G; g++) sum[g][v] += x * weights[g * PART + t];
        }
    }
    for (int g = 0; g < G; g++)
        for (int v = 0; v < V; v++) store(sums + g * D + v * LANES, sum[g][v]);
}

template <typename T, int D>
void weigh_all(const Heads& heads, const T* values, const Rows& rows, const float* weights,
               float* sums) {
    constexpr int MOST = D <= 64 ? 4 : D <= 128 ? 2 : 1;  // what registers hold
    const int64_t group = heads.group();
    for (int64_t kv = 0; kv < heads.num_kv_heads; kv++) {
        for (int64_t g = 0; g < group;) {
            const int64_t head = kv * group + g;
            const T* from = values + kv * D;
            const float* w = weights + head * PART;
            float* to = sums + head * D;
            const int64_t left = group - g;
            const int width = left < MOST ? left : MOST;
            switch (width) {
                case 1: weigh<T, D, 1>(from, rows, w, to); break;
                case 2: weigh<T, D, 2>(from, rows, w, to); break;
                case 3: weigh<T, D, 3>(from, rows, w, to); break;
                default: weigh<T, D, 4>(from, rows, w, to); break;
            }
            g += width;
        }
    }
}

}  // namespace

// What one batch's plan says, the same for every layer.
struct Plan {
    int64_t num_rows, num_parts;
    const int64_t* query_rows;    // [num_rows] tokens of the batch
    const int64_t* context_lens;  // [num_rows]
    const int64_t* block_tables;  // [num_rows, table_width]
    int64_t table_width;
    const int64_t* part_rows;     // [num_parts] which row
    const int64_t* first_parts;   // [num_rows + 1]
    float* partial;               // [num_parts, num_heads, head_dim + 2]
    Heads heads;
};

namespace {

template <typename T, int D>
void attend_part(const Plan& plan, int64_t part, const T* query, int64_t query_stride,
                 const T* keys, const T* values, float* scores) {
    const Heads& heads = plan.heads;
    const int64_t row = plan.part_rows[part];
    const int64_t start = (part - plan.first_parts[row]) * PART;
    const int64_t left = plan.context_lens[row] - start;
    const int64_t* table = plan.block_tables + row * plan.table_width;
    Rows rows;
    rows.count = left < PART ? left : PART;
    for (int i = 0; i < rows.count; i++) {
        const int64_t token = start + i;
        const int64_t slot =
            table[token / heads.block_size] * heads.block_size + token % heads.block_size;
        rows.offsets[i] = slot * heads.num_kv_heads * D;
    }
    score<T, D>(heads, query + plan.query_rows[row] * query_stride, keys, rows, scores);
    float* sums = plan.partial + part * heads.num_heads * (D + 2);
    float* most_and_sum = sums + heads.num_heads * D;
    for (int64_t head = 0; head < heads.num_heads; head++) {
        float* s = scores + head * PART;
        Floats most = load(s);
        for (int t = LANES; t < rows.count; t += LANES) {
            const Floats x = load(s + t);
            most = x > most ? x : most;
        }
        const float m = largest(most);
        Floats sum{};
        for (int t = 0; t < rows.count; t += LANES) {
            const Floats weight = exponential(load(s + t) - m);
            store(s + t, weight);
            sum += weight;
        }
        most_and_sum[2 * head] = m;
        most_and_sum[2 * head + 1] = total(sum);
    }
    weigh_all<T, D>(heads, values, rows, scores, sums);
}

template <typename T, int D>
void merge(const Plan& plan, int64_t row, T* output) {
    const Heads& heads = plan.heads;
    const int64_t stride = heads.num_heads * (D + 2);
    const float* parts = plan.partial + plan.first_parts[row] * stride;
    const int64_t count = plan.first_parts[row + 1] - plan.first_parts[row];
    for (int64_t head = 0; head < heads.num_heads; head++) {
        const float* most_and_sum = parts + heads.num_heads * D + 2 * head;
        float most = most_and_sum[0];
        for (int64_t p = 1; p < count; p++) {
            const float m = most_and_sum[p * stride];
            most = m > most ? m : most;
        }
        Floats merged[D / LANES] = {};
        float sum = 0;
        for (int64_t p = 0; p < count; p++) {
            const float weight = exponential(fill(most_and_sum[p * stride] - most))[0];
            sum += weight * most_and_sum[p * stride + 1];
            for (int v = 0; v < D / LANES; v++)
                merged[v] += weight * load(parts + p * stride + head * D + v * LANES);
        }
        T* to = output + (row * heads.num_heads + head) * D;
        for (int v = 0; v < D / LANES; v++) store(to + v * LANES, merged[v] / sum);
    }
}

template <typename T, int D>
void attend(const Plan& plan, const T* query, int64_t query_stride, const T* keys,
            const T* values, T* output, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> scores(plan.heads.num_heads * PART);
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < plan.num_parts; part++)
            attend_part<T, D>(plan, part, query, query_stride, keys, values, scores.data());
#pragma omp for schedule(static)
        for (int64_t row = 0; row < plan.num_rows; row++) merge<T, D>(plan, row, output);
    }
}

template <typename T>
int attend(const Plan& plan, int64_t head_dim, const T* query, int64_t query_stride,
           const T* keys, const T* values, T* output, int num_threads) {
#define CASE(D) \
    case D: attend<T, D>(plan, query, query_stride, keys, values, output, num_threads); return 0
    switch (head_dim) {
        CASE(16);
        CASE(32);
        CASE(64);
        CASE(80);
        CASE(96);
        CASE(128);
        CASE(256);
    }
#undef CASE
    return 1;
}

}  // namespace

extern "C" {

// query [tokens, num_heads, head_dim] with a stride between tokens; keys, values [slots,
// num_kv_heads, head_dim]; output [num_rows, num_heads, head_dim]. Not 0: no such head_dim.
int paged_decode_float32(const Plan* plan, int64_t head_dim, const float* query,
                         int64_t query_stride, const float* keys, const float* values,
                         float* output, int num_threads) {
    return attend(*plan, head_dim, query, query_stride, keys, values, output, num_threads);
}

int paged_decode_bfloat16(const Plan* plan, int64_t head_dim, const bfloat16* query,
                          int64_t query_stride, const bfloat16* keys, const bfloat16* values,
                          bfloat16* output, int num_threads) {
    return attend(*plan, head_dim, query, query_stride, keys, values, output, num_threads);
}

int paged_decode_part_tokens() { return PART; }
}
