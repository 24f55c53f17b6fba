// Attention straight from the pages, without gathering them: online softmax over blocks of keys.
//
// A row gets the same bits in any batch, because its arithmetic is a function of its own position: keys are
// taken in blocks of kBlock, and blocks in parts of kPart keys, both counted from position 0; a block is one
// step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867), and parts are merged in order. What
// a row does not see in a block has weight exactly 0, and a block it sees nothing of changes nothing.
//
// A tile is a few rows of one chunk and the query heads that share one K/V head, so that each K and V is
// loaded once for all of them.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "tile.h"

namespace {

constexpr int64_t kBlock = 64;     // keys
constexpr int kVectors = kBlock / kWidth;
constexpr int64_t kPart = 512;     // keys
constexpr int64_t kQueries = 48;   // of a tile: rows times heads of a group
constexpr int64_t kMaxDim = 256;   // of a head
constexpr int64_t kLine = 64;      // bytes of a cache line
constexpr float kNever = -std::numeric_limits<float>::infinity();

}  // namespace

// One step's chunks and how they are cut into tiles; the caller's arrays.
struct AttentionPlan {
    const int64_t* first_rows;    // [chunks] in the flat batch
    const int64_t* query_lens;    // [chunks]
    const int64_t* context_lens;  // [chunks]
    const int64_t* hidden_lens;   // [chunks]
    const int64_t* page_tables;   // [chunks, table_len]
    const int64_t* tile_chunks;   // [tiles]
    const int64_t* tile_firsts;   // [tiles] first row within the chunk
    int64_t table_len;
    int64_t num_tiles;
    int64_t tile_len;             // rows of a tile, fewer at a chunk's end
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t page_shift;           // log2 of the page size
    int64_t window;               // 0: none
    bool is_causal;
};

namespace {

template <class Element>  // of the pages: float or Bfloat16
struct Layer {
    const float* q;  // [rows, heads, head_dim], rows q_stride apart
    int64_t q_stride;
    const Element* k_pages;
    const Element* v_pages;
    float* out;  // [rows, heads, head_dim]
};

// Softmax over some keys, unfinished: sum of exp(score - largest) * V, sum of exp(score - largest), largest.
struct Partial {
    float weighted[kQueries * kMaxDim];  // [queries, padded head_dim]
    float total[kQueries];
    float largest[kQueries];

    void clear(int64_t num_queries, int64_t padded_dim) {
        std::fill_n(weighted, num_queries * padded_dim, 0.0f);
        std::fill_n(total, num_queries, 0.0f);
        std::fill_n(largest, num_queries, kNever);
    }
};

float exponential_of(float x) { return exponential(broadcast(x))[0]; }

void scale_row(float* row, int64_t length, float factor) {
    if (factor == 1.0f) return;
    for (int64_t i = 0; i < length; i += kWidth) store(row + i, load(row + i) * broadcast(factor));
}

// Adds what `later` saw to `earlier`.
void merge(Partial& earlier, const Partial& later, int64_t num_queries, int64_t padded_dim) {
    for (int64_t query = 0; query < num_queries; query++) {
        if (later.largest[query] == kNever) continue;
        const float largest = std::max(earlier.largest[query], later.largest[query]);
        const float keep = exponential_of(earlier.largest[query] - largest);
        const float take = exponential_of(later.largest[query] - largest);
        float* row = earlier.weighted + query * padded_dim;
        const float* added = later.weighted + query * padded_dim;
        for (int64_t i = 0; i < padded_dim; i += kWidth)
            store(row + i, multiply_add(load(row + i), broadcast(keep), load(added + i) * broadcast(take)));
        earlier.total[query] = earlier.total[query] * keep + later.total[query] * take;
        earlier.largest[query] = largest;
    }
}

template <int kDistance, int... kLane>
inline void swap_lanes(Vector& a, Vector& b, std::integer_sequence<int, kLane...>) {
    const Vector first = a, second = b;
    a = __builtin_shufflevector(first, second, ((kLane & kDistance) ? kWidth + kLane - kDistance : kLane)...);
    b = __builtin_shufflevector(first, second, ((kLane & kDistance) ? kWidth + kLane : kLane + kDistance)...);
}

template <int kDistance = 1>
inline void transpose(Vector (&v)[kWidth]) {
    if constexpr (kDistance < kWidth) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++)
            if (!(i & kDistance))
                swap_lanes<kDistance>(v[i], v[i + kDistance], std::make_integer_sequence<int, kWidth>());
        transpose<2 * kDistance>(v);
    }
}

