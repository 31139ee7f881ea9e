// Causal attention inside chunks at degrees 1 and 2: the passes of attention.py, block by block.
//
// Blocks of C tokens have them innermost: q and k (K, C), values and sums (V, C), where V counts the
// row of ones, and sums of log2 γ (C), or null without gates. A span of queries is processed at a
// time, so that its weights stay in the first or second cache.
#pragma once

#include "vectors.h"

namespace {

using Doubles = double __attribute__((vector_size(8 * kLanes)));

// 2^x for x ≤ 0, flushed to 0 up to 2^−64, as exp2_flushed_ of chunking.py. Positive ones, those of
// keys in the future, are taken for 0.
inline Vector exp2_flushed(Vector x) {
  const Vector lower = x > 0.0f ? Vector{} : x;
  return Vector(Integers(exp2(lower < -65.0f ? Vector{} - 65.0f : lower)) & ~Integers(x <= -64.0f));
}

// The decays of a span of queries, from log decays of their block.
struct Span {
  const double* log_decay;  // of the block, or null
  double own[kSpan];        // of the queries; absent ones have the last one's
  int first;

  Span(const double* log_decay, int C, int first) : log_decay(log_decay), first(first) {
    if (log_decay == nullptr) return;
    for (int t = 0; t < kSpan; ++t) own[t] = log_decay[std::min(first + t, C - 1)];
  }

  // From the first token of the block to the queries, in vector `half` of the span.
  Vector after(int half) const {
    return log_decay == nullptr ? Vector{} + 1.0f : since(log_decay[0], half);
  }

  // Weights of key i of the same block from powers of its scores: 0 in the future.
  Vector causal(Vector powers, int half, int i) const {
    if (log_decay != nullptr) powers *= since(log_decay[i], half);
    return present(powers, half, i);
  }

  // x, or 0 where key i is in the future.
  Vector present(Vector x, int half, int i) const {
    Integers token;
    for (int lane = 0; lane < kLanes; ++lane) token[lane] = first + half * kLanes + lane;
    return Vector(Integers(x) & Integers(token >= i));
  }

  // From a token with this sum of log2 γ to the queries.
  Vector since(double from, int half) const {
    const double* const at = own + half * kLanes;
    Doubles difference;
    for (int lane = 0; lane < kLanes; ++lane) difference[lane] = at[lane] - from;
    return exp2_flushed(__builtin_convertvector(difference, Vector));
  }
};

// Decays (C) from the keys of an earlier block to the first token of the queries' block.
void decays_before(const double* keys, const double* queries, int C, float* before) {
  for (int i = 0; i < C; i += kLanes) {
    Vector difference = {};
    for (int lane = 0; lane < std::min(kLanes, C - i) && keys != nullptr; ++lane) {
      difference[lane] = float(queries[0] - keys[i + lane]);
    }
    store(before + i, exp2_flushed(difference));
  }
}

int round_up(int count) { return (count + kSpan - 1) / kSpan * kSpan; }

// out (width, C) += the product of a (width, kSpan queries) and the transpose of b (keys, kSpan). Whole
// squares of b are read; what follows its keys reaches only columns beyond C, which are not stored.
void add_transposed(const float* a, int width, const float* b, int keys, int C, float* transposed,
                    float* product, float* out) {
  for (int first = 0; first < keys; first += kSpan, b += kSpan * kSpan) {
    for (int key = 0; key < kSpan; key += kLanes) {
      for (int query = 0; query < kSpan; query += kLanes) {
        Vector square[kLanes];
#pragma GCC unroll 16
        for (int n = 0; n < kLanes; ++n) square[n] = load(b + (key + n) * kSpan + query);
        transpose(square);
#pragma GCC unroll 16
        for (int n = 0; n < kLanes; ++n) {
          store(transposed + (query + n) * kSpan + key, square[n]);
        }
      }
    }
    multiply(width, a, kSpan, 1, transposed, kSpan, kSpan, product, kSpan, 0.0f);
    for (int r = 0; r < width; ++r) {
      float* const to = out + int64_t(r) * C + first;
      for (int c = 0; c < std::min(kSpan, C - first); ++c) to[c] += product[r * kSpan + c];
    }
  }
}

// The blocks of one row. Block n starts n times its stride behind the first.
struct Row {
  const float* k;
  const float* values;
  const double* log_decay;
  int64_t k_stride, values_stride, decay_stride;
  int V, K, C;

