// Products with φ(x) at degree 2.
//
// Features are made in registers and used there, so no φ is ever written to memory. README.md,
// section 3, defines their layout: in the row of a tile I, x[j] x[8 I + a] for j ≥ 8 I and a < 8.
// Entries beyond the diagonal tile represent two orderings, eq. (7): a state is multiplied as it is
// read. Tensors are contiguous: x (rows, K, C) with K in whole tiles and tokens innermost, a state
// (rows, V, P) and values (rows, V, C), where V counts the norm too.
#pragma once

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

}  // namespace

extern "C" {

// out (rows, V, C) = state φ(x), the state times the orderings of each feature.
void read_state(const float* state, const float* x, float* out, int rows, int V, int K, int C,
                int P, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(K + V) * kSpan);
    float* const own = scratch.take(size_t(K) * kSpan);
    float* const sums = scratch.take(size_t(V) * kSpan);
#pragma omp for collapse(2)
    for (int row = 0; row < rows; ++row) {
      for (int first = 0; first < C; first += kSpan) {
        load_tokens(x + int64_t(row) * K * C, K, C, first, own);
        std::fill_n(sums, size_t(V) * kSpan, 0.0f);
        const float* tile_row = state + int64_t(row) * V * P;
        for (int tile = 0; tile < K; tile += kTile) {
          for_rows(V, [&](auto count, int v) {
            read_tile_row<count>(tile_row + int64_t(v) * P, P, own, K, tile, sums + v * kSpan);
          });
          tile_row += (K - tile) * kTile;
        }
        store_tokens(sums, V, C, first, out + int64_t(row) * V * C);
      }
    }
  }
}

// state = keep[row] · state + values φ(x)ᵀ. Where keep is 0 the state may be uninitialised.
void update_state(float* state, const float* x, const float* values, const float* keep, int rows,
                  int V, int K, int C, int P, int threads) {
  // Features are vectors here and tokens are summed over, so x is needed with its width innermost.
  std::vector<float> transposed(size_t(rows) * C * K);
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(C) * kSpan);
    float* const features = scratch.take(size_t(C) * kSpan);
#pragma omp for collapse(2)
    for (int row = 0; row < rows; ++row) {
      for (int tile = 0; tile < K; tile += kTile) {
        const float* const from = x + (int64_t(row) * K + tile) * C;
        float* const to = transposed.data() + int64_t(row) * K * C + tile;
        for (int c = 0; c < C; ++c) {
          for (int a = 0; a < kTile; ++a) to[int64_t(c) * K + a] = from[int64_t(a) * C + c];
        }
      }
    }
#pragma omp for collapse(2) schedule(dynamic)
    for (int row = 0; row < rows; ++row) {
      for (int tile = 0; tile < K; tile += kTile) {
        const float* const own = transposed.data() + int64_t(row) * K * C;
        // Rows of the tiles before have K, K − 8, … features of each of eight.
        const int64_t before = tile * int64_t(K) - tile * int64_t(tile - kTile) / 2;
        float* part = state + int64_t(row) * V * P + before;
        for (int j = tile; j < K; j += kSpan / kTile, part += kSpan) {
          for (int c = 0; c < C; ++c) {
            const Tile first = *reinterpret_cast<const Tile*>(own + int64_t(c) * K + tile);
#pragma GCC unroll 4
            for (int d = 0; d < kSpan / kTile; ++d) {
              *reinterpret_cast<Tile*>(features + c * kSpan + d * kTile) =
                  first * own[int64_t(c) * K + j + d];
            }
          }
          multiply(V, values + int64_t(row) * V * C, C, 1, features, kSpan, C, part, P, keep[row]);
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