// x [rows, num_k] times columns k -> columns(k) of 2 * kWidth floats, added to out [rows, ..].
template <class Columns>
struct Product {
    const float* x;
    int64_t x_stride, num_k;
    Columns columns;
    float* out;
    int64_t out_stride;

    template <int kRows>
    void run(int64_t first) const {
        float* at = out + first * out_stride;
        Tile<kRows> tile;
        for (int row = 0; row < kRows; row++) {
            tile.low[row] = load(at + row * out_stride);
            tile.high[row] = load(at + row * out_stride + kWidth);
        }
        accumulate(tile, x + first * x_stride, x_stride, num_k, [this](int64_t k, Vector& low, Vector& high) {
            const auto* column = columns(k);
            low = load(column);
            high = load(column + kWidth);
        });
        for (int row = 0; row < kRows; row++) {
            store(at + row * out_stride, tile.low[row]);
            store(at + row * out_stride + kWidth, tile.high[row]);
        }
    }
};

template <class Columns>
void add_product(int64_t num_rows, const float* x, int64_t x_stride, int64_t num_k, float* out,
                 int64_t out_stride, Columns columns) {
    for_tiles(num_rows, Product<Columns>{x, x_stride, num_k, columns, out, out_stride});
}

// The rows of one tile with one K/V head, and the memory they are computed in.
template <class Element>
class TileAttention {
public:
    TileAttention(const AttentionPlan& plan, const Layer<Element>& layer, int64_t tile, int64_t kv_head)
        : plan_(plan), layer_(layer), kv_head_(kv_head), chunk_(plan.tile_chunks[tile]) {
        const int64_t first = plan.tile_firsts[tile];
        num_rows_ = std::min(plan.tile_len, plan.query_lens[chunk_] - first);
        first_row_ = plan.first_rows[chunk_] + first;
        first_position_ = plan.context_lens[chunk_] - plan.query_lens[chunk_] + first;
        group_ = plan.num_heads / plan.num_kv_heads;
        num_queries_ = num_rows_ * group_;
        padded_dim_ = (plan.head_dim + kPanel - 1) / kPanel * kPanel;
        begin_ = begin_of(first_position_);
        end_ = end_of(first_position_ + num_rows_ - 1);
        const float scale = 1.0f / std::sqrt(float(plan.head_dim));
        for (int64_t query = 0; query < num_queries_; query++) {
            const float* q = layer.q + (first_row_ + query / group_) * layer.q_stride +
                             (kv_head * group_ + query % group_) * plan.head_dim;
            for (int64_t i = 0; i < plan.head_dim; i++) q_[query * plan.head_dim + i] = q[i] * scale;
        }
    }

    int64_t first_part() const { return begin_ / kPart; }
    int64_t end_part() const { return (end_ + kPart - 1) / kPart; }
    int64_t num_queries() const { return num_queries_; }
    int64_t padded_dim() const { return padded_dim_; }

    void attend_part(int64_t part, Partial& partial) {
        partial.clear(num_queries_, padded_dim_);
        const int64_t end = std::min(end_, (part + 1) * kPart);
        for (int64_t block = std::max(begin_ / kBlock * kBlock, part * kPart); block < end; block += kBlock)
            attend_block(block, std::max(begin_, block), std::min(end_, block + kBlock), partial);
    }

    void write(const Partial& partial) const {
        for (int64_t query = 0; query < num_queries_; query++) {
            float* out = layer_.out + ((first_row_ + query / group_) * plan_.num_heads +
                                       kv_head_ * group_ + query % group_) * plan_.head_dim;
            const float* from = partial.weighted + query * padded_dim_;
            for (int64_t i = 0; i < plan_.head_dim; i++) out[i] = from[i] / partial.total[query];
        }
    }

private:
    // The keys a row at this position sees: [begin_of, end_of).
    int64_t begin_of(int64_t position) const {
        const int64_t hidden = plan_.hidden_lens[chunk_];
        return plan_.window ? std::max(hidden, position - plan_.window + 1) : hidden;
    }

