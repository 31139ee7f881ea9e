// Products with φ(x) at degree 2.
//
// Features are made in registers and used there, so no φ is ever written to memory. README.md,
// section 3, defines their layout: in the row of a tile I, x[j] x[8 I + a] for j ≥ 8 I and a < 8.
// Entries beyond the diagonal tile represent two orderings, eq. (7): a state is multiplied as it is
// read. Tensors are contiguous: x (rows, K, C) with K in whole tiles and tokens innermost, a state
// (rows, V, P) and values (rows, V, C), where V counts the norm too.
#pragma once

#include "copies.h"
#include "vectors.h"

namespace {

constexpr int kTile = 8;

using Tile = float __attribute__((vector_size(4 * kTile), aligned(4)));

// Adds to `sums` (Rows, kSpan) what the features of the tile row that starts at `tile` contribute.
template <int Rows>
void read_tile_row(const float* state, int64_t P, const float* x, int K, int tile, float* sums) {
  // Starting from 0 here, rather than from `sums`, rounds sums of fewer terms.
  Vector sum[Rows][2] = {};
  for (int j = tile; j < K; ++j) {
    const float orderings = j < tile + kTile ? 1.0f : 2.0f;
    const Vector x0 = load(x + j * kSpan) * orderings;
    const Vector x1 = load(x + j * kSpan + kLanes) * orderings;
    for (int a = 0; a < kTile; ++a, ++state) {
      const Vector feature0 = x0 * load(x + (tile + a) * kSpan);
      const Vector feature1 = x1 * load(x + (tile + a) * kSpan + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const float entry = state[r * P];
        sum[r][0] += feature0 * entry;
        sum[r][1] += feature1 * entry;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    float* const to = sums + r * kSpan;
    store(to, load(to) + sum[r][0]);
    store(to + kLanes, load(to + kLanes) + sum[r][1]);
  }
}

// Adds to dx the gradients through the eight features x[j] x[tile + a], of N vectors of tokens.
template <int N>
void contract_features(
    const float* state, int64_t P, int V, const float* values, const float* x, float* dx, int j,
    int tile) {
  Vector dfeature[kTile][N] = {};
  for (int v = 0; v < V; ++v) {
    Vector value[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) value[n] = load(values + v * kSpan + n * kLanes);
#pragma GCC unroll 8
    for (int a = 0; a < kTile; ++a) {
      const float entry = state[v * P + a];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) dfeature[a][n] += value[n] * entry;
    }
  }
  const float orderings = j < tile + kTile ? 1.0f : 2.0f;
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    const Vector xj = load(x + j * kSpan + n * kLanes) * orderings;
    Vector dxj = {};
#pragma GCC unroll 8
    for (int a = 0; a < kTile; ++a) {
      const int at = (tile + a) * kSpan + n * kLanes;
      dxj += dfeature[a][n] * load(x + at);
      store(dx + at, load(dx + at) + dfeature[a][n] * xj);
    }
    const int at = j * kSpan + n * kLanes;
    store(dx + at, load(dx + at) + dxj * orderings);
  }
}

// sums (V, kSpan) = the state times the orderings of each feature, times φ of x (K, kSpan).
void read_state(const float* state, int64_t P, int V, const float* x, int K, float* sums) {
  std::fill_n(sums, size_t(V) * kSpan, 0.0f);
  for (int tile = 0; tile < K; tile += kTile) {
    for_rows(V, [&](auto count, int v) {
      read_tile_row<count>(state + v * P, P, x, K, tile, sums + v * kSpan);
    });
    state += (K - tile) * kTile;
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
  const int parts = count_parts(rows, V, threads);
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(K + V + C) * kSpan + size_t(K) * C);
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const sum = scratch.take(size_t(V) * kSpan);
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
              for (int token = 0; token < C; token += kSpan) {
                load_tokens(q[r] + at * K * C, K, C, token, query);
                read_state(own, P, count, query, K, sum);
                store_tokens(sum, count, C, token, out);
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
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(2 * K + V) * kSpan);
    float* const own = scratch.take(size_t(K) * kSpan);
    float* const down = scratch.take(size_t(K) * kSpan);
    float* const weights = scratch.take(size_t(V) * kSpan);
#pragma omp for collapse(2)
    for (int row = 0; row < rows; ++row) {
      for (int first = 0; first < C; first += kSpan) {
        load_tokens(x + int64_t(row) * K * C, K, C, first, own);
        load_tokens(dx + int64_t(row) * K * C, K, C, first, down);
        load_tokens(values + int64_t(row) * V * C, V, C, first, weights);
        const float* features = state + int64_t(row) * V * P;
        for (int tile = 0; tile < K; tile += kTile) {
          for (int j = tile; j < K; ++j, features += kTile) {
            if constexpr (kRegisters == 32) {
              contract_features<2>(features, P, V, weights, own, down, j, tile);
            } else {
              contract_features<1>(features, P, V, weights, own, down, j, tile);
              contract_features<1>(features, P, V, weights + kLanes, own + kLanes, down + kLanes,
                                   j, tile);
            }
          }
        }
        store_tokens(down, K, C, first, dx + int64_t(row) * K * C);
      }
    }
  }
}

}  // extern "C"
