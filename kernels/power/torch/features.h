// Products with φ(x) at degree 2.
//
// φ is made for some features and tokens at a time, which stay in the first-level cache while all rows
// of a product use them. README.md, section 3, defines their layout: in the row of a tile I,
// x[j] x[8 I + a] for j ≥ 8 I and a < 8. Entries beyond the diagonal tile represent two orderings, eq.
// (7): a state is multiplied as it is read. A state is larger than the second-level cache of many CPUs,
// so it is passed over once for all spans of a block of tokens. Tensors are contiguous: x (rows, K, C)
// with K in whole tiles and tokens innermost, a state (rows, V, P) and values (rows, V, C), where V
// counts the norm too.
#pragma once

#include "copies.h"
#include "vectors.h"

namespace {

constexpr int kTile = 8;

using Tile = float __attribute__((vector_size(4 * kTile), aligned(4)));

// Values of j whose features are made at a time: 16 KB of them, half of the smallest first-level cache.
constexpr int kPanel = 512 / kSpan;
// Values of j whose features' gradients are computed at a time.
constexpr int kPairs = 4;

// features (count · kTile, kSpan) = x[j + d] x[tile + a] times its orderings, for d < count and a < 8.
void make_features(const float* x, int tile, int j, int count, float* features) {
  for (int end = j + count; j < end; ++j) {
    const float orderings = j < tile + kTile ? 1.0f : 2.0f;
    const Vector x0 = load(x + j * kSpan) * orderings;
    const Vector x1 = load(x + j * kSpan + kLanes) * orderings;
#pragma GCC unroll 8
    for (int a = 0; a < kTile; ++a, features += kSpan) {
      store(features, x0 * load(x + (tile + a) * kSpan));
      store(features + kLanes, x1 * load(x + (tile + a) * kSpan + kLanes));
    }
  }
}

// sums (V, spans · kSpan), with rows so many numbers apart, = the state times the orderings of each
// feature, times φ of x (spans, K, kSpan). `features` is memory for kPanel · kTile · kSpan numbers.
void read_state(const float* state, int64_t P, int V, const float* x, int K, int spans,
                float* features, float* sums, int64_t row) {
  float keep = 0;
  for (int tile = 0; tile < K; tile += kTile) {
    for (int j = tile, count; j < K; j += count, state += count * kTile) {
      count = std::min(kPanel, K - j);
      for (int span = 0; span < spans; ++span) {
        make_features(x + int64_t(span) * K * kSpan, tile, j, count, features);
        multiply(V, state, P, 1, features, kSpan, count * kTile, sums + span * kSpan, row, keep);
      }
      keep = 1;
    }
  }
}

// Adds to dx (K, kSpan) the gradients through the features x[j + d] x[tile + a], d < kPairs, from theirs.
void contract_features(const float* dfeatures, const float* x, float* dx, int tile, int j) {
  for (int n = 0; n < kSpan; n += kLanes) {
    Vector dtile[kTile] = {};
    for (int d = 0; d < kPairs; ++d) {
      const float orderings = j + d < tile + kTile ? 1.0f : 2.0f;
      const Vector xj = load(x + (j + d) * kSpan + n) * orderings;
      Vector dxj = {};
#pragma GCC unroll 8
      for (int a = 0; a < kTile; ++a) {
        const Vector dfeature = load(dfeatures + (d * kTile + a) * kSpan + n);
        dxj += dfeature * load(x + (tile + a) * kSpan + n);
        dtile[a] += dfeature * xj;
      }
      float* const to = dx + (j + d) * kSpan + n;
      store(to, load(to) + dxj * orderings);
    }
#pragma GCC unroll 8
    for (int a = 0; a < kTile; ++a) {
      float* const to = dx + (tile + a) * kSpan + n;
      store(to, load(to) + dtile[a]);
    }
  }
}

// Adds to dx (spans, K, kSpan) the gradient of Σ values · (state φ(x)), values (spans, V, kSpan).
// `entries` and `dfeatures` are memory for kPairs · kTile times V, and times kSpan, numbers.
void contract_spans(const float* state, int64_t P, int V, const float* values, const float* x,
                    float* dx, int K, int spans, float* entries, float* dfeatures) {
  constexpr int count = kPairs * kTile;
  for (int tile = 0; tile < K; tile += kTile) {
    for (int j = tile; j < K; j += kPairs, state += count) {
      // A copy, because rows of a state begin in few sets of the first-level cache.
      for (int v = 0; v < V; ++v) std::copy_n(state + v * P, count, entries + v * count);
      for (int span = 0; span < spans; ++span) {
        const int64_t at = int64_t(span) * K * kSpan;
        multiply(count, entries, 1, count, values + int64_t(span) * V * kSpan, kSpan, V, dfeatures,
                 kSpan, 0.0f);
        contract_features(dfeatures, x + at, dx + at, tile, j);
      }
    }
  }
}

// state = keep · state + values (V, C) times φ of the C rows of x (C, K). Where keep is 0 the state
// may be uninitialised. `features` is memory for C · kSpan numbers.
void update_state(float* state, int64_t P, int V, const float* values, const float* x, int K, int C,
                  float keep, float* features) {
  for (int tile = 0; tile < K; tile += kTile) {
    for (int j = tile; j < K; j += kSpan / kTile, state += kSpan) {
      for (int c = 0; c < C; ++c) {
        const Tile first = *reinterpret_cast<const Tile*>(x + c * K + tile);
#pragma GCC unroll 4
        for (int d = 0; d < kSpan / kTile; ++d) {
          *reinterpret_cast<Tile*>(features + c * kSpan + d * kTile) = first * x[c * K + j + d];
        }
      }
      multiply(V, values, C, 1, features, kSpan, C, state, P, keep);
    }
  }
}

// In how many parts the V rows of a state are processed, so that threads have equal work.
int count_parts(int rows, int V, int threads) {
  const int most = (V + kRows - 1) / kRows;
  for (int parts = 1; parts < most; ++parts) {
    if (rows * parts % threads == 0) return parts;
  }
  return most;
}

}  // namespace

