// A step of a Llama-like decoder on a CPU: weights and KV in bfloat16 or float32, weights in int8 too,
// sums in float32. Rows stay in float32 too, except that products with bfloat16 weights round them to
// bfloat16 where the CPU multiplies pairs of it.
//
// The law of these kernels: the bits of a row depend on its own sequence up to itself and on nothing
// else. Every output of a product is one sum over k in ascending order (pair by pair, on such a CPU),
// whatever the number of rows; attention adds over positions in ascending order, and a position that
// a row may not see adds an exact zero. So it does not matter what else is in the step, nor how it is
// cut into threads.
//
// Compiled by engine/native/build.py, called through ctypes by engine/native/native_decoder.py.

#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "model.h"
#include "product.h"
#include "rows.h"

namespace {

// Norms of heads, rotary embedding, and the step's keys and values into the pool.
template <class E>
void rotate_and_keep(const PacelineModel& m, const PacelineLayer& layer, const PacelineStep& step,
                     const Strides& strides, float* qkv) {
    const Pool pool = Pool::of<E>(m);
    const int64_t half = m.head_dim / 2, num_rotated = m.num_heads + m.num_kv_heads;
    for (int64_t i = 0; i < step.num_spans; i++) {
        const PacelineSpan& span = step.spans[i];
        for (int64_t r = 0; r < span.num_rows; r++) {
            float* row = qkv + (span.first_row + r) * strides.qkv;
            const int64_t position = span.start + r;
            for (int64_t h = 0; h < num_rotated; h++) {
                float* x = row + h * m.head_dim;
                const float* norm = h < m.num_heads ? layer.q_norm : layer.k_norm;
                if (norm) rms_norm_head(x, norm, m.head_dim, m.eps);
                if (layer.cosine)
                    rotate_head(x, layer.cosine + position * half, layer.sine + position * half, half);
            }
            for (int64_t h = 0; h < m.num_kv_heads; h++)
                keep<E>(m, layer, pool, span.block_table[position / m.block_size],
                        position % m.block_size, h, row + (m.num_heads + h) * m.head_dim,
                        row + (num_rotated + h) * m.head_dim);
        }
    }
}

template <class E>
void embed(const PacelineModel& m, int64_t token_id, float* x) {
    if (m.embedding) {
        const char* row = m.embedding + token_id * m.hidden * E::kBytes;
        for (int64_t i = 0; i < m.hidden; i++) x[i] = E::get(row + i * E::kBytes) * m.embedding_scale;
        return;
    }
    const int64_t width = 2 * kLanes;
    char* panel = const_cast<char*>(m.head.panels) + token_id / width * panel_bytes_of<E>(m.hidden);
    for (int64_t i = 0; i < m.hidden; i++)
        x[i] = E::get(place_in_panel<E>(panel, i, token_id % width)) * m.embedding_scale;
}

int64_t last_position(const PacelineStep& step) {
    int64_t last = 0;
    for (int64_t i = 0; i < step.num_spans; i++) {
        const int64_t end = step.spans[i].start + step.spans[i].num_rows;
        last = end > last ? end : last;
    }
    return last;
}

// With matrices of W.
template <class E, class W>
void forward(const PacelineModel& m, const PacelineStep& step) {
    const Strides s(m);
    const int64_t n = step.num_rows, num_positions = last_position(step);
    const int threads = m.num_threads;
    float* x = step.workspace;            // the residual stream
    float* h = x + n * s.hidden;          // a norm's output, or a sublayer's
    float* wide = h + n * s.hidden;       // qkv and attention, then gate and up
    float* attended = wide + n * s.qkv;
    float* gated = wide + n * s.gate_up;
    float* scratch = wide + n * s.wide();

    memset(x, 0, n * s.hidden * sizeof(float));
    for (int64_t r = 0; r < n; r++) embed<E>(m, step.token_ids[r], x + r * s.hidden);
    for (int64_t l = 0; l < m.num_layers; l++) {
        const PacelineLayer& layer = m.layers[l];
        for (int64_t r = 0; r < n; r++)
            rms_norm(x + r * s.hidden, layer.attention_norm, m.hidden, m.eps, h + r * s.hidden);
        product<W>(layer.qkv, n, h, s.hidden, wide, s.qkv, threads);
        rotate_and_keep<E>(m, layer, step, s, wide);
        attention<E>(m, layer, step, s, wide, attended, scratch, num_positions);
        product<W>(layer.o, n, attended, s.attention, h, s.hidden, threads);
        for (int64_t r = 0; r < n; r++) {
            float* row = h + r * s.hidden;
            if (layer.post_attention_norm)
                rms_norm(row, layer.post_attention_norm, m.hidden, m.eps, row);
            add(x + r * s.hidden, row, s.hidden);
            rms_norm(x + r * s.hidden, layer.mlp_norm, m.hidden, m.eps, row);
        }
        product<W>(layer.gate_up, n, h, s.hidden, wide, s.gate_up, threads);
        for (int64_t r = 0; r < n; r++) {
            const float* gate = wide + r * s.gate_up;
            gated_activation(gate, gate + m.intermediate, m.intermediate, m.is_gelu,
                             gated + r * s.intermediate);
        }
        product<W>(layer.down, n, gated, s.intermediate, h, s.hidden, threads);
        for (int64_t r = 0; r < n; r++) {
            float* row = h + r * s.hidden;
            if (layer.post_mlp_norm) rms_norm(row, layer.post_mlp_norm, m.hidden, m.eps, row);
            add(x + r * s.hidden, row, s.hidden);
        }
    }
    for (int64_t i = 0; i < step.num_logits; i++)
        rms_norm(x + step.logit_rows[i] * s.hidden, m.final_norm, m.hidden, m.eps, h + i * s.hidden);
    product<W>(m.head, step.num_logits, h, s.hidden, step.logits, padded_out(m.head), threads);
}

template <class E>
void pack(const char* weight, int64_t out, int64_t in, char* panels) {
    const int64_t width = 2 * kLanes, panel_bytes = panel_bytes_of<E>(in);
    memset(panels, 0, padded(out, width) / width * panel_bytes);
    for (int64_t o = 0; o < out; o++) {
        char* panel = panels + o / width * panel_bytes;
        for (int64_t k = 0; k < in; k++)
            memcpy(place_in_panel<E>(panel, k, o % width), weight + (o * in + k) * E::kBytes,
                   E::kBytes);
    }
}

// f of an element type.
template <class F>
auto of_type(int64_t type, F f) {
#if defined(PACELINE_INT8)
    if (type == kInt8) return f(Int8{});
#endif
    return type == kBfloat16 ? f(Bf16{}) : f(F32{});
}

}  // namespace

