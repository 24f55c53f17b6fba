// The one product all others are made of: a few rows of x times 2 * kWidth columns, held in registers.
#pragma once

#include "vector.h"

constexpr int64_t kPanel = 2 * kWidth;

template <int kRows>
struct Tile {
    Vector low[kRows];
    Vector high[kRows];
};

// tile += x [kRows, num_k] times columns(k) -> (low, high), k ascending: each element is summed in that order
// in one lane, whatever the number of rows.
template <int kRows, class Columns>
inline void accumulate(Tile<kRows>& tile, const float* x, int64_t x_stride, int64_t num_k, Columns columns) {
    for (int64_t k = 0; k < num_k; k++) {
        Vector low, high;
        columns(k, low, high);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; row++) {
            const Vector value = broadcast(x[row * x_stride + k]);
            tile.low[row] = multiply_add(value, low, tile.low[row]);
            tile.high[row] = multiply_add(value, high, tile.high[row]);
        }
    }
}

// Calls body.template run<rows>(first) for tiles of nearly equal height that cover num_rows rows.
template <int kRows = kMaxTileRows, class Body>
inline void run_tile(int64_t num_rows, int64_t first, const Body& body) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows)
            body.template run<kRows>(first);
        else
            run_tile<kRows - 1>(num_rows, first, body);
    }
}

template <class Body>
inline void for_tiles(int64_t num_rows, const Body& body) {
    const int64_t num_tiles = (num_rows + kMaxTileRows - 1) / kMaxTileRows;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const int64_t first = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
        run_tile(end - first, first, body);
    }
}