extern "C" {

// Passes over chunks of `blocks` blocks of tokens: the state before each chunk is read by R queries,
// and the first `updates` chunks update it. Rows of V are independent of each other, so a thread
// takes some through all chunks, and waits for no other; it transposes keys for itself.
//
// R pointers: q (chunks · blocks, rows, K, C) and sums (…, V, C), where the state φ(q) is written.
// norms (chunks, rows, P), or null: the last row of V of the state before each chunk.
// k (chunks · blocks, rows, K, C) and values (…, V, C); keep (chunks, rows), or null: 1.
// is_zero: the state is 0 and may be uninitialised.
void read_and_update(float* state, const float* const* q, float* const* sums, float* norms,
                     const float* k, const float* values, const float* keep, int is_zero, int R,
                     int chunks, int blocks, int updates, int rows, int V, int K, int C, int P,
                     int threads) {
  const int parts = count_parts(rows, V, threads), spans = (C + kSpan - 1) / kSpan;
  const int padded = spans * kSpan;
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(K + V) * padded + size_t(kPanel * kTile + C) * kSpan + size_t(K) * C);
    float* const query = scratch.take(size_t(K) * padded);
    float* const sums_of_spans = scratch.take(size_t(V) * padded);
    float* const panel = scratch.take(size_t(kPanel) * kTile * kSpan);
    float* const features = scratch.take(size_t(C) * kSpan);
    float* const key = scratch.take(size_t(K) * C);
#pragma omp for collapse(2) schedule(dynamic)
    for (int row = 0; row < rows; ++row) {
      for (int part = 0; part < parts; ++part) {
        const int first = V * part / parts, count = V * (part + 1) / parts - first;
        float* const own = state + (int64_t(row) * V + first) * P;
        bool is_empty = is_zero;
        for (int chunk = 0; chunk < chunks; ++chunk) {
          if (norms != nullptr && part == parts - 1) {
            float* const norm = norms + (int64_t(chunk) * rows + row) * P;
            if (is_empty) {
              std::fill_n(norm, P, 0.0f);
            } else {
              std::copy_n(own + int64_t(count - 1) * P, P, norm);
            }
          }
          for (int block = chunk * blocks; block < (chunk + 1) * blocks; ++block) {
            const int64_t at = int64_t(block) * rows + row;
            for (int r = 0; r < R; ++r) {
              float* const out = sums[r] + (at * V + first) * C;
              if (is_empty) {
                std::fill_n(out, int64_t(count) * C, 0.0f);
                continue;
              }
              for (int span = 0; span < spans; ++span) {
                load_tokens(q[r] + at * K * C, K, C, span * kSpan, query + span * K * kSpan);
              }
              float* const into = padded == C ? out : sums_of_spans;
              read_state(own, P, count, query, K, spans, panel, into, padded);
              for (int v = 0; v < count && into != out; ++v) {
                std::copy_n(into + v * padded, C, out + v * C);
              }
            }
          }
          for (int block = chunk * blocks; block < (chunk + 1) * blocks && chunk < updates;
               ++block) {
            const int64_t at = int64_t(block) * rows + row;
            for (int token = 0; token < C; token += kLanes) {
              transpose_rows(k + at * K * C + token, C, key + token * K, K, C - token, K, 1.0f,
                             false);
            }
            const bool is_first = block == chunk * blocks;
            const float kept = is_first && keep != nullptr ? keep[chunk * rows + row] : 1.0f;
            update_state(own, P, count, values + (at * V + first) * C, key, K, C,
                         is_empty ? 0.0f : kept, features);
            is_empty = false;
          }
        }
      }
    }
  }
}

