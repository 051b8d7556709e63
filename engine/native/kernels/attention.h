// The KV pool, and attention over it without a copy.
#pragma once

#include <math.h>

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

#include "model.h"
#include "rows.h"

namespace {

inline float finite(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits & 0x7f800000u) == 0x7f800000u ? 0.0f : x;
}

struct Pool {
    int64_t groups, slots, head_bytes_k, head_bytes_v;
    template <class E>
    static Pool of(const PacelineModel& m) {
        Pool pool;
        pool.slots = padded(m.block_size, kGroup);
        pool.groups = pool.slots / kGroup;
        pool.head_bytes_k = pool.slots * m.head_dim * E::kBytes;
        pool.head_bytes_v = pool.slots * padded(m.head_dim, kGroup) * E::kBytes;
        return pool;
    }
};

// Keys and values of one head of one token. Nothing that is not finite enters the pool, so that a
// position with weight zero adds zero.
template <class E>
void keep(const PacelineModel& m, const PacelineLayer& layer, const Pool& pool, int64_t block,
          int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t stretch = kGroup * E::kBytes, dims = padded(m.head_dim, kGroup);
    char* keys = layer.keys + (block * m.num_kv_heads + head) * pool.head_bytes_k +
                 slot / kGroup * m.head_dim * stretch;
    for (int64_t d = 0; d < m.head_dim; d++)
        E::put(E::template place<kAttentionLanes>(keys + d * stretch, slot % kGroup), finite(key[d]));
    char* values = layer.values + (block * m.num_kv_heads + head) * pool.head_bytes_v;
    for (int64_t d = 0; d < dims; d++)
        E::put(E::template place<kAttentionLanes>(
                   values + (d / kGroup * pool.slots + slot) * stretch, d % kGroup),
               d < m.head_dim ? finite(value[d]) : 0.0f);
}

