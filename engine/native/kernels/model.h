// The structures that Python fills (engine/native/structures.py), and sizes that follow from them.
#pragma once

#include "product.h"

extern "C" {

struct PacelineLayer {
    Matrix qkv, o, gate_up, down;
    const float *attention_norm, *q_norm, *k_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;
    const float *cosine, *sine;  // [max_position][head_dim / 2]; null is no rotary embedding
    int64_t window;              // positions that a row sees; 0 is all
    char* keys;    // [block][kv head][group of 16 slots][head_dim][16 elements]
    char* values;  // [block][kv head][head_dim / 16][slot][16 elements]
};

// How elements are stored.
enum ElementType : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

struct PacelineModel {
    int64_t weight_type;  // of the matrices
    int64_t type;         // of embeddings, keys and values; no kInt8
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, is_gelu;
    int64_t block_size, num_threads;
    float eps, attention_scaling, embedding_scale;
    const PacelineLayer* layers;
    const float* final_norm;
    const char* embedding;  // [vocab][hidden] elements; null where the head's panels hold them
    Matrix head;
};

struct PacelineSpan {
    int64_t first_row, start, num_rows;
    const int32_t* block_table;
};

struct PacelineStep {
    int64_t num_rows, num_spans, num_logits;
    const int64_t* token_ids;  // [num_rows]
    const PacelineSpan* spans;
    const int64_t* logit_rows;  // [num_logits]
    float* logits;              // [num_logits][vocab padded]
    float* workspace;
};
}

namespace {

// Row strides of the buffers of a step, in floats.
struct Strides {
    int64_t hidden, qkv, attention, gate_up, intermediate, head_dim;
    explicit Strides(const PacelineModel& m)
        : hidden(padded(m.hidden, 2 * kLanes)),
          qkv(padded((m.num_heads + 2 * m.num_kv_heads) * m.head_dim, 2 * kLanes)),
          attention(padded(m.num_heads * m.head_dim, 2 * kLanes)),
          gate_up(padded(2 * m.intermediate, 2 * kLanes)),
          intermediate(padded(m.intermediate, 2 * kLanes)),
          head_dim(padded(m.head_dim, kGroup)) {}
    int64_t wide() const {
        const int64_t a = qkv + attention, b = gate_up + intermediate;
        return a > b ? a : b;
    }
};

}  // namespace