    int64_t end_of(int64_t position) const {
        const int64_t context_len = plan_.context_lens[chunk_];
        if (plan_.is_causal) return position + 1;
        return plan_.window ? std::min(context_len, position + plan_.window) : context_len;
    }

    // Keys [block, block + kBlock), of which only [begin, end) are seen by some row: others are never read.
    void attend_block(int64_t block, int64_t begin, int64_t end, Partial& partial) {
        const Element* k_rows[kBlock];
        const Element* v_rows[kBlock];
        locate(block, begin, end, k_rows, v_rows);
        const int64_t num_panels = (end - block + kPanel - 1) / kPanel, first_panel = (begin - block) / kPanel;
        transpose_keys(k_rows, v_rows, first_panel * kPanel, num_panels * kPanel);
        for (int64_t panel = first_panel; panel < num_panels; panel++) {
            float* scores = scores_ + panel * kPanel;
            for (int64_t query = 0; query < num_queries_; query++)
                for (int64_t i = 0; i < kPanel; i += kWidth) store(scores + query * kBlock + i, Vector{});
            const float* keys = keys_ + panel * kPanel;
            add_product(num_queries_, q_, plan_.head_dim, plan_.head_dim, scores, kBlock,
                        [keys](int64_t k) { return keys + k * kBlock; });
        }
        for (int64_t query = 0; query < num_queries_; query++) weigh(query, block, partial);
        fetch_keys(end, std::min(end_, end + kBlock));
        const Element* const* rows = v_rows + (begin - block);
        for (int64_t column = 0; column < padded_dim_; column += kPanel)
            add_product(num_queries_, scores_ + (begin - block), kBlock, end - begin,
                        partial.weighted + column, padded_dim_,
                        [rows, column](int64_t k) { return rows[k] + column; });
    }

    // Where the block's K and V rows are, each followed by whole vectors; zeros for keys that nobody sees.
    void locate(int64_t block, int64_t begin, int64_t end, const Element** k_rows, const Element** v_rows) {
        static const Element zeros[kMaxDim] = {};
        const bool is_padded = padded_dim_ != plan_.head_dim;
        for (int64_t key = 0; key < kBlock; key++) {
            const int64_t position = block + key;
            if (position < begin || position >= end) {
                k_rows[key] = v_rows[key] = zeros;
                continue;
            }
            const int64_t at = place_of(position);
            k_rows[key] = layer_.k_pages + at;
            v_rows[key] = layer_.v_pages + at;
            if (is_padded) {
                k_rows[key] = pad(k_rows[key], k_padded_ + key * padded_dim_);
                v_rows[key] = pad(v_rows[key], v_padded_ + key * padded_dim_);
            }
        }
    }

    const Element* pad(const Element* row, Element* to) const {
        std::copy_n(row, plan_.head_dim, to);
        std::fill(to + plan_.head_dim, to + padded_dim_, Element{});
        return to;
    }

    // Where the K or V of a position and of this head begins in its pool.
    int64_t place_of(int64_t position) const {
        const int64_t page = plan_.page_tables[chunk_ * plan_.table_len + (position >> plan_.page_shift)];
        const int64_t offset = position & ((int64_t{1} << plan_.page_shift) - 1);
        return (((page << plan_.page_shift) + offset) * plan_.num_kv_heads + kv_head_) * plan_.head_dim;
    }

    // Ask memory for the keys of the next block while this one's values are summed.
    void fetch_keys(int64_t begin, int64_t end) const {
        for (int64_t position = begin; position < end; position++) {
            const Element* row = layer_.k_pages + place_of(position);
            for (int64_t dim = 0; dim < plan_.head_dim; dim += kLine / sizeof(Element))
                __builtin_prefetch(row + dim);
        }
    }