// dx (rows, K, C) += the gradient of Σ values · (state φ(x)), the state as in read_state.
void contract_state(const float* state, const float* values, const float* x, float* dx, int rows,
                    int V, int K, int C, int P, int threads) {
  const int spans = (C + kSpan - 1) / kSpan;
  int parts = 1;  // of the spans, so that threads have equal work
  while (parts < spans && rows * parts % threads != 0) ++parts;
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(2 * K + V) * spans * kSpan + size_t(V + kSpan) * kPairs * kTile);
    float* const dfeatures = scratch.take(size_t(kSpan) * kPairs * kTile);
    float* const own = scratch.take(size_t(K) * spans * kSpan);
    float* const down = scratch.take(size_t(K) * spans * kSpan);
    float* const weights = scratch.take(size_t(V) * spans * kSpan);
    float* const entries = scratch.take(size_t(V) * kPairs * kTile);
#pragma omp for collapse(2)
    for (int row = 0; row < rows; ++row) {
      for (int part = 0; part < parts; ++part) {
        const int first = spans * part / parts, count = spans * (part + 1) / parts - first;
        const float* const x_row = x + int64_t(row) * K * C;
        float* const dx_row = dx + int64_t(row) * K * C;
        for (int span = 0; span < count; ++span) {
          const int token = (first + span) * kSpan;
          load_tokens(x_row, K, C, token, own + span * K * kSpan);
          load_tokens(dx_row, K, C, token, down + span * K * kSpan);
          load_tokens(values + int64_t(row) * V * C, V, C, token, weights + span * V * kSpan);
        }
        contract_spans(state + int64_t(row) * V * P, P, V, weights, own, down, K, count, entries,
                       dfeatures);
        for (int span = 0; span < count; ++span) {
          store_tokens(down + span * K * kSpan, K, C, (first + span) * kSpan, dx_row);
        }
      }
    }
  }
}

}  // extern "C"
