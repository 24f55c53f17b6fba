// y = x W^T + b over a packed W: panels of 2 * kWidth outputs, each [in][2 * kWidth], so that a panel is read
// from front to back once, whatever the number of rows.
//
// A bfloat16 panel keeps outputs j and kWidth + j in one 32-bit word: half a register's work to expand both.
// Output (row, j) is a sum over `in` in ascending order, kSumLen products at a time, in one lane of a register. It
// does not depend on how many rows are computed with it, where the row stands among them, or on the threads.

#include <algorithm>

#include "tile.h"

namespace {

constexpr int64_t kGroupRows = 96;          // rows whose x stays in the second-level cache over all panels
constexpr int64_t kPrefetchBytes = 1536;    // ahead of the weights being used
constexpr int64_t kSumLen = 192;             // products summed one after another; a longer sum rounds more
constexpr int64_t kMinThreadWork = 1 << 15; // products: below it another thread costs more than it brings

struct Float32 {
    static constexpr int64_t kRowBytes = 4 * kPanel;
    static void expand(const char* at, Vector& low, Vector& high) {
        low = load(reinterpret_cast<const float*>(at));
        high = load(reinterpret_cast<const float*>(at) + kWidth);
    }
};

struct Bfloat16Pairs {
    static constexpr int64_t kRowBytes = 2 * kPanel;
    static void expand(const char* at, Vector& low, Vector& high) {
        Bits pairs;
        std::memcpy(&pairs, at, sizeof pairs);
        low = (Vector)(pairs << 16);
        high = (Vector)(pairs & 0xffff0000u);
    }
};

struct Product {
    const float* x;
    int64_t x_stride;
    int64_t num_in;
    int64_t num_out;
    const float* bias;  // or null
    float* y;           // [rows, num_out]
};

// One panel's outputs for a tile of rows.
template <class Weight>
struct PanelTile {
    const Product& product;
    int64_t first_row;
    int64_t first_out;
    const char* weights;

    template <int kRows>
    void run(int64_t row_in_group) const {
        const int64_t first = first_row + row_in_group;
        Tile<kRows> total = {};
        for (int64_t start = 0; start < product.num_in; start += kSumLen) {
            Tile<kRows> part = {};
            accumulate(part, product.x + first * product.x_stride + start, product.x_stride,
                       std::min(kSumLen, product.num_in - start),
                       [at = weights + start * Weight::kRowBytes](int64_t k, Vector& low, Vector& high) {
                           const char* row = at + k * Weight::kRowBytes;
                           Weight::expand(row, low, high);
                           for (int64_t line = 0; line < Weight::kRowBytes; line += 64)
                               __builtin_prefetch(row + kPrefetchBytes + line);
                       });
            for (int row = 0; row < kRows; row++) {
                total.low[row] += part.low[row];
                total.high[row] += part.high[row];
            }
        }
        const int64_t width = std::min(kPanel, product.num_out - first_out);
        for (int row = 0; row < kRows; row++) {
            float out[kPanel];
            store(out, total.low[row]);
            store(out + kWidth, total.high[row]);
            if (product.bias)
                for (int64_t j = 0; j < width; j++) out[j] += product.bias[first_out + j];
            std::memcpy(product.y + (first + row) * product.num_out + first_out, out, width * sizeof(float));
        }
    }
};

template <class Weight>
void multiply(const Product& product, int64_t num_rows, const char* packed, int64_t num_threads) {
    const int64_t num_panels = (product.num_out + kPanel - 1) / kPanel;
    const int64_t num_groups = (num_rows + kGroupRows - 1) / kGroupRows;
    const int64_t panel_bytes = product.num_in * Weight::kRowBytes;
    const bool is_small = num_rows * product.num_in * product.num_out < kMinThreadWork;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && !is_small)
    for (int64_t item = 0; item < num_groups * num_panels; item++) {
        const int64_t panel = item % num_panels;
        const int64_t first = item / num_panels * kGroupRows;
        const PanelTile<Weight> tiles{product, first, panel * kPanel, packed + panel * panel_bytes};
        for_tiles(std::min(kGroupRows, num_rows - first), tiles);
    }
}

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

}  // namespace

extern "C" {

int64_t packed_bytes(int64_t num_out, int64_t num_in, bool is_bfloat16) {
    return (num_out + kPanel - 1) / kPanel * kPanel * num_in * (is_bfloat16 ? 2 : 4);
}

bool is_bfloat16_exact(const float* values, int64_t count) {
    uint32_t lost = 0;
    for (int64_t i = 0; i < count; i++) lost |= bits_of(values[i]);
    return (lost & 0xffff) == 0;
}

// weight [num_out, num_in] into `packed`; outputs past num_out are zeros.
void pack(const float* weight, int64_t num_out, int64_t num_in, bool is_bfloat16, char* packed) {
    auto at = [&](int64_t out, int64_t k) { return out < num_out ? weight[out * num_in + k] : 0.0f; };
    for (int64_t first = 0; first < num_out; first += kPanel)
        for (int64_t k = 0; k < num_in; k++)
            for (int64_t j = 0; j < kWidth; j++) {
                const float low = at(first + j, k), high = at(first + kWidth + j, k);
                if (is_bfloat16) {
                    const uint32_t pair = bits_of(low) >> 16 | (bits_of(high) & 0xffff0000u);
                    std::memcpy(packed + 2 * (first * num_in + k * kPanel + 2 * j), &pair, sizeof pair);
                } else {
                    float* row = reinterpret_cast<float*>(packed) + first * num_in + k * kPanel;
                    row[j] = low;
                    row[kWidth + j] = high;
                }
            }
}

void linear(const float* x, int64_t x_stride, int64_t num_rows, const char* packed, bool is_bfloat16,
            int64_t num_in, int64_t num_out, const float* bias, float* y, int64_t num_threads) {
    const Product product{x, x_stride, num_in, num_out, bias, y};
    if (is_bfloat16)
        multiply<Bfloat16Pairs>(product, num_rows, packed, num_threads);
    else
        multiply<Float32>(product, num_rows, packed, num_threads);
}

}
