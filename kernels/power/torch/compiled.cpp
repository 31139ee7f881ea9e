// What torch does slowly on a CPU, in float32: products with φ(x) at degree 2, and transposed copies.
//
// In the products features are made in registers and used there, so no φ is ever written to memory. README.md,
// section 3, defines their layout: in the row of a tile I, x[j] x[8 I + a] for j ≥ 8 I and a < 8.
// Entries beyond the diagonal tile represent two orderings, eq. (7): a state is multiplied as it is
// read. Tensors are contiguous: x (rows, K, C) with K in whole tiles and tokens innermost, a state
// (rows, V, P) and values (rows, V, C), where V counts the norm too.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
constexpr int kTile = 8;
constexpr int kSpan = 2 * kLanes;  // tokens, or features, that are processed at a time
// Rows of a state or of values that are summed at a time, in two registers each.
constexpr int kRows = kRegisters == 32 ? 13 : 6;

using Vector = float __attribute__((vector_size(4 * kLanes)));
using Unaligned = float __attribute__((vector_size(4 * kLanes), aligned(4)));
using Tile = float __attribute__((vector_size(4 * kTile), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Unaligned*>(to) = x; }

// Memory of one thread that starts at a cache line, so that no load crosses one.
class Scratch {
 public:
  explicit Scratch(size_t floats) : memory_(floats + 16) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    next_ = memory_.data() + (64 - address % 64) % 64 / sizeof(float);
  }
  float* take(size_t floats) {
    float* const taken = next_;
    next_ += floats;
    return taken;
  }

 private:
  std::vector<float> memory_;
  float* next_;
};

// Copies the tokens from `first` on, of `width` rows of C, and fills up with zeros.
void load_tokens(const float* from, int width, int C, int first, float* to) {
  const int present = std::min(kSpan, C - first);
  for (int k = 0; k < width; ++k, to += kSpan) {
    std::copy_n(from + int64_t(k) * C + first, present, to);
    std::fill(to + present, to + kSpan, 0.0f);
  }
}

void store_tokens(const float* from, int width, int C, int first, float* to) {
  const int present = std::min(kSpan, C - first);
  for (int k = 0; k < width; ++k, from += kSpan) {
    std::copy_n(from, present, to + int64_t(k) * C + first);
  }
}

// The transpose of a square: of its quarters, of their quarters, and so on.
inline void transpose(Vector (&x)[kLanes]) {
  using Lanes = int32_t __attribute__((vector_size(4 * kLanes)));
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    Lanes upper, lower;
    for (int lane = 0; lane < kLanes; ++lane) {
      upper[lane] = lane & half ? lane - half + kLanes : lane;
      lower[lane] = lane & half ? lane + kLanes : lane + half;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if (row & half) continue;
      const Vector above = x[row], below = x[row + half];
      x[row] = __builtin_shuffle(above, below, upper);
      x[row + half] = __builtin_shuffle(above, below, lower);
    }
  }
}

inline void copy_square(const float* from, int64_t from_column, float* to, int64_t to_row,
                        float scale, bool adds) {
  Vector x[kLanes];
#pragma GCC unroll 16
  for (int column = 0; column < kLanes; ++column) x[column] = load(from + column * from_column);
  transpose(x);
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    float* const at = to + row * to_row;
    store(at, adds ? load(at) + x[row] * scale : x[row] * scale);
  }
}

// Calls body(number of rows as a constant, first row) for about equal parts of V rows.
template <typename Body, int Rows = kRows>
void call_with(int rows, int first, const Body& body) {
  if constexpr (Rows > 0) {
    if (rows == Rows) {
      body(std::integral_constant<int, Rows>{}, first);
    } else {
      call_with<Body, Rows - 1>(rows, first, body);
    }
  }
}

template <typename Body>
void for_rows(int V, const Body& body) {
  for (int first = 0, parts = (V + kRows - 1) / kRows; parts > 0; --parts) {
    const int rows = (V - first) / parts;
    call_with(rows, first, body);
    first += rows;
  }
}

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

// state (Rows, kSpan features) = keep · state + Σ over tokens of values · features (C, kSpan).
template <int Rows>
void add_features(
    float* state, int64_t P, const float* features, const float* values, int C, float keep) {
  Vector sum[Rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    // Not 0 · state, which may be uninitialised.
    sum[r][0] = keep == 0 ? Vector{} : load(state + r * P) * keep;
    sum[r][1] = keep == 0 ? Vector{} : load(state + r * P + kLanes) * keep;
  }
  for (int c = 0; c < C; ++c) {
    const Vector feature0 = load(features + c * kSpan);
    const Vector feature1 = load(features + c * kSpan + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const float value = values[r * int64_t(C) + c];
      sum[r][0] += feature0 * value;
      sum[r][1] += feature1 * value;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    store(state + r * P, sum[r][0]);
    store(state + r * P + kLanes, sum[r][1]);
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
          for_rows(V, [&](auto count, int v) {
            add_features<count>(part + int64_t(v) * P, P, features,
                                values + (int64_t(row) * V + v) * C, C, keep[row]);
          });
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

// to = scale · from, or to += scale · from. Both have the same five sizes, and strides in numbers:
// the fourth is 1 in `from`, the fifth in `to`.
void copy_transposed(const float* from, float* to, const int64_t* sizes,
                     const int64_t* from_strides, const int64_t* to_strides, float scale, int adds,
                     int threads) {
  const int64_t rows = sizes[3], columns = sizes[4];
  const int64_t from_column = from_strides[4], to_row = to_strides[3];
#pragma omp parallel for collapse(4) num_threads(threads)
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      for (int64_t k = 0; k < sizes[2]; ++k) {
        for (int64_t row = 0; row < rows; row += kLanes) {
          const float* source = from + i * from_strides[0] + j * from_strides[1] +
                                k * from_strides[2] + row;
          float* target = to + i * to_strides[0] + j * to_strides[1] + k * to_strides[2] +
                          row * to_row;
          for (int64_t column = 0; column < columns; column += kLanes) {
            if (row + kLanes <= rows && column + kLanes <= columns) {
              copy_square(source, from_column, target, to_row, scale, adds);
            } else {
              for (int64_t r = 0; r < std::min<int64_t>(kLanes, rows - row); ++r) {
                for (int64_t c = 0; c < std::min<int64_t>(kLanes, columns - column); ++c) {
                  float& entry = target[r * to_row + c];
                  entry = scale * source[c * from_column + r] + (adds ? entry : 0.0f);
                }
              }
            }
            source += kLanes * from_column;
            target += kLanes;
          }
        }
      }
    }
  }
}

}  // extern "C"
