// What happens to each row between the products: norms, rotation, the activation, K/V written to their pages.
//
// A row is computed by one thread in one order, so its bits do not depend on the other rows.

#include <cmath>

#include "vector.h"

namespace {

constexpr int64_t kMinThreadWork = 1 << 15;  // numbers: below it another thread costs more than it brings

// x / sqrt(mean(x^2) + eps) * weight; `addend`, if there is one, is added to x first and the sum kept in it.
void norm_row(const float* x, float* addend, const float* weight, int64_t width, float eps, float* out) {
    Vector squares = {};
    for_vectors(width, [&](int64_t i, auto count) {
        Vector v = load(x + i, count);
        if (addend) {
            v += load(addend + i, count);
            store(addend + i, v, count);
        }
        squares = multiply_add(v, v, squares);
    });
    const float* from = addend ? addend : x;
    const Vector scale = broadcast(1.0f / std::sqrt(sum(squares) / width + eps));
    for_vectors(width, [&](int64_t i, auto count) {
        store(out + i, load(from + i, count) * scale * load(weight + i, count), count);
    });
}

// Pair (i, i + half) turned by angle i: cos_sin holds `half` cosines, then as many sines. In place is allowed.
void rotate_head(const float* x, const float* cos_sin, int64_t half, float* out) {
    for_vectors(half, [&](int64_t i, auto count) {
        const Vector cos = load(cos_sin + i, count), sin = load(cos_sin + half + i, count);
        const Vector first = load(x + i, count), second = load(x + half + i, count);
        store(out + i, multiply_add(first, cos, -(second * sin)), count);
        store(out + half + i, multiply_add(second, cos, first * sin), count);
    });
}

}  // namespace

extern "C" {

// x [num_rows, width] with rows x_stride apart; residual [num_rows, width] or null, weight [width].
void rms_norm(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, float* residual,
              const float* weight, float eps, float* out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * width > kMinThreadWork)
    for (int64_t row = 0; row < num_rows; row++)
        norm_row(x + row * x_stride, residual ? residual + row * width : nullptr, weight, width, eps,
                 out + row * width);
}

// heads [num_rows, num_heads, head_dim], rows x_stride apart, into out of the same shape, packed.
void rope(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_heads, int64_t head_dim,
          const int64_t* positions, const float* cos_sin, float* out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * num_heads * head_dim > kMinThreadWork)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t head = 0; head < num_heads; head++)
            rotate_head(x + row * x_stride + head * head_dim, cos_sin + positions[row] * head_dim,
                        head_dim / 2, out + (row * num_heads + head) * head_dim);
}

// k and v [num_rows, width], rows so far apart, to slots of the pages [slots, width], float or bfloat16.
void write_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, int64_t num_rows,
              int64_t width, const int64_t* slots, void* k_pages, void* v_pages, bool is_bfloat16) {
    const auto write = [=](auto* k_out, auto* v_out) {
        for (int64_t row = 0; row < num_rows; row++) {
            narrow(k + row * k_stride, width, k_out + slots[row] * width);
            narrow(v + row * v_stride, width, v_out + slots[row] * width);
        }
    };
    if (is_bfloat16)
        write(static_cast<Bfloat16*>(k_pages), static_cast<Bfloat16*>(v_pages));
    else
        write(static_cast<float*>(k_pages), static_cast<float*>(v_pages));
}

// qkv [num_rows, (num_heads + 2 num_kv_heads) * head_dim]: q and k are normed per head where q_norm is not
// null, and rotated, in place; k and v go to their slots of the pages.
void place_qkv(float* qkv, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
               const int64_t* positions, const float* cos_sin, const float* q_norm, const float* k_norm,
               float eps, const int64_t* slots, void* k_pages, void* v_pages, bool is_bfloat16,
               int64_t num_threads) {
    const int64_t width = (num_heads + 2 * num_kv_heads) * head_dim, kv_width = num_kv_heads * head_dim;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * width > kMinThreadWork)
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
            float* const x = qkv + row * width + head * head_dim;
            if (q_norm) norm_row(x, nullptr, head < num_heads ? q_norm : k_norm, head_dim, eps, x);
            rotate_head(x, cos_sin + positions[row] * head_dim, head_dim / 2, x);
        }
        const float* const k = qkv + row * width + num_heads * head_dim;
        write_kv(k, 0, k + kv_width, 0, 1, kv_width, slots + row, k_pages, v_pages, is_bfloat16);
    }
}

// silu(gate) * up for gate_up [num_rows, 2 * width] = gate | up.
void silu_and_mul(const float* gate_up, int64_t num_rows, int64_t width, float* out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * width > kMinThreadWork)
    for (int64_t row = 0; row < num_rows; row++)
        for_vectors(width, [&](int64_t i, auto count) {
            const Vector gate = load(gate_up + row * 2 * width + i, count);
            const Vector up = load(gate_up + (row * 2 + 1) * width + i, count);
            // exp(-gate) overflows below -88: there silu is 0 within float32's smallest normal number
            const Vector e = exponential(-larger(gate, broadcast(-87.0f)));
            store(out + row * width + i, gate / (broadcast(1.0f) + e) * up, count);
        });
}

}