  const double* decays(int block) const {
    return log_decay == nullptr ? nullptr : log_decay + block * decay_stride;
  }
};

// Calls body(degree as a constant).
template <typename Body>
void for_degree(int degree, const Body& body) {
  if (degree == 1) {
    body(std::integral_constant<int, 1>{});
  } else {
    body(std::integral_constant<int, 2>{});
  }
}

template <int Degree>
inline Vector power(Vector score) {
  return Degree == 1 ? score : score * score;
}

// The gradient of a score from that of its power.
template <int Degree>
inline Vector power_gradient(Vector score, Vector dpower) {
  return Degree == 1 ? dpower : score * dpower * 2.0f;
}

// Memory of one thread for the weights of a span of queries and of the keys of a block.
struct Weights {
  float* weights;  // (C, kSpan)
  float* before;   // (C)
  // For a backward pass alone:
  float* dscores;     // (C, kSpan)
  float* dsum;        // (V, kSpan)
  float* transposed;  // (kSpan, kSpan)
  float* product;     // (max(K, V), kSpan)

  static size_t size(int V, int K, int C) {
    return size_t(2 * round_up(C) + V + kSpan + std::max(K, V)) * kSpan + round_up(C);
  }

  Weights(Scratch& scratch, int V, int K, int C)
      : weights(scratch.take(size_t(round_up(C)) * kSpan)),
        before(scratch.take(round_up(C))),
        dscores(scratch.take(size_t(round_up(C)) * kSpan)),
        dsum(scratch.take(size_t(V) * kSpan)),
        transposed(scratch.take(size_t(kSpan) * kSpan)),
        product(scratch.take(size_t(std::max(K, V)) * kSpan)) {}
};

// sum (V, kSpan) = Σ over keys of the weights (q·k)^Degree · decay, times values. The queries are those
// from token `first` of a block, and meet the blocks from `oldest` on.
template <int Degree>
void attend_span(const Row& row, int oldest, int block, int first, const float* query,
                 const Weights& own, float* sum) {
  const int V = row.V, K = row.K, C = row.C;
  const double* const decays = row.decays(block);
  const Span span(decays, C, first);
  float* const weights = own.weights;
  std::fill_n(sum, size_t(V) * kSpan, 0.0f);
  for (int past = oldest; past < block; ++past) {
    multiply(C, row.k + past * row.k_stride, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
    decays_before(row.decays(past), decays, C, own.before);
    for (int i = 0; i < C; ++i) {
      for (float* at = weights + i * kSpan; at < weights + (i + 1) * kSpan; at += kLanes) {
        store(at, power<Degree>(load(at)) * own.before[i]);
      }
    }
    multiply(V, row.values + past * row.values_stride, C, 1, weights, kSpan, C, sum, kSpan, 1.0f);
  }
  for (int half = 0; oldest < block && half < 2; ++half) {
    const Vector after = span.after(half);
    for (int v = 0; v < V; ++v) {
      float* const at = sum + v * kSpan + half * kLanes;
      store(at, load(at) * after);
    }
  }
  const int keys = std::min(C, first + kSpan);
  multiply(keys, row.k + block * row.k_stride, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
  for (int i = 0; i < keys; ++i) {
    for (int half = 0; half < 2; ++half) {
      float* const at = weights + i * kSpan + half * kLanes;
      store(at, span.causal(power<Degree>(load(at)), half, i));
    }
  }
  multiply(V, row.values + block * row.values_stride, C, 1, weights, kSpan, keys, sum, kSpan, 1.0f);
}

// From dsum (V, kSpan) dquery (K, kSpan), and what it adds to dk and dvalues, which have the strides
// of k and values. Scores are recomputed.
template <int Degree>
void attend_span_backward(const Row& row, int oldest, int block, int first, const float* query,
                          const float* dsum, const Weights& own, float* dquery, float* dk,
                          float* dvalues) {
  const int V = row.V, K = row.K, C = row.C;
  const double* const decays = row.decays(block);
  const Span span(decays, C, first);
  float *const weights = own.weights, *const dscores = own.dscores;
  std::fill_n(dquery, size_t(K) * kSpan, 0.0f);
  for (int half = 0; oldest < block && half < 2; ++half) {
    const Vector after = span.after(half);
    for (int v = 0; v < V; ++v) {
      const int at = v * kSpan + half * kLanes;
      store(own.dsum + at, load(dsum + at) * after);
    }
  }
  for (int other = oldest; other <= block; ++other) {
    const bool is_own = other == block;
    const int keys = is_own ? std::min(C, first + kSpan) : C;
    const float* const dsums = is_own ? dsum : own.dsum;
    const float* const k = row.k + other * row.k_stride;
    const float* const values = row.values + other * row.values_stride;
    multiply(keys, k, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
    multiply(keys, values, 1, C, dsums, kSpan, V, dscores, kSpan, 0.0f);
    if (!is_own) decays_before(row.decays(other), decays, C, own.before);
    for (int i = 0; i < keys; ++i) {
      for (int half = 0; half < 2; ++half) {
        const int at = i * kSpan + half * kLanes;
        const Vector score = load(weights + at);
        const Vector weight = power<Degree>(score);
        const Vector dscore = power_gradient<Degree>(score, load(dscores + at));
        if (is_own) {
          store(weights + at, span.causal(weight, half, i));
          store(dscores + at, span.causal(dscore, half, i));
        } else {
          store(weights + at, weight * own.before[i]);
          store(dscores + at, dscore * own.before[i]);
        }
      }
    }
    multiply(K, k, C, 1, dscores, kSpan, keys, dquery, kSpan, 1.0f);
    add_transposed(query, K, dscores, keys, C, own.transposed, own.product,
                   dk + other * row.k_stride);
    add_transposed(dsums, V, weights, keys, C, own.transposed, own.product,
                   dvalues + other * row.values_stride);
  }
}

// The rows of items (blocks, rows, …), one behind the other.
Row row_of_items(const float* k, const float* values, const double* log_decay, int rows, int row,
                 int V, int K, int C) {
  const int64_t k_size = int64_t(K) * C, values_size = int64_t(V) * C;
  return {k + row * k_size,
          values + row * values_size,
          log_decay == nullptr ? nullptr : log_decay + int64_t(row) * C,
          rows * k_size,
          rows * values_size,
          int64_t(rows) * C,
          V,
          K,
          C};
}

}  // namespace

extern "C" {

// sums (items, V, C), where an item is one block of one row, and items are sorted by blocks. With a
// past, every block meets all earlier blocks of its row; otherwise only itself.
void attend(const float* q, const float* k, const float* values, const double* log_decay,
            float* sums, int degree, int items, int rows, int has_past, int V, int K, int C,
            int threads) {
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(K + V) * kSpan + Weights::size(V, K, C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const sum = scratch.take(size_t(V) * kSpan);
    const Weights own(scratch, V, K, C);
#pragma omp for collapse(2) schedule(dynamic)
    for (int backwards = 0; backwards < items; ++backwards) {  // the longest pasts first
      for (int first = 0; first < C; first += kSpan) {
        const int item = items - 1 - backwards, block = item / rows;
        const Row row = row_of_items(k, values, log_decay, rows, item % rows, V, K, C);
        load_tokens(q + int64_t(item) * K * C, K, C, first, query);
        for_degree(degree, [&](auto p) {
          attend_span<p>(row, has_past ? 0 : block, block, first, query, own, sum);
        });
        store_tokens(sum, V, C, first, sums + int64_t(item) * V * C);
      }
    }
  }
}

// From dsums the gradients dq, and dk and dvalues, which are written, or added to.
void attend_backward(const float* q, const float* k, const float* values, const double* log_decay,
                     const float* dsums, float* dq, float* dk, float* dvalues, int adds,
                     int degree, int items, int rows, int has_past, int V, int K, int C,
                     int threads) {
  const int64_t k_size = int64_t(K) * C, values_size = int64_t(V) * C;
  // Blocks of a row with a past add to the same gradients, so one thread processes them all.
  const int tasks = has_past ? rows : items;
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(2 * K + V) * kSpan + Weights::size(V, K, C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const dquery = scratch.take(size_t(K) * kSpan);
    float* const dsum = scratch.take(size_t(V) * kSpan);
    const Weights own(scratch, V, K, C);
#pragma omp for schedule(dynamic)
    for (int task = 0; task < tasks; ++task) {
      for (int item = task; item < items; item += tasks) {
        if (!adds) {
          std::fill_n(dk + item * k_size, k_size, 0.0f);
          std::fill_n(dvalues + item * values_size, values_size, 0.0f);
        }
        const int n = item % rows, block = item / rows;
        const Row row = row_of_items(k, values, log_decay, rows, n, V, K, C);
        for (int first = 0; first < C; first += kSpan) {
          load_tokens(q + item * k_size, K, C, first, query);
          load_tokens(dsums + item * values_size, V, C, first, dsum);
          for_degree(degree, [&](auto p) {
            attend_span_backward<p>(row, has_past ? 0 : block, block, first, query, dsum, own,
                                    dquery, dk + n * k_size, dvalues + n * values_size);
          });
          store_tokens(dquery, K, C, first, dq + item * k_size);
        }
      }
    }
  }
}

}  // extern "C"