inline void prefetch(const char* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Turns a row of scores into weights e^(score - largest), and returns their sum. Lane i of the sum is
// that of the positions i, i + 8, ... in ascending order, whatever the size of a block.
float weigh(float* row, int64_t num_blocks, int64_t slots, int64_t block_size,
            int64_t first_block) {
    constexpr int L = kAttentionLanes;
    typedef Vec<L>::F F;
    F most = F{} - INFINITY;
    for (int64_t s = 0; s < num_blocks * slots; s += L) {
        F v = load<F>(row + s);
        most = v > most ? v : most;
    }
    const float top = largest<L>(most);
    const bool aligned = block_size % L == 0;
    F sum = {};
    float lanes[L] = {};
    for (int64_t s = 0; s < num_blocks * slots; s += L) {
        F v = load<F>(row + s);
        F weight = v == F{} - INFINITY ? F{} : exponential<L>(v - top);
        store(row + s, weight);
        if (aligned) {
            sum += weight;
            continue;
        }
        const int64_t slot = s % slots, position = (first_block + s / slots) * block_size + slot;
        for (int64_t i = 0; i < L && slot + i < block_size; i++)
            lanes[(position + i) % L] += row[s + i];
    }
    return total<L>(aligned ? sum : load<F>(lanes));
}

constexpr int kAttentionRows = 12;  // Queries (row and head) that share the passes over a context.

struct Query {
    int64_t position;
    float* output;
};

// Attention of some queries of one sequence that share a key head.
// q [count][head_dim], scaled; scores [count][stride]; sums [count][head_dim padded].
template <class E>
void attend(const PacelineModel& m, const PacelineLayer& layer, const Pool& pool,
            const int32_t* table, int64_t kv_head, int64_t count, const Query* queries,
            const float* q, float* scores, int64_t stride, float* sums) {
    const int64_t stretch = kGroup * E::kBytes, dims = padded(m.head_dim, kGroup);
    int64_t last = 0, first = INT64_MAX;
    for (int64_t i = 0; i < count; i++) {
        const int64_t oldest = layer.window ? queries[i].position - layer.window + 1 : 0;
        last = queries[i].position > last ? queries[i].position : last;
        first = oldest < first ? oldest : first;
    }
    const int64_t first_block = (first > 0 ? first : 0) / m.block_size;
    const int64_t num_blocks = last / m.block_size + 1 - first_block;

    for (int64_t b = 0; b < num_blocks; b++) {
        const char* keys =
            layer.keys + (table[first_block + b] * m.num_kv_heads + kv_head) * pool.head_bytes_k;
        if (b + 1 < num_blocks)
            prefetch(layer.keys +
                         (table[first_block + b + 1] * m.num_kv_heads + kv_head) * pool.head_bytes_k,
                     pool.head_bytes_k);
        for (int64_t g = 0; g < pool.groups; g++)
            panel_product<E, kAttentionLanes, false, false>(
                count, q, m.head_dim, keys + g * m.head_dim * stretch, m.head_dim,
                scores + b * pool.slots + g * kGroup, stride);
    }

    float scale[kAttentionRows];
    for (int64_t i = 0; i < count; i++) {
        float* row = scores + i * stride;
        const int64_t newest = queries[i].position;
        const int64_t oldest = layer.window ? newest - layer.window + 1 : 0;
        for (int64_t b = 0; b < num_blocks; b++) {
            const int64_t start = (first_block + b) * m.block_size;
            if (start >= oldest && start + pool.slots - 1 <= newest && pool.slots == m.block_size)
                continue;
            for (int64_t s = 0; s < pool.slots; s++)
                if (s >= m.block_size || start + s > newest || start + s < oldest)
                    row[b * pool.slots + s] = -INFINITY;
        }
        scale[i] = 1.0f / weigh(row, num_blocks, pool.slots, m.block_size, first_block);
    }

    memset(sums, 0, count * dims * sizeof(float));
    for (int64_t b = 0; b < num_blocks; b++) {
        const char* values =
            layer.values + (table[first_block + b] * m.num_kv_heads + kv_head) * pool.head_bytes_v;
        if (b + 1 < num_blocks)
            prefetch(layer.values +
                         (table[first_block + b + 1] * m.num_kv_heads + kv_head) * pool.head_bytes_v,
                     pool.head_bytes_v);
        for (int64_t d = 0; d < dims; d += kGroup)
            panel_product<E, kAttentionLanes, true, false>(
                count, scores + b * pool.slots, stride, values + d / kGroup * pool.slots * stretch,
                pool.slots, sums + d, dims);
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < m.head_dim; d++) queries[i].output[d] = sums[i * dims + d] * scale[i];
}

int64_t score_stride(const PacelineModel& m, int64_t num_positions) {
    return (num_positions / m.block_size + 2) * padded(m.block_size, kGroup);
}

int64_t attention_floats(const PacelineModel& m, const Strides& s, int64_t num_positions) {
    return kAttentionRows * (score_stride(m, num_positions) + m.head_dim + s.head_dim) + 64;
}

// Attention of all rows of a step: queries are taken together by sequence and key head.
template <class E>
void attention(const PacelineModel& m, const PacelineLayer& layer, const PacelineStep& step,
               const Strides& strides, const float* qkv, float* output, float* workspace,
               int64_t num_positions) {
    const Pool pool = Pool::of<E>(m);
    const int64_t shared = m.num_heads / m.num_kv_heads;
    const int64_t rows_at_once = shared < kAttentionRows ? kAttentionRows / shared : 1;
    const int64_t stride = score_stride(m, num_positions);
    const int64_t floats = attention_floats(m, strides, num_positions);
    for (int64_t i = 0; i < step.num_spans; i++) {
        const PacelineSpan& span = step.spans[i];
        const int64_t num_tiles = (span.num_rows + rows_at_once - 1) / rows_at_once;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(m.num_threads) if (m.num_threads > 1)
        for (int64_t head = 0; head < m.num_kv_heads; head++)
            for (int64_t t = 0; t < num_tiles; t++) {
                float* q = workspace + omp_get_thread_num() * floats;
                float* sums = q + kAttentionRows * m.head_dim;
                float* scores = sums + kAttentionRows * strides.head_dim;
                Query queries[kAttentionRows];
                const int64_t first = t * rows_at_once;
                const int64_t end =
                    first + rows_at_once < span.num_rows ? first + rows_at_once : span.num_rows;
                // Heads that share more queries than fit are taken in turns.
                for (int64_t h = 0; h < shared; h += kAttentionRows) {
                    int64_t count = 0;
                    for (int64_t r = first; r < end; r++)
                        for (int64_t j = h; j < shared && j < h + kAttentionRows; j++) {
                            const int64_t row = span.first_row + r;
                            const int64_t offset = (head * shared + j) * m.head_dim;
                            for (int64_t d = 0; d < m.head_dim; d++)
                                q[count * m.head_dim + d] =
                                    qkv[row * strides.qkv + offset + d] * m.attention_scaling;
                            queries[count++] = {span.start + r,
                                                output + row * strides.attention + offset};
                        }
                    attend<E>(m, layer, pool, span.block_table, head, count, queries, q, scores,
                              stride, sums);
                }
            }
    }
}

}  // namespace