    // keys_ [head_dim, kBlock]; meanwhile memory is asked for the values.
    void transpose_keys(const Element* const* k_rows, const Element* const* v_rows, int64_t first, int64_t end) {
        for (int64_t key = first; key < end; key += kWidth)
            for (int64_t dim = 0; dim < plan_.head_dim; dim += kWidth) {
                Vector square[kWidth];
                for (int i = 0; i < kWidth; i++) __builtin_prefetch(v_rows[key + i] + dim);
#pragma GCC unroll 16
                for (int i = 0; i < kWidth; i++) square[i] = load(k_rows[key + i] + dim);
                transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < kWidth; i++) store(keys_ + (dim + i) * kBlock + key, square[i]);
            }
    }

    // One query's scores become weights, and what it had before is scaled to the new largest score.
    void weigh(int64_t query, int64_t block, Partial& partial) {
        const int64_t position = first_position_ + query / group_;
        const int32_t begin = int32_t(std::clamp<int64_t>(begin_of(position) - block, 0, kBlock));
        const int32_t end = int32_t(std::clamp<int64_t>(end_of(position) - block, 0, kBlock));
        float* scores = scores_ + query * kBlock;
        if (begin >= end) {
            for (int i = 0; i < kVectors; i++) store(scores + i * kWidth, Vector{});
            return;
        }
        Vector rows[kVectors];
        for (int i = 0; i < kVectors; i++) rows[i] = load(scores + i * kWidth);
        if (begin > 0 || end < kBlock) hide(rows, begin, end);
        Vector largest = rows[0];
        for (int i = 1; i < kVectors; i++) largest = larger(rows[i], largest);
        const float before = partial.largest[query];
        const float top = std::max(before, largest_of(largest));
        Vector total = {};
        for (int i = 0; i < kVectors; i++) {
            const Vector weight = exponential(rows[i] - broadcast(top));
            store(scores + i * kWidth, weight);
            total += weight;
        }
        const float keep = before == top ? 1.0f : exponential_of(before - top);
        scale_row(partial.weighted + query * padded_dim_, padded_dim_, keep);
        partial.total[query] = partial.total[query] * keep + sum(total);
        partial.largest[query] = top;
    }

    // Scores of keys outside [begin, end) of the block become those of keys that are never seen.
    static void hide(Vector (&rows)[kVectors], int32_t begin, int32_t end) {
        Integers key;
        for (int lane = 0; lane < kWidth; lane++) key[lane] = lane;
        for (int i = 0; i < kVectors; i++, key += kWidth)
            rows[i] = choose((key >= begin) & (key < end), rows[i], broadcast(kNever));
    }

    const AttentionPlan& plan_;
    const Layer<Element>& layer_;
    int64_t kv_head_, chunk_, num_rows_, first_row_, first_position_, group_, num_queries_, padded_dim_;
    int64_t begin_, end_;  // keys that some row of the tile sees
    alignas(64) float q_[kQueries * kMaxDim];
    alignas(64) float keys_[kMaxDim * kBlock];
    alignas(64) float scores_[kQueries * kBlock];
    alignas(64) Element k_padded_[kBlock * kMaxDim];
    alignas(64) Element v_padded_[kBlock * kMaxDim];
};

template <class Element>
void attend(const AttentionPlan& plan, const Layer<Element>& layer, int64_t item) {
    TileAttention<Element> tile(plan, layer, item / plan.num_kv_heads, item % plan.num_kv_heads);
    Partial whole, part;
    tile.attend_part(tile.first_part(), whole);
    for (int64_t i = tile.first_part() + 1; i < tile.end_part(); i++) {
        tile.attend_part(i, part);
        merge(whole, part, tile.num_queries(), tile.padded_dim());
    }
    tile.write(whole);
}

template <class Element>
void attend_all(const AttentionPlan& plan, const float* q, int64_t q_stride, const void* k_pages,
                const void* v_pages, float* out, int64_t num_threads) {
    const Layer<Element> layer{q, q_stride, static_cast<const Element*>(k_pages),
                               static_cast<const Element*>(v_pages), out};
    const int64_t num_items = plan.num_tiles * plan.num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && num_items > 1)
    for (int64_t item = 0; item < num_items; item++) attend(plan, layer, item);
}

}  // namespace

extern "C" void attention(const AttentionPlan* plan, const float* q, int64_t q_stride, const void* k_pages,
                          const void* v_pages, bool is_bfloat16, float* out, int64_t num_threads) {
    const auto run = is_bfloat16 ? attend_all<Bfloat16> : attend_all<float>;
    run(*plan, q, q_stride, k_pages, v_pages, out, num_threads);
}