extern "C" {

// Outputs in one panel of a packed matrix.
int64_t paceline_panel_width() { return 2 * kLanes; }

// Slots in one group of the pool.
int64_t paceline_slot_group() { return kGroup; }

int64_t paceline_workspace_floats(const PacelineModel* m, int64_t num_rows, int64_t num_positions) {
    const Strides s(*m);
    return num_rows * (2 * s.hidden + s.wide()) +
           m->num_threads * attention_floats(*m, s, num_positions);
}

// Whether there are products with int8 for this CPU.
int64_t paceline_has_int8() {
#if defined(PACELINE_INT8)
    return 1;
#else
    return 0;
#endif
}

// Bytes of a packed matrix.
int64_t paceline_packed_bytes(int64_t weight_type, int64_t out, int64_t in) {
    const int64_t num_panels = padded(out, 2 * kLanes) / (2 * kLanes);
    return num_panels * of_type(weight_type, [&](auto e) { return panel_bytes_of<decltype(e)>(in); });
}

// weight [out][in] elements.
void paceline_pack(int64_t weight_type, const char* weight, int64_t out, int64_t in, char* panels) {
    of_type(weight_type, [&](auto e) { pack<decltype(e)>(weight, out, in, panels); });
}

// y = x W^T * scale + bias alone; x [rows][in], y [rows][out padded]. What was in x is lost.
void paceline_product(int64_t weight_type, const Matrix* m, int64_t rows, float* x, float* y,
                      int64_t num_threads) {
    of_type(weight_type, [&](auto e) {
        product<decltype(e)>(*m, rows, x, m->in, y, padded_out(*m), num_threads);
    });
}

void paceline_forward(const PacelineModel* m, const PacelineStep* step) {
    of_type(m->weight_type, [&](auto w) {
        typedef decltype(w) W;
        m->type == kBfloat16 ? forward<Bf16, W>(*m, *step) : forward<F32, W>(*m, *step);
    });
}
}
