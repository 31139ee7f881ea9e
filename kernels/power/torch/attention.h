// Causal attention inside chunks at degree 2: the passes of attention.py, block by block.
//
// An item is one block of C tokens of one row; items are sorted by blocks. Tensors are contiguous,
// with tokens innermost: q and k (items, K, C), values and sums (items, V, C), where V counts the
// row of ones, and sums of log2 γ (items, C), or null without gates. With a past, every block meets
// all earlier blocks of its row; otherwise only itself. A span of queries is processed at a time, so
// that its weights stay in the first or second cache.
#pragma once

#include "vectors.h"

namespace {

using Doubles = double __attribute__((vector_size(8 * kLanes)));

// 2^x for x ≤ 0, flushed to 0 up to 2^−64, as exp2_flushed_ of chunking.py.
inline Vector exp2_flushed(Vector x) {
  return Vector(Integers(exp2(x < -65.0f ? Vector{} - 65.0f : x)) & ~Integers(x <= -64.0f));
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

  // Weights of the squared scores of key i of the same block: 0 in the future.
  Vector causal(Vector squares, int half, int i) const {
    Integers token;
    for (int lane = 0; lane < kLanes; ++lane) token[lane] = first + half * kLanes + lane;
    if (log_decay != nullptr) squares *= since(log_decay[i], half);
    return Vector(Integers(squares) & Integers(token >= i));
  }

 private:
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

}  // namespace

extern "C" {

// sums (items, V, C) = Σ over keys of the weights (q·k)² · decay, times values.
void attend(const float* q, const float* k, const float* values, const double* log_decay,
            float* sums, int items, int rows, int has_past, int V, int K, int C, int threads) {
  const int64_t keys_size = int64_t(K) * C, values_size = int64_t(V) * C;
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    Scratch scratch(size_t(K + V + round_up(C)) * kSpan + round_up(C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const sum = scratch.take(size_t(V) * kSpan);
    float* const weights = scratch.take(size_t(round_up(C)) * kSpan);
    float* const before = scratch.take(round_up(C));
#pragma omp for collapse(2) schedule(dynamic)
    for (int backwards = 0; backwards < items; ++backwards) {  // the longest pasts first
      for (int first = 0; first < C; first += kSpan) {
        const int item = items - 1 - backwards;
        const double* const own = log_decay == nullptr ? nullptr : log_decay + int64_t(item) * C;
        const Span span(own, C, first);
        load_tokens(q + item * keys_size, K, C, first, query);
        std::fill_n(sum, V * kSpan, 0.0f);
        for (int past = item % rows; has_past && past < item; past += rows) {
          const double* const theirs = own == nullptr ? nullptr : log_decay + int64_t(past) * C;
          multiply(C, k + past * keys_size, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
          decays_before(theirs, own, C, before);
          for (int i = 0; i < C; ++i) {
            for (float* at = weights + i * kSpan; at < weights + (i + 1) * kSpan; at += kLanes) {
              store(at, load(at) * load(at) * before[i]);
            }
          }
          multiply(V, values + past * values_size, C, 1, weights, kSpan, C, sum, kSpan, 1.0f);
        }
        for (int half = 0; has_past && half < 2; ++half) {
          const Vector after = span.after(half);
          for (int v = 0; v < V; ++v) {
            float* const at = sum + v * kSpan + half * kLanes;
            store(at, load(at) * after);
          }
        }
        const int keys = std::min(C, first + kSpan);
        multiply(keys, k + item * keys_size, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
        for (int i = 0; i < keys; ++i) {
          for (int half = 0; half < 2; ++half) {
            float* const at = weights + i * kSpan + half * kLanes;
            store(at, span.causal(load(at) * load(at), half, i));
          }
        }
        multiply(V, values + item * values_size, C, 1, weights, kSpan, keys, sum, kSpan, 1.0f);
        store_tokens(sum, V, C, first, sums + item * values_size);
      }
    }
  }
}

// From dsums the gradients dq, and dk and dvalues, which are written, or added to. Scores are
// recomputed.
void attend_backward(const float* q, const float* k, const float* values, const double* log_decay,
                     const float* dsums, float* dq, float* dk, float* dvalues, int adds, int items,
                     int rows, int has_past, int V, int K, int C, int threads) {
  const int64_t keys_size = int64_t(K) * C, values_size = int64_t(V) * C;
  // Blocks of a row with a past add to the same gradients, so one thread processes them all.
  const int tasks = has_past ? rows : items;
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flushing;
    const size_t width = std::max(K, V);
    Scratch scratch((2 * K + 2 * V + width + kSpan) * size_t(kSpan) +
                    2 * size_t(round_up(C)) * kSpan + round_up(C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const dquery = scratch.take(size_t(K) * kSpan);
    float* const dsum = scratch.take(size_t(V) * kSpan);
    float* const dsum_after = scratch.take(size_t(V) * kSpan);
    float* const product = scratch.take(width * kSpan);
    float* const transposed = scratch.take(size_t(kSpan) * kSpan);
    float* const weights = scratch.take(size_t(round_up(C)) * kSpan);
    float* const dscores = scratch.take(size_t(round_up(C)) * kSpan);
    float* const before = scratch.take(round_up(C));
#pragma omp for schedule(dynamic)
    for (int task = 0; task < tasks; ++task) {
      for (int item = task; item < items; item += tasks) {
        if (!adds) {
          std::fill_n(dk + item * keys_size, keys_size, 0.0f);
          std::fill_n(dvalues + item * values_size, values_size, 0.0f);
        }
        const double* const own = log_decay == nullptr ? nullptr : log_decay + int64_t(item) * C;
        for (int first = 0; first < C; first += kSpan) {
          const Span span(own, C, first);
          load_tokens(q + item * keys_size, K, C, first, query);
          load_tokens(dsums + item * values_size, V, C, first, dsum);
          std::fill_n(dquery, K * kSpan, 0.0f);
          for (int half = 0; has_past && half < 2; ++half) {
            const Vector after = span.after(half);
            for (int v = 0; v < V; ++v) {
              const int at = v * kSpan + half * kLanes;
              store(dsum_after + at, load(dsum + at) * after);
            }
          }
          // The earlier blocks of the row, and the block itself.
          for (int block = has_past ? task : item; block <= item; block += tasks) {
            const bool is_own = block == item;
            const int keys = is_own ? std::min(C, first + kSpan) : C;
            const float* const dsums_of = is_own ? dsum : dsum_after;
            const float* const their_k = k + block * keys_size;
            multiply(keys, their_k, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
            multiply(keys, values + block * values_size, 1, C, dsums_of, kSpan, V, dscores, kSpan,
                     0.0f);
            if (!is_own) {
              const double* const theirs =
                  own == nullptr ? nullptr : log_decay + int64_t(block) * C;
              decays_before(theirs, own, C, before);
            }
            for (int i = 0; i < keys; ++i) {
              for (int half = 0; half < 2; ++half) {
                const int at = i * kSpan + half * kLanes;
                const Vector score = load(weights + at);
                const Vector slope = score * load(dscores + at) * 2.0f;
                if (is_own) {
                  store(weights + at, span.causal(score * score, half, i));
                  store(dscores + at, span.causal(slope, half, i));
                } else {
                  store(weights + at, score * score * before[i]);
                  store(dscores + at, slope * before[i]);
                }
              }
            }
            multiply(K, their_k, C, 1, dscores, kSpan, keys, dquery, kSpan, 1.0f);
            add_transposed(query, K, dscores, keys, C, transposed, product,
                           dk + block * keys_size);
            add_transposed(dsums_of, V, weights, keys, C, transposed, product,
                           dvalues + block * values_size);
          }
          store_tokens(dquery, K, C, first, dq + item * keys_size);
        }
      }
    }
  }
}

}  // extern "C"
